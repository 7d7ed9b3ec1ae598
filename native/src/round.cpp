// A round: one batch of the target, verification of its rows, and what stays of them.
#include "session.hpp"

#include <algorithm>
#include <numeric>

#include "llama-ext.h"

namespace eagle3 {

namespace {

constexpr int MAX_PENDING = 256;  // features that may wait for a draft; more are fed without one

bool captures_after_last_layer(const head & h) {
    return h.layers.back() == llama_model_n_layer(h.target);
}

} // namespace

// depth: of each row, null for one after the other
void session::run_batch(int slot, const int32_t * tokens, const int32_t * depth, int n, bool all_logits) {
    slot_state & s = at(slot);
    require(n >= 1 && n <= n_batch_, EAGLE3_E_ARGUMENT, format("a batch of %d tokens, n_batch is %d", n, n_batch_));
    require(s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT, format("%d tokens do not fit after %d of %d", n, s.n_past, n_ctx_));
    batch_.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", tokens[i]));
        batch_.token[i]     = tokens[i];
        batch_.pos[i]       = s.n_past + (depth ? depth[i] : i);
        batch_.n_seq_id[i]  = 1;
        batch_.seq_id[i][0] = slot;
        batch_.logits[i]    = all_logits || i == n - 1;
    }
    const int rc = llama_decode(ctx_, batch_);
    if (rc != 0) {
        llama_memory_tree_set(memory_, nullptr, 0);
        llama_memory_seq_rm(memory_, slot, s.n_past, -1);
        require(rc != -4, EAGLE3_E_UNSUPPORTED, "this target does not let the layers be captured that the head reads");
        throw error(EAGLE3_E_DECODE, rc == 1 ? "the context's memory is full" : format("llama_decode returned %d", rc));
    }
}

void session::prefill(int slot, const int32_t * tokens, int n, bool all_logits) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    run_batch(slot, tokens, nullptr, n, all_logits || (capture_ && captures_after_last_layer(*head_)));
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

// parents: null for a chain; else the draft that each draft follows, -1 for token
void session::decode(int slot, int32_t token, const int32_t * draft, const int32_t * parents, int n) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n >= 0 && n <= MAX_DRAFT, EAGLE3_E_ARGUMENT, format("a draft of %d tokens, at most %d are allowed", n, MAX_DRAFT));
    s.round_tokens.assign(1, token);
    s.round_tokens.insert(s.round_tokens.end(), draft, draft + n);
    s.round_parents.assign(1, -1);
    std::vector<int32_t> depth(1, 0);
    for (int i = 0; i < n; ++i) {
        const int32_t parent = parents ? parents[i] + 1 : i;
        require(parent >= 0 && parent <= i, EAGLE3_E_ARGUMENT, format("draft %d follows draft %d: parents come first", i, parent - 1));
        s.round_parents.push_back(parent);
        require(depth[parent] + 1 >= depth[i], EAGLE3_E_ARGUMENT, format("draft %d is on a higher level than draft %d: levels come in order", i, i - 1));
        depth.push_back(depth[parent] + 1);
    }
    s.round_tree = parents && n > 0;
    if (s.round_tree) {
        require((int) llama_n_ubatch(ctx_) > n, EAGLE3_E_ARGUMENT,
                format("a tree of %d drafts does not fit a micro-batch of %u", n, llama_n_ubatch(ctx_)));
        require(llama_memory_tree_set(memory_, s.round_parents.data(), n + 1), EAGLE3_E_UNSUPPORTED,
                "the target's memory cannot hold a tree: it needs flash attention");
    }
    const bool deferred = planner_.ready() && (int) s.draft_reach.size() == n && n > 0;
    const int64_t start = ggml_time_us();
    llama_set_logits_deferred(ctx_, deferred);
    run_batch(slot, s.round_tokens.data(), depth.data(), n + 1, true);
    llama_synchronize(ctx_);
    llama_set_logits_deferred(ctx_, false);
    s.layers_seconds = 1e-6f * (ggml_time_us() - start);
    s.round_done = deferred ? 0 : ~uint64_t(0);
    s.round_path.assign(1, 0);
    s.in_round = true;
}

// Logits of a row of the round: computed when verification gets to it, with those after it that are worth it.
void session::need_logits(slot_state & s, int row) {
    if ((s.round_done >> row) & 1) {
        return;
    }
    const bool next = row == 0 || ((s.round_done >> (row - 1)) & 1);
    const int  n    = next ? planner_.piece(s.draft_reach, row) : 1;
    require(llama_logits_compute(ctx_, row, n) == 0, EAGLE3_E_DECODE, "the output matrix could not be computed");
    for (int i = row; i < row + n; ++i) {
        s.round_done |= uint64_t(1) << i;
    }
}

int session::verify(int slot, llama_sampler * sampler, int32_t * out) {
    slot_state & s = at(slot);
    require(s.in_round, EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx_));
    const int n_rows = (int) s.round_tokens.size();
    s.round_path.assign(1, 0);
    for (int i = 0;; ++i) {
        const int row = s.round_path.back();
        need_logits(s, row);
        out[i] = llama_sampler_sample(sampler, ctx_, row);
        int next = row + 1;
        while (next < n_rows && !(s.round_parents[next] == row && s.round_tokens[next] == out[i])) {
            ++next;
        }
        if (next == n_rows || llama_vocab_is_eog(vocab, out[i])) {
            return i + 1;
        }
        s.round_path.push_back(next);
    }
}

int session::verified_row(int slot, int i) const {
    const slot_state & s = at(slot);
    require(i >= 0 && i < (int) s.round_path.size(), EAGLE3_E_ARGUMENT, format("the last round sampled %zu rows, not %d", s.round_path.size(), i + 1));
    return s.round_path[i];
}

bool session::can_tree() {
    const int32_t root = -1;
    const bool ok = llama_memory_tree_set(memory_, &root, 1);
    llama_memory_tree_set(memory_, nullptr, 0);
    return ok;
}

void session::commit(int slot, int n_keep) {
    slot_state & s = at(slot);
    if (!s.in_round) {
        return;
    }
    const int n_rows = (int) s.round_tokens.size();
    std::vector<int32_t> path = s.round_path;
    if (!s.round_tree) {  // a chain's rows are a path, verified or not
        path.resize(n_rows);
        std::iota(path.begin(), path.end(), 0);
    }
    require(n_keep >= 0 && n_keep <= (int) path.size(), EAGLE3_E_ARGUMENT, format("cannot keep %d of %d rows", n_keep, (int) path.size()));
    s.in_round = false;
    if (s.round_tree) {
        const std::vector<uint32_t> rows(path.begin(), path.begin() + n_keep);
        require(llama_memory_tree_keep(memory_, rows.data(), n_keep), EAGLE3_E_INTERNAL, "the target's memory has lost its tree");
    } else if (n_keep < n_rows) {
        require(llama_memory_seq_rm(memory_, slot, s.n_past + n_keep, -1), EAGLE3_E_UNSUPPORTED,
                "the target cannot drop part of a sequence");
    }
    if (n_keep > 0 && capture_) {
        if (n_pending(s) > 0 && (int) s.pending_tokens.size() == n_pending(s) - 1) {
            s.pending_tokens.push_back(s.round_tokens[0]);
        }
        if (s.round_tree) {
            take_features(s, s.n_past, path.data(), n_keep, n_rows);
        } else {
            take_features(s, s.n_past, n_keep);
        }
        for (int i = 1; i < n_keep; ++i) {
            s.pending_tokens.push_back(s.round_tokens[path[i]]);
        }
    }
    s.n_past += n_keep;
    if (n_pending(s) > MAX_PENDING) {
        feed(slot, n_pending(s) - 1, 0);
    }
    if (planner_.ready() && n_keep > 0) {
        tell_planner(s, n_keep);
    }
    s.planned = false;
}

// What verification found out about the drafts it got to, and what the round took.
void session::tell_planner(slot_state & s, int n_tokens) {
    const int n_rows = (int) s.round_tokens.size();
    std::vector<int> depth(n_rows, 0), children(n_rows, 0);
    for (int row = 1; row < n_rows && n_rows - 1 == (int) s.draft_probs.size(); ++row) {
        const int parent = s.round_parents[row];
        depth[row] = depth[parent] + 1;
        const int  rank    = children[parent]++;
        const auto at_path = std::find(s.round_path.begin(), s.round_path.end(), parent);
        if (at_path != s.round_path.end()) {
            planner_.learn(depth[row], rank, s.draft_probs[row - 1], at_path + 1 != s.round_path.end() && at_path[1] == row);
        }
    }
    if (!s.planned) {
        return;
    }
    planner::round r;
    r.n_past     = s.n_past;
    r.n_drafted  = n_rows - 1;
    r.tried      = s.draft_steps > 0;
    r.layers_s   = s.layers_seconds;
    r.whole      = s.round_done == ~uint64_t(0);
    r.draft_s    = s.draft_seconds;
    r.total_s    = 1e-6f * (ggml_time_us() - s.round_start);
    r.n_tokens   = n_tokens;
    r.value      = s.draft_value;
    planner_.saw_round(r);
}

} // namespace eagle3
