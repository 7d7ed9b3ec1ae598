#include "session.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace eagle3 {

namespace {

constexpr int MAX_DRAFT   = 63;   // with the token itself: the rows that are computed alike (batch invariance)
constexpr int MAX_PENDING = 256;  // features that may wait for a draft; more are fed without one

bool captures_after_last_layer(const head & h) {
    return h.layers.back() == llama_model_n_layer(h.target);
}

} // namespace

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
        logits_.resize(h->n_vocab);
        prenorm_.resize(h->n_embd);
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

// -- target -----------------------------------------------------------------------------------------------

void session::run_batch(int slot, const int32_t * tokens, int n, bool all_logits) {
    slot_state & s = at(slot);
    require(n >= 1 && n <= n_batch_, EAGLE3_E_ARGUMENT, format("a batch of %d tokens, n_batch is %d", n, n_batch_));
    require(s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT, format("%d tokens do not fit after %d of %d", n, s.n_past, n_ctx_));
    batch_.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", tokens[i]));
        batch_.token[i]     = tokens[i];
        batch_.pos[i]       = s.n_past + i;
        batch_.n_seq_id[i]  = 1;
        batch_.seq_id[i][0] = slot;
        batch_.logits[i]    = all_logits || i == n - 1;
    }
    const int rc = llama_decode(ctx_, batch_);
    if (rc != 0) {
        llama_memory_seq_rm(memory_, slot, s.n_past, -1);
        throw error(EAGLE3_E_DECODE, rc == 1 ? "the context's memory is full" : format("llama_decode returned %d", rc));
    }
}

void session::prefill(int slot, const int32_t * tokens, int n, bool all_logits) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    run_batch(slot, tokens, n, all_logits || (capture_ && captures_after_last_layer(*head_)));
    if (capture_) {
        if (n_pending(s) > 0 && (int) s.pending_tokens.size() == n_pending(s) - 1) {
            s.pending_tokens.push_back(tokens[0]);
        }
        take_features(s, s.n_past, n);
        s.pending_tokens.insert(s.pending_tokens.end(), tokens + 1, tokens + n);
    }
    s.n_past += n;
    if (capture_) {
        feed(slot, n_pending(s) - 1, 0);
    }
}

void session::decode(int slot, int32_t token, const int32_t * draft, int n) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n >= 0 && n <= MAX_DRAFT, EAGLE3_E_ARGUMENT, format("a draft of %d tokens, at most %d are allowed", n, MAX_DRAFT));
    s.round_tokens.assign(1, token);
    s.round_tokens.insert(s.round_tokens.end(), draft, draft + n);
    run_batch(slot, s.round_tokens.data(), n + 1, true);
    s.in_round = true;
}

int session::verify(int slot, llama_sampler * sampler, int32_t * out) {
    slot_state & s = at(slot);
    require(s.in_round, EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx_));
    const int n_rows = (int) s.round_tokens.size();
    for (int i = 0;; ++i) {
        out[i] = llama_sampler_sample(sampler, ctx_, i);
        const bool accepted = i + 1 < n_rows && out[i] == s.round_tokens[i + 1];
        if (!accepted || llama_vocab_is_eog(vocab, out[i])) {
            return i + 1;
        }
    }
}

void session::commit(int slot, int n_keep) {
    slot_state & s = at(slot);
    if (!s.in_round) {
        return;
    }
    const int n_rows = (int) s.round_tokens.size();
    require(n_keep >= 0 && n_keep <= n_rows, EAGLE3_E_ARGUMENT, format("cannot keep %d of %d rows", n_keep, n_rows));
    s.in_round = false;
    if (n_keep < n_rows) {
        require(llama_memory_seq_rm(memory_, slot, s.n_past + n_keep, -1), EAGLE3_E_UNSUPPORTED,
                "the target cannot drop part of a sequence");
    }
    if (n_keep > 0 && capture_) {
        if (n_pending(s) > 0 && (int) s.pending_tokens.size() == n_pending(s) - 1) {
            s.pending_tokens.push_back(s.round_tokens[0]);
        }
        take_features(s, s.n_past, n_keep);
        s.pending_tokens.insert(s.pending_tokens.end(), s.round_tokens.begin() + 1, s.round_tokens.begin() + n_keep);
    }
    s.n_past += n_keep;
    if (n_pending(s) > MAX_PENDING) {
        feed(slot, n_pending(s) - 1, 0);
    }
}

// -- head -------------------------------------------------------------------------------------------------

// Runs the first n pending pairs through the head and drops them.
void session::feed(int slot, int n, int n_out) {
    slot_state & s = slots_[slot];
    if (n <= 0) {
        return;
    }
    pass p;
    p.slot     = slot;
    p.pos      = s.pending_pos;
    p.from     = s.head_from;
    p.n        = n;
    p.tokens   = s.pending_tokens.data();
    p.x        = s.pending_features.data();
    p.features = true;
    p.n_out    = n_out;
    p.prenorm  = prenorm_.data();
    p.logits   = logits_.data();
    runner_->run(p);
    s.pending_tokens.erase(s.pending_tokens.begin(), s.pending_tokens.begin() + n);
    s.pending_features.erase(s.pending_features.begin(), s.pending_features.begin() + (size_t) n * head_->n_features());
    s.pending_pos += n;
    s.head_n = s.pending_pos;
}

// The most probable draft id of logits_ and its probability; -1 if the row is not finite.
int32_t session::best(float & prob) const {
    const float * l = logits_.data();
    const int     n = head_->n_vocab;
    const int     i = (int) (std::max_element(l, l + n) - l);
    const float   top = l[i];
    if (!std::isfinite(top)) {
        return -1;
    }
    float sum = 0.0f;
    for (int j = 0; j < n; ++j) {
        const float x = l[j] - top;
        if (x > -16.0f) {  // the rest is below 1e-7 of the best each
            sum += std::exp(x);
        }
    }
    prob = 1.0f / sum;
    return std::isfinite(prob) ? i : -1;
}

int session::draft(int slot, int32_t token, int n_max, int n_min, float p_min, int32_t * tokens, float * probs) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n_max >= 0 && n_max <= MAX_DRAFT, EAGLE3_E_ARGUMENT, format("n_max is %d, expected 0..%d", n_max, MAX_DRAFT));
    require(token >= 0 && token < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", token));
    n_max = std::min({n_max, n_ctx_ - s.n_past - 1, n_batch_ - 1});  // token itself needs a cell and a row too
    if (n_max <= 0 || n_pending(s) == 0) {
        return 0;
    }

    // The accepted rows' features and the first step in one pass.
    if ((int) s.pending_tokens.size() == n_pending(s)) {
        s.pending_tokens.back() = token;
    } else {
        s.pending_tokens.push_back(token);
    }
    feed(slot, n_pending(s), 1);

    // Then its own state in place of g, one token a pass. These rows' cells are overwritten by the next feed.
    int n = 0;
    for (;;) {
        float prob = 0.0f;
        const int32_t id = best(prob);
        if (id < 0 || prob < p_min) {
            break;
        }
        tokens[n] = head_->d2t[id];
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
        p.x       = prenorm_.data();
        p.n_out   = 1;
        p.prenorm = prenorm_.data();
        p.logits  = logits_.data();
        runner_->run(p);
    }
    return n >= n_min ? n : 0;
}

void session::head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g, float * prenorm, float * logits) {
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
    p.g        = g;
    p.prenorm  = prenorm;
    p.logits   = logits;
    runner_->run(p);
}

} // namespace eagle3
