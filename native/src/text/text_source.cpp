#include "text/text_source.hpp"

#include "error.hpp"
#include "text/text_prior.hpp"
#include "planner/tuning.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace eagle3 {

text_source::text_source(int n_slots, int n_ctx, int n_vocab, uint64_t model)
    : n_ctx_(n_ctx), n_vocab_(n_vocab), model_(model),
      slots_(n_slots, text{0, suffix_index(n_ctx), nullptr}) {}

// -- drafts -----------------------------------------------------------------------------------------------

// Returns the last tokens of the path from the slot's text to a node, which is the last of them.
std::vector<int32_t> text_source::last_tokens(const draft_tree & g, int ask, int node) const {
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

// Finds what stands in the slot's text and, if it is to be remembered, in its memory: the longest matches.
void text_source::find(
    int slot, const std::vector<int32_t> & last, bool remembered, std::vector<found> & out) const {
    const text & t = slots_[slot];
    std::array<suffix_index::match, suffix_index::N_FOUND> at;
    out.clear();
    const auto search = [&](const suffix_index & in, int least) {
        const int n = in.find(last.data(), (int) last.size(), at.data());
        for (int i = 0; i < n; ++i) {
            if (at[i].length >= least && in[at[i].next] != text_memory::END) {
                out.push_back({&in, at[i].next, at[i].length});
            }
        }
    };
    search(t.index, 1);
    if (remembered && t.memory) {
        for (const suffix_index * half : t.memory->halves()) {
            search(*half, tree_limits::least_match);
        }
        std::stable_sort(
            out.begin(), out.end(), [](const found & a, const found & b) { return a.length > b.length; });
        out.resize(std::min<size_t>(out.size(), suffix_index::N_FOUND));
    }
}

void text_source::begin(draft_tree & g, const std::vector<int> & asks) {
    for (const int a : asks) {
        grow(g, a, -1);
    }
}

void text_source::follow(draft_tree & g, const std::vector<int> & nodes) {
    for (const int v : nodes) {
        if (g.nodes[v].reach >= tree_limits::least_reach && g.goes_on(g.nodes[v])) {
            grow(g, g.nodes[v].ask, v);
        }
    }
}

// Offers what may follow a node, the likeliest paths first, and no more than the ask may draft.
// The memory is asked after the ask's own token alone: its search takes several times as long as the text's.
void text_source::grow(draft_tree & g, int ask, int node) {
    const auto less = [](const open_node & a, const open_node & b) {
        return a.reach < b.reach;
    };
    const int share = std::max(2 * EAGLE3_MAX_DRAFT / std::max(g.n_asks, 1), (int) tree_limits::least_nodes);
    const size_t most = g.nodes.size() + std::clamp(g.asks[ask].n_max, 0, share);
    find(g.asks[ask].slot, last_tokens(g, ask, node), node < 0, pool_);
    open_.clear();
    if (!pool_.empty()) {
        open_.push_back({node, 0, (int) pool_.size(), node < 0 ? 1.0f : g.nodes[node].reach});
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
void text_source::offer_children(draft_tree & g, int ask, const open_node & from) {
    struct child {
        int32_t token;
        int length = 0, n = 0;  // its longest match, its matches
        int n_other = 0;        // matches of that length that say another token
        float q     = 0.0f;
    };
    std::vector<child> children;
    for (int i = from.first; i < from.first + from.n; ++i) {
        const int32_t token = pool_[i].token();
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
            c.n_other += pool_[i].length >= c.length && pool_[i].token() != c.token;
        }
        c.q = text_prior(c.length, c.n, c.n_other);
    }
    std::stable_sort(
        children.begin(), children.end(), [](const child & a, const child & b) { return a.q > b.q; });
    children.resize(
        std::min<size_t>(children.size(), std::min<int>(tree_limits::most_width, g.asks[ask].width)));
    for (int k = 0; k < (int) children.size(); ++k) {
        const int node    = g.offer(id, ask, from.node, children[k].token, children[k].q, k);
        const float reach = g.nodes[node].reach;
        const int first   = (int) pool_.size();
        const bool opens  = reach >= tree_limits::least_reach && g.goes_on(g.nodes[node]);
        for (int i = from.first; i < from.first + from.n && opens; ++i) {
            const found m = pool_[i];
            const found next{m.in, m.next + 1, std::min(m.length + 1, (int32_t) suffix_index::MAX_MATCH)};
            if (m.token() == children[k].token && next.next < m.in->size() &&
                next.token() != text_memory::END) {
                pool_.push_back(next);
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
    std::vector<found> places;
    find(slot, last, true, places);
    int longest = 0;
    for (const found & f : places) {
        longest = std::max(longest, (int) f.length);
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

constexpr char MAGIC[8] = {'E', '3', 'T', 'E', 'X', 'T', '2', 0};

}  // namespace

struct text_source::state_header {
    char magic[8];
    uint64_t model;
    int32_t from, n;
};

int64_t text_source::state_size(int slot) const {
    return (int64_t) (sizeof(state_header) + slots_[slot].index.size() * sizeof(int32_t));
}

void text_source::save(int slot, int /* n_past */, uint8_t * out) const {
    const text & t = slots_[slot];
    state_header h = {{}, model_, t.from, t.index.size()};
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
    require(ok, EAGLE3_E_FORMAT, "the state is damaged, or belongs to another head or context");
    require(h.model == model_, EAGLE3_E_FORMAT, "the state belongs to another model");
    for (int i = 0; i < h.n; ++i) {
        int32_t token;
        memcpy(&token, data + sizeof(h) + i * sizeof(token), sizeof(token));
        require(token >= 0 && token < n_vocab_, EAGLE3_E_FORMAT,
            format("the state is damaged: its token %d is not in the vocabulary", token));
    }
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
    if (h.from + h.n != n_past) {  // it is another text than the head's part
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
