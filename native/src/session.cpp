#include "session.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

session::session(llama_context * ctx, head * h, int n_slots) :
    ctx_(ctx), memory_(llama_get_memory(ctx)), head_(h), n_batch_((int) llama_n_batch(ctx)),
    n_ctx_((int) llama_n_ctx_seq(ctx)), slots_(n_slots) {
    const llama_model * model = llama_get_model(ctx);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    require(memory_ != nullptr, EAGLE3_E_UNSUPPORTED, "the target has no memory of its sequence");
    if (h) {
        require(model == h->target, EAGLE3_E_ARGUMENT, "the head was opened for another model");
        require(!llama_model_is_recurrent(model) && !llama_model_is_hybrid(model), EAGLE3_E_UNSUPPORTED,
                "the target is recurrent or hybrid and cannot drop part of a sequence");
        runner_ = std::make_unique<runner>(*h, n_slots, n_ctx_, llama_n_threads(ctx));
        state_.resize(h->n_embd);
        set_capture(true);
    }
    batch_ = llama_batch_init(n_batch_, 0, 1);
}

session::~session() {
    llama_batch_free(batch_);
    set_capture(false);
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
    require(n_past >= 0 && n_past <= s.n_past, EAGLE3_E_ARGUMENT, format("cannot rewind from %d to %d", s.n_past, n_past));
    require(llama_memory_seq_rm(memory_, slot, n_past, -1), EAGLE3_E_UNSUPPORTED, "the target cannot drop part of a sequence");
    s.in_round = false;
    s.n_past   = n_past;
    s.head_n   = std::min(s.head_n, n_past);
    s.head_from = std::min(s.head_from, s.head_n);
    const int keep = std::clamp(n_past - s.pending_pos, 0, n_pending(s));
    if (keep == 0) {
        // Position n_past - 1 was paired with a token that is gone now; its features are gone too. The stale
        // pair stays: one row of the head's past with a wrong token, which costs less than running a row again.
        s.clear_pending(n_past);
        return;
    }
    s.pending_features.resize((size_t) keep * head_->n_features());
    s.pending_tokens.resize(std::min<size_t>(s.pending_tokens.size(), keep - 1));
}

void session::reset(int slot, int n_past) {
    slot_state & s = at(slot);
    require(n_past >= 0 && n_past <= n_ctx_, EAGLE3_E_ARGUMENT, format("position %d is outside the context", n_past));
    s = slot_state();
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

// Of the n_rows rows of the last batch, those that a tree keeps.
void session::take_features(slot_state & s, int pos, const int32_t * rows, int n, int n_rows) {
    const size_t width = head_->n_features();
    features_.resize(n_rows * width);
    capture_get(ctx_, head_->layers.data(), (int) head_->layers.size(), n_rows, features_.data());
    begin_pending(s, pos);
    for (int i = 0; i < n; ++i) {
        const float * row = features_.data() + rows[i] * width;
        s.pending_features.insert(s.pending_features.end(), row, row + width);
    }
}

// -- head -------------------------------------------------------------------------------------------------

// Runs the first n pending pairs through the head and drops them; leaves state_ and the k best guesses of the last one.
void session::feed(int slot, int n, int k) {
    slot_state & s = slots_[slot];
    if (n <= 0) {
        return;
    }
    ids_.resize(k);
    probs_.resize(k);
    pass p;
    p.slot     = slot;
    p.pos      = s.pending_pos;
    p.from     = s.head_from;
    p.n        = n;
    p.tokens   = s.pending_tokens.data();
    p.x        = s.pending_features.data();
    p.features = true;
    p.n_out    = k > 0;
    p.state    = state_.data();
    p.k        = k;
    p.ids      = ids_.data();
    p.probs    = probs_.data();
    runner_->run(p);
    s.pending_tokens.erase(s.pending_tokens.begin(), s.pending_tokens.begin() + n);
    s.pending_features.erase(s.pending_features.begin(), s.pending_features.begin() + (size_t) n * head_->n_features());
    s.pending_pos += n;
    s.head_n = s.pending_pos;
}

// The accepted rows' features and the first step in one pass.
void session::feed_token(int slot, int32_t token, int k) {
    slot_state & s = at(slot);
    if ((int) s.pending_tokens.size() == n_pending(s)) {
        s.pending_tokens.back() = token;
    } else {
        s.pending_tokens.push_back(token);
    }
    feed(slot, n_pending(s), k);
}

// Checks a draft's parameters and runs its first pass; returns how many tokens there is room for, 0 for no draft.
int session::begin_draft(int slot, int32_t token, int n_max, int k) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n_max >= 0 && n_max <= MAX_DRAFT, EAGLE3_E_ARGUMENT, format("n_max is %d, expected 0..%d", n_max, MAX_DRAFT));
    require(token >= 0 && token < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", token));
    s.draft_probs.clear();
    s.draft_reach.clear();
    n_max = std::min({n_max, n_ctx_ - s.n_past - 1, n_batch_ - 1});  // token itself needs a cell and a row too
    if (n_max <= 0 || n_pending(s) == 0) {
        return 0;
    }
    feed_token(slot, token, std::min(k, head_->n_vocab));
    return n_max;
}

int session::draft(int slot, int32_t token, int n_max, int n_min, float p_min, int32_t * tokens, float * probs) {
    n_max = begin_draft(slot, token, n_max, 1);
    if (n_max == 0) {
        return 0;
    }
    slot_state & s = at(slot);

    // Then its own state in place of g, one token a pass. These rows' cells are overwritten by the next feed.
    int n = 0;
    for (;;) {
        const float prob = probs_[0];
        if (!std::isfinite(prob) || prob < p_min) {
            break;
        }
        tokens[n] = head_->d2t[ids_[0]];
        s.draft_probs.push_back(prob);
        s.draft_reach.push_back((n ? s.draft_reach.back() : 1.0f) * planner_.accept(n + 1, prob));
        if (probs) {
            probs[n] = prob;
        }
        if (++n == n_max) {
            break;
        }
        pass p;
        p.slot    = slot;
        p.pos     = s.n_past + n - 1;
        p.from    = s.head_from;
        p.n       = 1;
        p.tokens  = &tokens[n - 1];
        p.x       = state_.data();
        p.n_out   = 1;
        p.state   = state_.data();
        p.k       = 1;
        p.ids     = ids_.data();
        p.probs   = probs_.data();
        runner_->run(p);
    }
    return n >= n_min ? n : 0;
}

pass session::head_pass(int slot, const int32_t * tokens, const float * features, int n) {
    slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", tokens[i]));
    }
    s.head_from = s.head_n = 0;
    s.clear_pending(s.n_past);
    pass p;
    p.slot = slot;
    p.n = p.n_out = n;
    p.tokens   = tokens;
    p.x        = features;
    p.features = true;
    return p;
}

void session::head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g, float * state, float * logits) {
    pass p = head_pass(slot, tokens, features, n);
    p.g      = g;
    p.state  = state;
    p.logits = logits;
    runner_->run(p);
}

const std::vector<float> & session::head_trace(int slot, const int32_t * tokens, const float * features, int n, const char * stage) {
    pass p = head_pass(slot, tokens, features, n);
    p.stage     = stage;
    p.stage_out = &trace_;
    runner_->run(p);
    return trace_;
}

} // namespace eagle3
