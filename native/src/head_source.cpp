#include "head_source.hpp"

#include "capture.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace eagle3 {

namespace {

constexpr int MAX_PENDING = 256;  // features that may wait for a draft; more are fed without one
constexpr int MAX_CELLS   = 64;   // of the head's cache, for one draft of a slot: bits of a path

}  // namespace

head_source::head_source(llama_context * ctx, const head & h, int n_slots, int n_ctx)
    : ctx_(ctx), h_(h), runner_(h, n_slots, n_ctx, ctx), n_ctx_(n_ctx), slots_(n_slots) {
    set_capture(true);
}

head_source::~head_source() {
    try {
        set_capture(false);
    } catch (const std::exception &) {
    }
}

void head_source::set_capture(bool on) {
    if (on != capture_) {
        capture_set(ctx_, h_.layers.data(), on ? (int) h_.layers.size() : 0);
        capture_ = on;
    }
}

bool head_source::needs_all_logits() const {
    return capture_ && h_.layers.back() == llama_model_n_layer(h_.target);
}

// -- the text ---------------------------------------------------------------------------------------------

void head_source::kept(const kept_tokens & k) {
    seen & s         = slots_[k.slot];
    const int n_past = k.pos + (int) k.tokens.size();
    if (!capture_) {
        s.clear_pending(n_past);  // what waited is not followed by what comes next
        return;
    }
    try {
        take(k);
    } catch (const error & e) {
        s.clear_pending(n_past);
        // E_ARGUMENT says that nothing has changed, but the target has these tokens.
        throw error(e.status == EAGLE3_E_ARGUMENT ? EAGLE3_E_INTERNAL : e.status, e.what());
    } catch (...) {
        s.clear_pending(n_past);
        throw;
    }
}

void head_source::take(const kept_tokens & k) {
    seen & s = slots_[k.slot];
    if (n_pending(s) > 0) {
        s.tokens.resize(n_pending(s) - 1);  // a draft that failed has left the token that it was for
        s.tokens.push_back(k.tokens[0]);
    }
    begin_pending(s, k.pos);
    append_features(s, k);
    s.tokens.insert(s.tokens.end(), k.tokens.begin() + 1, k.tokens.end());
    if (k.prompt || n_pending(s) > MAX_PENDING) {
        feed(k.slot);
    }
}

// Features of positions from pos on follow; what came before is fed or starts over.
void head_source::begin_pending(seen & s, int pos) {
    if (s.pending_pos + n_pending(s) != pos || n_pending(s) == 0) {
        s.clear_pending(pos);
    }
    if (n_pending(s) == 0 && s.n != pos) {
        s.from = s.n = pos;  // a gap
    }
}

void head_source::append_features(seen & s, const kept_tokens & k) {
    const size_t have = s.features.size();
    s.features.resize(have + k.rows.size() * h_.n_features());
    capture_rows(ctx_, h_.layers.data(), (int) h_.layers.size(), k.rows, s.features.data() + have);
}

void head_source::rewind(int slot, int n_past) {
    seen & s       = slots_[slot];
    s.n            = std::min(s.n, n_past);
    s.from         = std::min(s.from, s.n);
    const int keep = std::clamp(n_past - s.pending_pos, 0, n_pending(s));
    if (keep == 0) {
        // Position n_past - 1 was paired with a token that is gone now; its features are gone too. The stale
        // pair stays: one row of the head's past with a wrong token, which costs less than running a row
        // again.
        s.clear_pending(n_past);
        return;
    }
    s.features.resize((size_t) keep * h_.n_features());
    s.tokens.resize(std::min<size_t>(s.tokens.size(), keep - 1));
}

void head_source::reset(int slot, int n_past) {
    seen & s = slots_[slot];
    s        = seen();
    s.from = s.n = n_past;
    s.clear_pending(n_past);
}

// The first n pending pairs are in the head's cache now.
void head_source::fed(seen & s, int n) {
    s.tokens.erase(s.tokens.begin(), s.tokens.begin() + n);
    s.features.erase(s.features.begin(), s.features.begin() + (size_t) n * h_.n_features());
    s.pending_pos += n;
    s.n = s.pending_pos;
}

// Runs the slot's pending pairs through the head, but for the last, whose token is still to come. It takes
// MAX_ROWS at a time, and the rest in powers of two: each size is a graph with buffers of its own, and
// prompts have every length. So few rows are computed alike however many there are, so that the result is the
// same however the prompt was split into chunks.
void head_source::feed(int slot) {
    seen & s    = slots_[slot];
    const int n = n_pending(s) - 1;
    for (int done = 0, piece = MAX_ROWS; done < n; done += piece) {
        while (piece > n - done) {
            piece /= 2;
        }
        pass p;
        p.rows     = pass::chain(slot, s.tokens.data() + done, s.pending_pos + done, s.from, piece, 0);
        p.x        = s.features.data() + (size_t) done * h_.n_features();
        p.features = true;
        runner_.run(p);
    }
    if (n > 0) {
        fed(s, n);
    }
}

void head_source::catch_up(int slot, int at_most) {
    if (n_pending(slots_[slot]) > at_most) {
        feed(slot);
    }
}

// -- drafts -----------------------------------------------------------------------------------------------

// Runs a pass whose n_out rows each find k children, into states_, ids_ and probs_.
void head_source::run(pass & p, int n_out, int k) {
    k_ = std::min(k, h_.n_vocab);
    states_.resize((size_t) n_out * h_.n_embd);
    ids_.resize((size_t) n_out * k_);
    probs_.resize((size_t) n_out * k_);
    p.state = states_.data();
    p.k     = k_;
    p.ids   = ids_.data();
    p.probs = probs_.data();
    runner_.run(p);
}

// Feeds what the target decoded since the last draft, in one pass for all slots, which makes the roots'
// children.
void head_source::begin(growth & g, const std::vector<int> & asks) {
    n_cells_.assign(g.asks.size(), 0);
    n_cells_max_.assign(g.asks.size(), 0);
    marks_.clear();
    x_.clear();
    pass p;
    for (const int a : asks) {
        seen & s = slots_[g.asks[a].slot];
        s.tokens.resize(n_pending(s) - 1);
        s.tokens.push_back(g.asks[a].token);
        const std::vector<pass_row> rows =
            pass::chain(g.asks[a].slot, s.tokens.data(), s.pending_pos, s.from, n_pending(s), 0);
        p.rows.insert(p.rows.end(), rows.begin(), rows.end());
        p.rows.back().out = true;
        x_.insert(x_.end(), s.features.begin(), s.features.end());
    }
    p.x        = x_.data();
    p.features = true;
    run(p, (int) asks.size(), g.widest());
    for (int r = 0; r < (int) asks.size(); ++r) {
        seen & s = slots_[g.asks[asks[r]].slot];
        fed(s, n_pending(s));
        n_cells_max_[asks[r]] = std::min(MAX_CELLS, runner_.n_ctx() - g.n_past[asks[r]]);
        offer_children(g, asks[r], r, -1, 0);
    }
}

void head_source::offer_children(growth & g, int a, int row, int parent, uint64_t path) {
    const size_t first = (size_t) row * k_;
    for (int k = 0; k < std::min(g.asks[a].width, k_) && std::isfinite(probs_[first + k]); ++k) {
        const int node = g.offer(id, a, parent, h_.d2t[ids_[first + k]], probs_[first + k], k);
        marks_.resize(g.nodes.size());
        marks_[node] = {row, path};
        g.level.push_back(node);
    }
    // Those of other sources can be extended too.
    for (int i = parent + 1; g.mixed && i < (int) g.nodes.size(); ++i) {
        const growth::node & v = g.nodes[i];
        if (v.ask == a && v.parent == parent && v.evidence[HEAD] == NOT_OFFERED) {
            marks_.resize(g.nodes.size());
            marks_[i] = {row, path};
            g.level.push_back(i);
        }
    }
}

void head_source::extend(growth & g, const std::vector<int> & nodes) {
    const int n = (int) nodes.size(), n_embd = h_.n_embd;
    std::vector<int> level = nodes;
    std::sort(level.begin(), level.end(), [&](int a, int b) {
        return g.nodes[a].ask != g.nodes[b].ask ? g.nodes[a].ask < g.nodes[b].ask : a < b;
    });
    pass p;
    x_.resize((size_t) n * n_embd);
    for (int r = 0; r < n; ++r) {
        const growth::node & v = g.nodes[level[r]];
        const int n_past       = g.n_past[v.ask];
        const int cell         = n_cells_[v.ask]++;
        pass_row row;
        row.slot  = g.asks[v.ask].slot;
        row.token = v.token;
        row.pos   = n_past + v.depth - 1;
        row.cell  = n_past + cell;
        row.from  = slots_[row.slot].from;
        row.base  = n_past;
        row.path  = marks_[level[r]].path | (uint64_t(1) << cell);
        row.out   = true;
        p.rows.push_back(row);
        std::copy_n(states_.begin() + (size_t) marks_[level[r]].row * n_embd, n_embd,
            x_.begin() + (size_t) r * n_embd);
    }
    p.x = x_.data();
    run(p, n, g.widest());
    for (int r = 0; r < n; ++r) {
        offer_children(g, g.nodes[level[r]].ask, r, level[r], p.rows[r].path);
    }
}

// -- the head alone ---------------------------------------------------------------------------------------

float head_source::measure(int slot, int n_past, int n) {
    const std::vector<int32_t> tokens(n, 1);
    std::vector<float> x((size_t) n * h_.n_embd, 0.1f);
    pass p;
    p.rows              = pass::chain(slot, tokens.data(), n_past, slots_[slot].from, n, n);
    p.x                 = x.data();
    const int64_t start = ggml_time_us();
    run(p, n, 1);
    return 1e-6f * (ggml_time_us() - start);
}

// Makes a pass over n rows from position 0, which overwrites the slot's state.
pass head_source::whole_pass(int slot, int n_past, const int32_t * tokens, const float * features, int n) {
    seen & s = slots_[slot];
    s.from = s.n = 0;
    s.clear_pending(n_past);
    pass p;
    p.rows     = pass::chain(slot, tokens, 0, 0, n, n);
    p.x        = features;
    p.features = true;
    return p;
}

void head_source::forward(int slot, int n_past, const int32_t * tokens, const float * features, int n,
    float * g, float * state, float * logits) {
    pass p   = whole_pass(slot, n_past, tokens, features, n);
    p.g      = g;
    p.state  = state;
    p.logits = logits;
    runner_.run(p);
}

const std::vector<float> & head_source::trace(
    int slot, int n_past, const int32_t * tokens, const float * features, int n, const char * stage) {
    pass p      = whole_pass(slot, n_past, tokens, features, n);
    p.stage     = stage;
    p.stage_out = &trace_;
    runner_.run(p);
    return trace_;
}

}  // namespace eagle3
