#include "head/head_source.hpp"

#include "target/capture.hpp"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace eagle3 {

namespace {

// Returns the rows of a store of features on the head's device, where this is not the CPU: for what waits in
// each slot, for the next batch, and one for what nobody wants.
int n_stored(const head & h, int n_slots, int most_waiting, int n_batch) {
    const bool on_cpu = ggml_backend_dev_type(h.device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    return on_cpu ? 0 : n_slots * (most_waiting + MAX_ROWS) + n_batch + 1;
}

}  // namespace

head_source::head_source(llama_context * ctx, const head & h, int n_slots, int n_ctx)
    : ctx_(ctx), h_(h), runner_(h, n_slots, n_ctx, ctx, n_slots * (MAX_CELLS + 1),
                            n_stored(h, n_slots, MAX_PENDING, (int) llama_n_batch(ctx))),
      n_ctx_(n_ctx), slots_(n_slots) {
    llama_set_layer_inp_store(ctx_, runner_.store());
    set_on(true);
}

head_source::~head_source() {
    try {
        set_on(false);
    } catch (const std::exception &) {
    }
    llama_set_layer_inp_store(ctx_, nullptr);
}

void head_source::set_on(bool on) {
    if (on != on_) {
        capture_set(ctx_, h_.layers.data(), on ? (int) h_.layers.size() : 0);
        on_ = on;
    }
}

bool head_source::needs_all_logits() const {
    return on_ && h_.layers.back() == llama_model_n_layer(h_.target);
}

// Returns n rows of the store that hold nothing that waits.
std::vector<int32_t> head_source::free_rows(int n) const {
    const int last = (int) runner_.store()->ne[1] - 1;
    std::vector<bool> waits(last, false);
    for (const seen & s : slots_) {
        for (const int32_t row : s.stored) {
            waits[row] = true;
        }
    }
    std::vector<int32_t> rows;
    for (int row = 0; row < last && (int) rows.size() < n; ++row) {
        if (!waits[row]) {
            rows.push_back(row);
        }
    }
    require((int) rows.size() == n, EAGLE3_E_INTERNAL, "the store of features is full");
    return rows;
}

void head_source::expect(int n) {
    if (runner_.store() && on_) {
        batch_ = free_rows(n);
        llama_set_layer_inp_rows(ctx_, batch_.data(), (uint32_t) n);
    }
}

// -- the text ---------------------------------------------------------------------------------------------

void head_source::kept(const kept_tokens & k) {
    seen & s         = slots_[k.slot];
    const int n_past = k.pos + (int) k.tokens.size();
    if (!on_) {
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

pass_source::bytes head_source::memory() const {
    size_t waiting = 0;
    for (const seen & s : slots_) {
        waiting += s.features.capacity() * sizeof(float);
    }
    return {h_.n_bytes(), runner_.cache_bytes() + waiting, runner_.compute_bytes()};
}

void head_source::append_features(seen & s, const kept_tokens & k) {
    if (runner_.store()) {
        for (const int32_t row : k.rows) {
            s.stored.push_back(batch_.at(row));
        }
        return;
    }
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
    runner_.store() ? s.stored.resize(keep) : s.features.resize((size_t) keep * h_.n_features());
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
    if (runner_.store()) {
        s.stored.erase(s.stored.begin(), s.stored.begin() + n);
    } else {
        s.features.erase(s.features.begin(), s.features.begin() + (size_t) n * h_.n_features());
    }
    s.pending_pos += n;
    s.n = s.pending_pos;
}

// Runs the slot's pending pairs through the head, but for the last, whose token is still to come. The CPU
// takes MAX_ROWS at a time, and the rest in powers of two: each size is a graph with buffers of its own, and
// prompts have every length. So few rows are computed alike however many there are, so that the result is the
// same however the prompt was split into chunks. A device takes MOST_FED at a time, and fills up the rest: it
// computes many rows as fast as few, and nothing waits for them.
void head_source::feed(int slot) {
    seen & s    = slots_[slot];
    const int n = n_pending(s) - 1;
    for (int done = 0, piece = 0; done < n; done += piece) {
        piece     = runner_.store() ? std::min(n - done, MOST_FED) : MAX_ROWS;
        int whole = MAX_ROWS;
        while (piece > n - done) {
            piece /= 2;
        }
        while (runner_.store() && whole < piece) {
            whole *= 2;
        }
        pass p;
        p.rows = pass::chain(slot, s.tokens.data() + done, s.pending_pos + done, s.from, piece, 0);
        start_from(p, s, done, piece);
        for (int i = piece; runner_.store() && i < whole; ++i) {
            p.rows.push_back(p.rows.back());
            p.rows.back().spare = true;
        }
        runner_.run(p);
    }
    if (n > 0) {
        fed(s, n);
    }
}

// Lets the last n rows of a pass start from the features of n pending rows, of which `done` come before.
void head_source::start_from(pass & p, const seen & s, int done, int n) const {
    p.features = true;
    if (!runner_.store()) {
        p.x = s.features.data() + (size_t) done * h_.n_features();
        return;
    }
    p.from = source_of_x::store;
    for (int i = 0; i < n; ++i) {
        p.rows[p.rows.size() - n + i].x = s.stored[done + i];
    }
}

void head_source::catch_up(int slot, int at_most) {
    if (n_pending(slots_[slot]) > at_most) {
        feed(slot);
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
    run(p, n, 1, later_);
    return 1e-6f * (ggml_time_us() - start);
}

// Returns the seconds of a first pass of one row with so many steps of n rows ahead.
float head_source::timed_draft(int slot, int n_past, int n, int steps) {
    const int32_t token = 1;
    const std::vector<float> x(h_.n_embd, 0.1f);
    pass p;
    p.rows = pass::chain(slot, &token, n_past, slots_[slot].from, 1, 1);
    p.x    = x.data();
    for (int i = 0; i < steps * n; ++i) {
        pass_row row = p.rows[0];
        row.pos      = n_past + 1 + i / n;
        row.cell     = n_past + 1 + i;
        p.ahead.push_back(row);
    }
    p.width             = n;
    const int64_t start = ggml_time_us();
    run(p, 1, n, later_);
    return 1e-6f * (ggml_time_us() - start);
}

float head_source::measure_step(int slot, int n_past, int n) {
    constexpr int STEPS = 4;
    const int steps     = std::min({STEPS, runner_.most_ahead(), (n_ctx_ - n_past - 1) / n});
    if (steps < 1 || n > h_.n_vocab) {
        return measure(slot, n_past, n);
    }
    const float one = timed_draft(slot, n_past, n, 0);
    return std::max(timed_draft(slot, n_past, n, steps) - one, 0.0f) / (float) steps;
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
