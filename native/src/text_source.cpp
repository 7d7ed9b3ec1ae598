#include "text_source.hpp"

#include "error.hpp"
#include "text_prior.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace eagle3 {

namespace {

constexpr float LEAST_REACH = 0.02f;  // nothing below such a node is worth a row
constexpr int MOST_WIDTH    = 4;      // different tokens that are offered after one node
constexpr int LEAST_NODES   = 8;      // that are offered to each of many slots, for whom there are few rows

}  // namespace

text_source::text_source(int n_slots, int n_ctx)
    : n_ctx_(n_ctx), slots_(n_slots, text{0, suffix_index(n_ctx)}) {}

// -- drafts -----------------------------------------------------------------------------------------------

// The last tokens of the path from the slot's text to a node, which is the last of them.
std::vector<int32_t> text_source::last_tokens(const growth & g, int ask, int node) const {
    const suffix_index & index = slots_[g.asks[ask].slot].index;
    std::vector<int32_t> path;
    for (int v = node; v >= 0; v = g.nodes[v].parent) {
        path.push_back(g.nodes[v].token);
    }
    path.push_back(g.asks[ask].token);
    for (int i = index.size() - 1; i >= 0 && (int) path.size() < suffix_index::MAX_MATCH; --i) {
        path.push_back(index[i]);
    }
    path.resize(std::min<size_t>(path.size(), suffix_index::MAX_MATCH));
    std::reverse(path.begin(), path.end());
    return path;
}

void text_source::begin(growth & g, const std::vector<int> & asks) {
    for (const int a : asks) {
        const std::vector<int32_t> last = last_tokens(g, a, -1);
        grow(g, a, -1, last.data(), (int) last.size());
    }
}

void text_source::follow(growth & g, const std::vector<int> & nodes) {
    for (const int v : nodes) {
        if (g.nodes[v].reach >= LEAST_REACH) {
            const std::vector<int32_t> last = last_tokens(g, g.nodes[v].ask, v);
            grow(g, g.nodes[v].ask, v, last.data(), (int) last.size());
        }
    }
}

// Offers what may follow a node, the likeliest paths first, and no more than the ask may draft.
void text_source::grow(growth & g, int ask, int node, const int32_t * last, int n_last) {
    const suffix_index & index = slots_[g.asks[ask].slot].index;
    const auto less            = [](const open_node & a, const open_node & b) {
        return a.reach < b.reach;
    };
    const int share   = std::max(2 * EAGLE3_MAX_DRAFT / std::max(g.n_asks, 1), LEAST_NODES);
    const size_t most = g.nodes.size() + std::clamp(g.asks[ask].n_max, 0, share);
    pool_.resize(suffix_index::N_FOUND);
    const int n = index.find(last, n_last, pool_.data());
    pool_.resize(n);
    open_.clear();
    if (n > 0) {
        open_.push_back({node, 0, n, node < 0 ? 1.0f : g.nodes[node].reach});
    }
    while (!open_.empty() && g.nodes.size() < most) {
        std::pop_heap(open_.begin(), open_.end(), less);
        const open_node from = open_.back();
        open_.pop_back();
        const size_t n_open = open_.size();
        offer_children(g, ask, from);
        for (size_t i = n_open; i < open_.size(); ++i) {
            std::push_heap(open_.begin(), open_.begin() + i + 1, less);
        }
    }
}

// Offers the tokens that the matches of a node say, and opens those that are likely enough.
void text_source::offer_children(growth & g, int ask, const open_node & from) {
    const text & t = slots_[g.asks[ask].slot];
    struct child {
        int32_t token;
        int length = 0, n = 0;  // its longest match, its matches
        int n_other = 0;        // matches of that length that say another token
        float q     = 0.0f;
    };
    std::vector<child> children;
    for (int i = from.first; i < from.first + from.n; ++i) {
        const int32_t token = t.index[pool_[i].next];
        auto c =
            std::find_if(children.begin(), children.end(), [&](const child & k) { return k.token == token; });
        if (c == children.end()) {
            c = children.insert(c, child{token});
        }
        c->length = std::max(c->length, (int) pool_[i].length);
        ++c->n;
    }
    for (child & c : children) {
        for (int i = from.first; i < from.first + from.n; ++i) {
            c.n_other += pool_[i].length >= c.length && t.index[pool_[i].next] != c.token;
        }
        c.q = text_prior(c.length, c.n, c.n_other);
    }
    std::stable_sort(
        children.begin(), children.end(), [](const child & a, const child & b) { return a.q > b.q; });
    children.resize(std::min<size_t>(children.size(), std::min(MOST_WIDTH, g.asks[ask].width)));
    for (int k = 0; k < (int) children.size(); ++k) {
        const int node    = g.offer(id, ask, from.node, children[k].token, children[k].q, k);
        const float reach = g.nodes[node].reach;
        const int first   = (int) pool_.size();
        for (int i = from.first; i < from.first + from.n && reach >= LEAST_REACH; ++i) {
            const suffix_index::match m = pool_[i];
            if (t.index[m.next] == children[k].token && m.next + 1 < t.index.size()) {
                pool_.push_back({m.next + 1, std::min(m.length + 1, (int32_t) suffix_index::MAX_MATCH)});
            }
        }
        if ((int) pool_.size() > first) {
            open_.push_back({node, first, (int) pool_.size() - first, reach});
        }
    }
}

int text_source::match(int slot, int32_t token) const {
    const suffix_index & index = slots_[slot].index;
    std::vector<int32_t> last;
    for (int i = std::max(index.size() + 1 - suffix_index::MAX_MATCH, 0); i < index.size(); ++i) {
        last.push_back(index[i]);
    }
    last.push_back(token);
    std::array<suffix_index::match, suffix_index::N_FOUND> found;
    const int n = index.find(last.data(), (int) last.size(), found.data());
    int longest = 0;
    for (int i = 0; i < n; ++i) {
        longest = std::max(longest, (int) found[i].length);
    }
    return longest;
}

// -- the text ---------------------------------------------------------------------------------------------

void text_source::kept(const kept_tokens & k) {
    text & t = slots_[k.slot];
    if (k.pos != t.from + t.index.size()) {
        reset(k.slot, k.pos);
    }
    try {
        for (const int32_t token : k.tokens) {
            t.index.append(token);
        }
    } catch (...) {  // the target has these tokens
        reset(k.slot, k.pos + (int) k.tokens.size());
        throw;
    }
}

void text_source::rewind(int slot, int n_past) {
    text & t = slots_[slot];
    t.index.truncate(std::max(n_past - t.from, 0));
    t.from = std::min(t.from, n_past);
}

void text_source::reset(int slot, int n_past) {
    slots_[slot].index.clear();
    slots_[slot].from = n_past;
}

// -- state ------------------------------------------------------------------------------------------------

namespace {

constexpr char MAGIC[8] = {'E', '3', 'T', 'E', 'X', 'T', '1', 0};

}  // namespace

struct text_source::state_header {
    char magic[8];
    int32_t from, n;
};

int64_t text_source::state_size(int slot) const {
    return (int64_t) (sizeof(state_header) + slots_[slot].index.size() * sizeof(int32_t));
}

void text_source::save(int slot, int /* n_past */, uint8_t * out) const {
    const text & t = slots_[slot];
    state_header h = {{}, t.from, t.index.size()};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    memcpy(out, &h, sizeof(h));
    if (h.n > 0) {
        memcpy(out + sizeof(h), t.index.data(), h.n * sizeof(int32_t));
    }
}

int64_t text_source::check(const uint8_t * data, int64_t size) const {
    state_header h = {};
    memcpy(&h, data, std::min((size_t) std::max<int64_t>(size, 0), sizeof(h)));
    const bool ok = memcmp(h.magic, MAGIC, sizeof(MAGIC)) == 0 && h.from >= 0 && h.n >= 0 &&
                    h.from <= n_ctx_ && h.n <= n_ctx_ - h.from &&
                    size >= (int64_t) (sizeof(h) + h.n * sizeof(int32_t));
    require(ok, EAGLE3_E_FORMAT, "the state is damaged or belongs to another head");
    return (int64_t) (sizeof(h) + h.n * sizeof(int32_t));
}

int text_source::saved_n_past(const uint8_t * data) {
    state_header h;
    memcpy(&h, data, sizeof(h));
    return h.from + h.n;
}

void text_source::restore(int slot, int n_past, const uint8_t * data) {
    state_header h;
    memcpy(&h, data, sizeof(h));
    reset(slot, n_past);
    if (h.from + h.n != n_past) {  // of another text than the head's part
        return;
    }
    try {
        slots_[slot].from = h.from;
        for (int i = 0; i < h.n; ++i) {
            int32_t token;
            memcpy(&token, data + sizeof(h) + i * sizeof(token), sizeof(token));
            slots_[slot].index.append(token);
        }
    } catch (const std::bad_alloc &) {  // it starts over: the other sources have restored theirs
        reset(slot, n_past);
    }
}

}  // namespace eagle3
