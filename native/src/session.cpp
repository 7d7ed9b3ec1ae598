#include "session.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>

namespace eagle3 {

session::session(llama_context * ctx, head * h, int n_slots)
    : ctx_(ctx), memory_(llama_get_memory(ctx)), head_(h), n_batch_((int) llama_n_batch(ctx)),
      n_ctx_((int) llama_n_ctx_seq(ctx)), slots_(n_slots) {
    const llama_model * model = llama_get_model(ctx);
    n_vocab_                  = llama_vocab_n_tokens(llama_model_get_vocab(model));
    require(memory_ != nullptr, EAGLE3_E_UNSUPPORTED, "the target has no memory of its sequence");
    if (h) {
        require(model == h->target, EAGLE3_E_ARGUMENT, "the head was opened for another model");
        require(!llama_model_is_recurrent(model) && !llama_model_is_hybrid(model), EAGLE3_E_UNSUPPORTED,
            "the target is recurrent or hybrid and cannot drop part of a sequence");
        runner_ = std::make_unique<runner>(*h, n_slots, n_ctx_, llama_n_threads(ctx));
        set_capture(true);
    }
    most_rows_ = std::min({n_batch_, (int) llama_n_ubatch(ctx), MAX_ROWS});
    batch_     = llama_batch_init(n_batch_, 0, 1);
}

// The context is as it was before the session: a round under way is dropped, a tree too, capture is off.
session::~session() {
    try {
        abandon_round();
    } catch (const std::exception &) {  // a slot that cannot go back is empty
    }
    llama_memory_tree_set(memory_, nullptr, 0);
    try {
        set_capture(false);
    } catch (const std::exception &) {
    }
    llama_batch_free(batch_);
}

int session::n_pending(const slot_state & s) const {
    return head_ ? (int) (s.pending_features.size() / head_->n_features()) : 0;
}

slot_state & session::at(int slot) {
    require(slot >= 0 && slot < (int) slots_.size(), EAGLE3_E_ARGUMENT, format("no slot %d", slot));
    return slots_[slot];
}

const slot_state & session::at(int slot) const {
    return const_cast<session *>(this)->at(slot);
}

void session::set_capture(bool on) {
    if (head_ && on != capture_) {
        capture_set(ctx_, head_->layers.data(), on ? (int) head_->layers.size() : 0);
        capture_ = on;
    }
}

// -- bookkeeping ------------------------------------------------------------------------------------------

void session::rewind(int slot, int n_past) {
    slot_state & s = at(slot);
    require(n_past >= 0 && n_past <= s.n_past, EAGLE3_E_ARGUMENT,
        format("cannot rewind from %d to %d", s.n_past, n_past));
    if (s.in_round) {
        abandon_round();
    }
    require(llama_memory_seq_rm(memory_, slot, n_past, -1), EAGLE3_E_UNSUPPORTED,
        "the target cannot drop part of a sequence");
    s.n_past       = n_past;
    s.head_n       = std::min(s.head_n, n_past);
    s.head_from    = std::min(s.head_from, s.head_n);
    const int keep = std::clamp(n_past - s.pending_pos, 0, n_pending(s));
    if (keep == 0) {
        // Position n_past - 1 was paired with a token that is gone now; its features are gone too. The stale
        // pair stays: one row of the head's past with a wrong token, which costs less than running a row
        // again.
        s.clear_pending(n_past);
        return;
    }
    s.pending_features.resize((size_t) keep * head_->n_features());
    s.pending_tokens.resize(std::min<size_t>(s.pending_tokens.size(), keep - 1));
}

void session::reset(int slot, int n_past) {
    slot_state & s = at(slot);
    require(n_past >= 0 && n_past <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("position %d is outside the context", n_past));
    require(n_past == 0 || llama_memory_seq_pos_max(memory_, slot) >= 0, EAGLE3_E_ARGUMENT,
        format("slot %d cannot be at position %d: the target holds nothing of its sequence", slot, n_past));
    if (s.in_round) {
        abandon_round();
    }
    s        = slot_state();
    s.n_past = s.head_from = s.head_n = n_past;
    s.clear_pending(n_past);
}

// Features of positions from pos on follow; what came before is fed or starts over.
void session::begin_pending(slot_state & s, int pos) {
    if (n_pending(s) == 0) {
        s.clear_pending(pos);
    }
    if (s.pending_pos + n_pending(s) != pos) {
        s.clear_pending(pos);
    }
    if (n_pending(s) == 0 && s.head_n != pos) {
        s.head_from = s.head_n = pos;  // a gap
    }
}

void session::take_features(slot_state & s, int pos, int n) {
    begin_pending(s, pos);
    const size_t have = s.pending_features.size();
    s.pending_features.resize(have + (size_t) n * head_->n_features());
    capture_get(ctx_, head_->layers.data(), (int) head_->layers.size(), n, s.pending_features.data() + have);
}

// Of the last batch's rows, these.
void session::take_features(slot_state & s, int pos, const std::vector<int32_t> & rows) {
    const size_t width = head_->n_features(), n_rows = round_.slot_of.size();
    if (features_.empty()) {
        features_.resize(n_rows * width);
        capture_get(ctx_, head_->layers.data(), (int) head_->layers.size(), (int) n_rows, features_.data());
    }
    begin_pending(s, pos);
    for (const int32_t r : rows) {
        const float * row = features_.data() + r * width;
        s.pending_features.insert(s.pending_features.end(), row, row + width);
    }
}

// -- head -------------------------------------------------------------------------------------------------

// Rows of the first n pending pairs, whose features are appended to x.
std::vector<pass_row> session::feed_rows(slot_state & s, int slot, int n, std::vector<float> & x) {
    x.insert(
        x.end(), s.pending_features.begin(), s.pending_features.begin() + (size_t) n * head_->n_features());
    return pass::chain(slot, s.pending_tokens.data(), s.pending_pos, s.head_from, n, 0);
}

// The first n pending pairs are in the head's cache now.
void session::fed(slot_state & s, int n) {
    s.pending_tokens.erase(s.pending_tokens.begin(), s.pending_tokens.begin() + n);
    s.pending_features.erase(
        s.pending_features.begin(), s.pending_features.begin() + (size_t) n * head_->n_features());
    s.pending_pos += n;
    s.head_n = s.pending_pos;
}

// Runs the slot's pending pairs through the head, but for the last, whose token is still to come. In pieces
// of MAX_ROWS, the rest in powers of two: each size is a graph with buffers of its own, and prompts have
// every length. So few rows are computed alike however many there are, so that the way a prompt was cut
// leaves no trace.
void session::feed(int slot) {
    slot_state & s = at(slot);
    const int n    = n_pending(s) - 1;
    for (int done = 0, piece = MAX_ROWS; done < n; done += piece) {
        while (piece > n - done) {
            piece /= 2;
        }
        pass p;
        p.rows =
            pass::chain(slot, s.pending_tokens.data() + done, s.pending_pos + done, s.head_from, piece, 0);
        p.x        = s.pending_features.data() + (size_t) done * head_->n_features();
        p.features = true;
        runner_->run(p);
    }
    if (n > 0) {
        fed(s, n);
    }
}

// The head's part of a call that the target has done its part of: if it fails, the slot's text stays, and the
// head starts over behind it.
void session::head_part(slot_state & s, const std::function<void()> & f) {
    try {
        f();
    } catch (...) {
        s.clear_pending(s.n_past);
        throw;
    }
}

pass session::head_pass(int slot, const int32_t * tokens, const float * features, int n) {
    slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", tokens[i]));
    }
    s.head_from = s.head_n = 0;
    s.clear_pending(s.n_past);
    pass p;
    p.rows     = pass::chain(slot, tokens, 0, 0, n, n);
    p.x        = features;
    p.features = true;
    return p;
}

void session::head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
    float * state, float * logits) {
    pass p   = head_pass(slot, tokens, features, n);
    p.g      = g;
    p.state  = state;
    p.logits = logits;
    runner_->run(p);
}

const std::vector<float> & session::head_trace(
    int slot, const int32_t * tokens, const float * features, int n, const char * stage) {
    pass p      = head_pass(slot, tokens, features, n);
    p.stage     = stage;
    p.stage_out = &trace_;
    runner_->run(p);
    return trace_;
}

}  // namespace eagle3
