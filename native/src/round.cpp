// A round: one batch of the target over the slots that take part, verification of its rows, and what stays of
// them.
#include "session.hpp"

#include <algorithm>
#include <numeric>

#include "deferral.hpp"

namespace eagle3 {

namespace {

constexpr int MAX_PENDING = 256;  // features that may wait for a draft; more are fed without one

bool captures_after_last_layer(const head & h) {
    return h.layers.back() == llama_model_n_layer(h.target);
}

}  // namespace

// Decodes batch_'s first n rows; if that fails, the slots hold what they held, or nothing where their memory
// cannot go back.
void session::run_rows(int n, const std::vector<int> & slots) {
    batch_.n_tokens = n;
    features_.clear();
    int rc = 0;
    try {
        rc = llama_decode(
            ctx_, batch_);  // which may throw: a graph that cannot be built, an evaluation callback
    } catch (...) {
        drop_rows(slots);
        throw;
    }
    if (rc == 0) {
        return;
    }
    drop_rows(slots);
    require(rc != -4, EAGLE3_E_UNSUPPORTED,
        "this target does not let the layers be captured that the head reads");
    throw error(
        EAGLE3_E_DECODE, rc == 1 ? "the context's memory is full" : format("llama_decode returned %d", rc));
}

// Of each slot, what the target's memory holds beyond n_past.
void session::drop_rows(const std::vector<int> & slots) {
    llama_memory_tree_set(memory_, nullptr, 0);
    for (const int slot : slots) {
        drop_from(slot, at(slot).n_past);
    }
}

// Drops what the target's memory holds of a slot from n_past on. A memory that cannot drop a part drops all
// of it, so that n_past, then 0, is what it holds: false.
bool session::drop_from(int slot, int n_past) {
    if (llama_memory_seq_rm(memory_, slot, n_past, -1)) {
        return true;
    }
    llama_memory_seq_rm(memory_, slot, -1, -1);
    at(slot) = slot_state();
    return false;
}

void session::run_batch(int slot, const int32_t * tokens, int n, bool all_logits) {
    const slot_state & s = at(slot);
    require(!round_.open, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n >= 1 && n <= n_batch_, EAGLE3_E_ARGUMENT,
        format("a batch of %d tokens, n_batch is %d", n, n_batch_));
    require(s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("%d tokens do not fit after %d of %d", n, s.n_past, n_ctx_));
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", tokens[i]));
        batch_.token[i]     = tokens[i];
        batch_.pos[i]       = s.n_past + i;
        batch_.n_seq_id[i]  = 1;
        batch_.seq_id[i][0] = slot;
        batch_.logits[i]    = all_logits || i == n - 1;
    }
    run_rows(n, {slot});
}

void session::prefill(int slot, const int32_t * tokens, int n, bool all_logits) {
    slot_state & s = at(slot);
    run_batch(slot, tokens, n, all_logits || (capture_ && captures_after_last_layer(*head_)));
    const int pos = s.n_past;
    s.n_past += n;
    s.trust = 1.0f;
    planner_.new_text();
    if (!capture_) {
        s.clear_pending(s.n_past);  // what waited is not followed by what comes next
        return;
    }
    head_part(s, [&] {
        if (n_pending(s) > 0 && (int) s.pending_tokens.size() == n_pending(s) - 1) {
            s.pending_tokens.push_back(tokens[0]);
        }
        take_features(s, pos, n);
        s.pending_tokens.insert(s.pending_tokens.end(), tokens + 1, tokens + n);
        feed(slot);
    });
}

// -- decode -----------------------------------------------------------------------------------------------

// What the slot brings to the round. parents: null for a chain; else the draft that each draft follows, -1
// for token.
void session::begin_round(int slot, int32_t token, const int32_t * draft, const int32_t * parents, int n) {
    slot_state & s = at(slot);
    require(!round_.open, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n >= 0 && n <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
        format("a draft of %d tokens, at most %d are allowed", n, MAX_DRAFT));
    require(s.n_past + n + 1 <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("%d tokens do not fit after %d of %d", n + 1, s.n_past, n_ctx_));
    s.round_tokens.assign(1, token);
    s.round_tokens.insert(s.round_tokens.end(), draft, draft + n);
    for (const int32_t id : s.round_tokens) {
        require(id >= 0 && id < n_vocab_, EAGLE3_E_ARGUMENT, format("token %d is not in the vocabulary", id));
    }
    s.round_parents.assign(1, -1);
    std::vector<int> depth(1, 0);
    for (int i = 0; i < n; ++i) {
        const int32_t parent = parents ? parents[i] + 1 : i;
        require(parent >= 0 && parent <= i, EAGLE3_E_ARGUMENT,
            format("draft %d follows draft %d: parents come first", i, parent - 1));
        s.round_parents.push_back(parent);
        require(depth[parent] + 1 >= depth[i], EAGLE3_E_ARGUMENT,
            format("draft %d is on a higher level than draft %d: levels come in order", i, i - 1));
        depth.push_back(depth[parent] + 1);
    }
    s.round_tree = parents && n > 0;
    s.round_path.assign(1, 0);
}

// The batch: level by level over all slots, so that rows that verification gets to together lie together.
void session::lay_out_rows(const std::vector<int> & slots) {
    round_.slots = slots;
    round_.slot_of.clear();
    round_.row_of.clear();
    round_.tree = false;
    std::vector<std::vector<int>> depth(slots.size());
    size_t n = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
        slot_state & s = at(slots[i]);
        for (const int32_t parent : s.round_parents) {
            depth[i].push_back(parent < 0 ? 0 : depth[i][parent] + 1);
        }
        s.round_at.assign(s.round_tokens.size(), 0);
        round_.tree = round_.tree || s.round_tree;
        n += s.round_tokens.size();
    }
    require(n <= (size_t) std::min(n_batch_, MAX_ROWS), EAGLE3_E_ARGUMENT,
        format("a round of %zu rows, at most %d are allowed", n, std::min(n_batch_, MAX_ROWS)));
    for (int level = 0; round_.slot_of.size() < n; ++level) {
        for (size_t i = 0; i < slots.size(); ++i) {
            slot_state & s = at(slots[i]);
            for (size_t r = 0; r < s.round_tokens.size(); ++r) {
                if (depth[i][r] != level) {
                    continue;
                }
                const int b         = (int) round_.slot_of.size();
                s.round_at[r]       = b;
                batch_.token[b]     = s.round_tokens[r];
                batch_.pos[b]       = s.n_past + level;
                batch_.n_seq_id[b]  = 1;
                batch_.seq_id[b][0] = slots[i];
                batch_.logits[b]    = true;
                round_.slot_of.push_back(slots[i]);
                round_.row_of.push_back((int32_t) r);
            }
        }
    }
}

void session::decode_rounds(const std::vector<int> & slots) {
    lay_out_rows(slots);
    const int n = (int) round_.slot_of.size();
    std::vector<int32_t> parents(n);
    bool drafted = n > (int) slots.size(), known = true;
    for (int b = 0; b < n; ++b) {
        const slot_state & s = at(round_.slot_of[b]);
        const int32_t parent = s.round_parents[round_.row_of[b]];
        parents[b]           = parent < 0 ? -1 : s.round_at[parent];
        known                = known && s.draft_reach.size() + 1 == s.round_tokens.size();
    }
    require(!round_.tree || (int) llama_n_ubatch(ctx_) >= n, EAGLE3_E_ARGUMENT,
        format("a tree of %d rows does not fit a micro-batch of %u", n, llama_n_ubatch(ctx_)));
    require(llama_memory_tree_set(memory_, parents.data(), round_.tree ? n : 0), EAGLE3_E_UNSUPPORTED,
        "the target's memory cannot hold a tree: it needs flash attention");
    const bool defers = planner_.ready() && known && drafted;
    const deferral deferred(ctx_, defers);
    const int64_t start = ggml_time_us();
    run_rows(n, slots);
    llama_synchronize(ctx_);
    round_.layers_seconds = 1e-6f * (ggml_time_us() - start);
    round_.done           = defers ? 0 : ~uint64_t(0);
    round_.output_seconds = 0.0f;
    round_.open           = true;
    for (const int slot : slots) {
        at(slot).in_round = true;
    }
}

void session::decode(int slot, int32_t token, const int32_t * draft, const int32_t * parents, int n) {
    begin_round(slot, token, draft, parents, n);
    decode_rounds({slot});
}

void session::decode_many() {
    require(!round_.slots.empty() && !round_.open, EAGLE3_E_ARGUMENT, "nothing to decode: draft first");
    decode_rounds(std::vector<int>(round_.slots));
}

// -- verify -----------------------------------------------------------------------------------------------

// The reach of each row, now that every slot has come as far as its path says.
void session::reach_now() {
    round_.reach.assign(round_.slot_of.size(), 0.0f);
    for (const int slot : round_.slots) {
        const slot_state & s = at(slot);
        const int now        = s.round_path.back();
        const auto reach     = [&](int row) {
            return row == 0 ? 1.0f : row - 1 < (int) s.draft_reach.size() ? s.draft_reach[row - 1] : 1.0f;
        };
        std::vector<bool> below(s.round_tokens.size(), false);
        for (int row = now; row < (int) s.round_tokens.size() && s.in_round; ++row) {
            below[row] = row == now || (s.round_parents[row] >= now && below[s.round_parents[row]]);
            if (below[row]) {
                round_.reach[s.round_at[row]] = reach(row) / std::max(reach(now), 1e-6f);
            }
        }
    }
}

// Logits of a row of the batch: computed when verification gets to it, with those after it that are worth it.
void session::need_logits(int row) {
    if ((round_.done >> row) & 1) {
        return;
    }
    reach_now();
    const int n = planner_.piece(round_.reach, row);
    compute_logits(ctx_, row, n);
    round_.output_seconds += planner_.piece_seconds(n);
    for (int i = row; i < row + n; ++i) {
        round_.done |= uint64_t(1) << i;
    }
}

// Samples at the end of the slot's path, which goes on if a draft agrees: 1, or 0 if it ends here.
int session::sample_row(slot_state & s, llama_sampler * sampler, int32_t & token) {
    const int row = s.round_path.back(), n_rows = (int) s.round_tokens.size();
    need_logits(s.round_at[row]);
    token    = sample(sampler, s.round_at[row]);
    int next = row + 1;
    while (next < n_rows && !(s.round_parents[next] == row && s.round_tokens[next] == token)) {
        ++next;
    }
    if (next == n_rows || llama_vocab_is_eog(llama_model_get_vocab(llama_get_model(ctx_)), token)) {
        return 0;
    }
    s.round_path.push_back(next);
    return 1;
}

int session::verify(int slot, llama_sampler * sampler, int32_t * out) {
    slot_state & s = at(slot);
    require(s.in_round, EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    s.round_path.assign(1, 0);
    int n = 0;
    while (sample_row(s, sampler, out[n++])) {
    }
    return n;
}

// Level by level, as the batch lies: rows that several slots get to share a piece of the output matrix.
void session::verify_many(llama_sampler * const * samplers, int32_t * out, int32_t * counts) {
    require(round_.open, EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    const size_t n = round_.slots.size();
    for (const int slot : round_.slots) {
        at(slot).round_path.assign(1, 0);
    }
    std::vector<bool> over(n, false);
    std::fill_n(counts, n, 0);
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < n; ++i) {
            if (over[i]) {
                continue;
            }
            try {
                over[i] = !sample_row(at(round_.slots[i]), samplers[i], out[i * (MAX_DRAFT + 1) + counts[i]]);
                ++counts[i];
            } catch (const error & e) {
                if (e.status == EAGLE3_E_DECODE) {
                    throw;
                }
                counts[i] = e.status;
                over[i]   = true;
            } catch (const std::exception &) {  // a sampler's, of a grammar say: the others go on
                counts[i] = EAGLE3_E_INTERNAL;
                over[i]   = true;
            }
            more = more || !over[i];
        }
    }
}

int session::verified_row(int slot, int i) const {
    const slot_state & s = at(slot);
    require(i >= 0 && i < (int) s.round_path.size(), EAGLE3_E_ARGUMENT,
        format("the last round sampled %zu rows, not %d", s.round_path.size(), i + 1));
    return s.round_at[s.round_path[i]];
}

bool session::can_tree() {
    require(
        !round_.open, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");  // its tree would be lost
    const int32_t root = -1;
    const bool ok      = llama_memory_tree_set(memory_, &root, 1);
    llama_memory_tree_set(memory_, nullptr, 0);
    return ok;
}

// -- commit -----------------------------------------------------------------------------------------------

void session::commit(int slot, int n_keep) {
    const slot_state & s = at(slot);
    if (!s.in_round) {
        return;
    }
    require(
        round_.slots.size() == 1, EAGLE3_E_ARGUMENT, "the round holds several slots: commit them together");
    commit_many(&n_keep);
}

// Nothing of the round stays.
void session::abandon_round() {
    commit_many(std::vector<int32_t>(round_.slots.size(), 0).data());
}

// The first n rows of the slot's way: of a chain any, verified or not.
std::vector<int32_t> session::kept_path(const slot_state & s, int n) const {
    std::vector<int32_t> path = s.round_path;
    if (!s.round_tree) {
        path.resize(s.round_tokens.size());
        std::iota(path.begin(), path.end(), 0);
    }
    require(n >= 0 && n <= (int) path.size(), EAGLE3_E_ARGUMENT,
        format("cannot keep %d of %zu rows", n, path.size()));
    path.resize(n);
    return path;
}

// Rows of the batch that stay, ascending.
std::vector<uint32_t> session::kept_rows(const int32_t * keep) const {
    std::vector<uint32_t> rows;
    for (size_t i = 0; i < round_.slots.size(); ++i) {
        const slot_state & s = at(round_.slots[i]);
        for (const int32_t row : kept_path(s, keep[i])) {
            rows.push_back(s.round_at[row]);
        }
    }
    std::sort(rows.begin(), rows.end());
    return rows;
}

// Every slot's round ends here, whatever becomes of its rows: one that fails takes no other with it. The
// first failure is thrown.
void session::commit_many(const int32_t * keep) {
    if (!round_.open) {
        return;
    }
    const std::vector<uint32_t> rows = kept_rows(keep);
    round_.open                      = false;
    for (const int slot : round_.slots) {
        at(slot).in_round = false;
    }
    if (round_.tree && !llama_memory_tree_keep(memory_, rows.data(), (uint32_t) rows.size())) {
        draft_.planned = false;
        drop_rows(round_.slots);
        throw error(EAGLE3_E_INTERNAL, "the target's memory has lost its tree");
    }
    int n_tokens = 0;
    std::exception_ptr failure;
    for (size_t i = 0; i < round_.slots.size(); ++i) {
        try {
            keep_rows(round_.slots[i], keep[i]);
            n_tokens += keep[i];
        } catch (...) {
            failure = failure ? failure : std::current_exception();
        }
    }
    if (planner_.ready() && n_tokens > 0) {
        tell_planner(n_tokens);
    }
    draft_.planned = false;
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// The target's part of a slot's commit, then the head's: if that fails, the rows stay, and the head starts
// over behind them.
void session::keep_rows(int slot, int n_keep) {
    slot_state & s = at(slot);
    if (!round_.tree && n_keep < (int) s.round_tokens.size()) {
        require(drop_from(slot, s.n_past + n_keep), EAGLE3_E_UNSUPPORTED,
            format("the target cannot drop part of a sequence: slot %d is empty now", slot));
    }
    const int pos = s.n_past;
    s.n_past += n_keep;
    head_part(s, [&] {
        if (planner_.ready() && n_keep > 0) {
            learn(s);
        }
        keep_features(s, pos, n_keep);
        if (n_pending(s) > MAX_PENDING) {
            feed(slot);
        }
    });
}

// Of the rows that stay, which begin at pos.
void session::keep_features(slot_state & s, int pos, int n_keep) {
    if (n_keep == 0) {
        return;
    }
    if (!capture_) {
        s.clear_pending(s.n_past);
        return;
    }
    if (n_pending(s) > 0 && (int) s.pending_tokens.size() == n_pending(s) - 1) {
        s.pending_tokens.push_back(s.round_tokens[0]);
    }
    const std::vector<int32_t> path = kept_path(s, n_keep);
    std::vector<int32_t> rows;
    for (const int32_t row : path) {
        rows.push_back(s.round_at[row]);
    }
    take_features(s, pos, rows);
    for (int k = 1; k < n_keep; ++k) {
        s.pending_tokens.push_back(s.round_tokens[path[k]]);
    }
}

// What verification found out about the drafts it got to.
void session::learn(slot_state & s) {
    const int n_rows = (int) s.round_tokens.size();
    std::vector<int> depth(n_rows, 0), children(n_rows, 0);
    for (int row = 1; row < n_rows && n_rows - 1 == (int) s.draft_probs.size(); ++row) {
        const int parent   = s.round_parents[row];
        depth[row]         = depth[parent] + 1;
        const int rank     = children[parent]++;
        const auto at_path = std::find(s.round_path.begin(), s.round_path.end(), parent);
        if (at_path != s.round_path.end()) {
            planner_.learn(depth[row], rank, s.draft_probs[row - 1],
                at_path + 1 != s.round_path.end() && at_path[1] == row, s.trust);
        }
    }
}

// What the round took and brought.
void session::tell_planner(int n_tokens) {
    if (!draft_.planned) {
        return;
    }
    planner::round r;
    r.n_rows   = (int) round_.slot_of.size();
    r.tried    = draft_.steps > 0;
    r.layers_s = round_.layers_seconds;
    r.whole    = round_.done == ~uint64_t(0);
    r.draft_s  = draft_.seconds;
    r.total_s  = 1e-6f * (ggml_time_us() - draft_.start);
    r.n_tokens = n_tokens;
    r.value    = draft_.value;
    r.output_s = round_.output_seconds;
    planner_.saw_round(r);
}

}  // namespace eagle3
