// A round: one target batch for the slots that take part, verification of its rows, and the commit of those
// that stay.
#include "session.hpp"

#include <algorithm>
#include <numeric>

#include "deferral.hpp"

namespace eagle3 {

// Decodes the first n rows of batch_. If that fails, the slots hold what they held before, or nothing if
// their memory cannot drop part of a sequence.
void session::run_rows(int n, const std::vector<int> & slots) {
    batch_.n_tokens = n;
    round_.sampled  = false;
    int rc          = 0;
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
    require(rc != -2, EAGLE3_E_MEMORY, "not enough memory to decode");
    throw error(
        EAGLE3_E_DECODE, rc == 1 ? "the context's memory is full" : format("llama_decode returned %d", rc));
}

// Drops what the target's memory holds beyond each slot's n_past.
void session::drop_rows(const std::vector<int> & slots) {
    llama_memory_tree_set(memory_, nullptr, 0);
    for (const int slot : slots) {
        drop_from(slot, at(slot).n_past);
    }
}

// Drops what the target's memory holds of a slot from n_past on. A memory that cannot drop a part drops the
// whole sequence; the slot is then empty, and the result is false.
bool session::drop_from(int slot, int n_past) {
    if (llama_memory_seq_rm(memory_, slot, n_past, -1)) {
        return true;
    }
    llama_memory_seq_rm(memory_, slot, -1, -1);
    drop_draft();
    at(slot) = slot_state();
    for (const auto & from : sources_) {
        from->reset(slot, 0);
    }
    return false;
}

// Decodes tokens after what the slot holds. Returns what its sources will be told of them.
kept_tokens session::run_batch(int slot, const int32_t * tokens, int n, bool all_logits) {
    const slot_state & s = at(slot);
    check_rests();
    require(n >= 1 && n <= n_batch_, EAGLE3_E_ARGUMENT,
        format("a batch of %d tokens, n_batch is %d", n, n_batch_));
    require(s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("%d tokens do not fit after %d of %d", n, s.n_past, n_ctx_));
    check_tokens(tokens, n);
    const std::vector<int> slots(1, slot);
    kept_tokens k = {slot, s.n_past, {tokens, tokens + n}, std::vector<int32_t>(n), true};
    std::iota(k.rows.begin(), k.rows.end(), 0);
    drop_draft();
    for (int i = 0; i < n; ++i) {
        batch_.token[i]     = tokens[i];
        batch_.pos[i]       = s.n_past + i;
        batch_.n_seq_id[i]  = 1;
        batch_.seq_id[i][0] = slot;
        batch_.logits[i]    = all_logits || i == n - 1;
    }
    run_rows(n, slots);
    return k;
}

void session::prefill(int slot, const int32_t * tokens, int n, bool all_logits) {
    slot_state & s      = at(slot);
    const kept_tokens k = run_batch(slot, tokens, n, all_logits || (head_ && head_->needs_all_logits()));
    s.n_past += n;
    s.trust.fill(1.0f);
    planner_.new_text();
    tell(k);
}

// -- decode -----------------------------------------------------------------------------------------------

// The slot's rows of the round: the token, then its draft.
void session::begin_round(slot_state & s, int32_t token) {
    const int n = (int) s.draft_tokens.size();
    s.round_tokens.assign(1, token);
    s.round_parents.assign(1, -1);
    s.round_path.assign(1, 0);
    s.round_tree = false;
    s.sampled    = -1;
    for (int i = 0; i < n; ++i) {
        const int32_t parent = s.draft_parents[i] + 1;
        s.round_tokens.push_back(s.draft_tokens[i]);
        s.round_parents.push_back(parent);
        s.round_tree = s.round_tree || parent != i;  // a chain is one that any target can check
    }
}

// Fills the batch level by level over all slots: verification reaches the rows of a level together, so they
// share a piece of the output matrix.
void session::lay_out_rows() {
    const std::vector<int> & slots = round_.slots;
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

// Tells the memory which rows of the next batch follow which. If that fails, no tree stays behind: the next
// batch, a prompt say, would be taken for it.
void session::set_tree(const std::vector<int32_t> & parents) {
    try {
        if (!llama_memory_tree_set(memory_, parents.data(), round_.tree ? (uint32_t) parents.size() : 0)) {
            throw error(
                EAGLE3_E_UNSUPPORTED, "the target's memory cannot hold a tree: it needs flash attention");
        }
    } catch (...) {
        llama_memory_tree_set(memory_, nullptr, 0);
        throw;
    }
}

void session::decode() {
    require(round_.at == stage::drafted, EAGLE3_E_ARGUMENT,
        under_way() ? "a round is under way: commit it first" : "nothing to decode: draft first");
    const std::vector<int> & slots = round_.slots;
    lay_out_rows();
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
    set_tree(parents);
    const bool defers = planner_.ready() && known && drafted;
    const deferral deferred(ctx_, defers);
    const int64_t start = ggml_time_us();
    run_rows(n, slots);
    llama_synchronize(ctx_);
    round_.layers_seconds = 1e-6f * (ggml_time_us() - start);
    round_.done           = defers ? 0 : ~uint64_t(0);
    round_.output_seconds = 0.0f;
    round_.at             = stage::decoded;
    for (const int slot : slots) {
        at(slot).in_round = true;
    }
}

// -- verify -----------------------------------------------------------------------------------------------

// Computes the reach of each row, given the path that each slot's verification has taken so far.
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

// Computes the logits of a row of the batch unless they are there, and with them those of the rows after it
// that are likely enough to be reached.
void session::need_logits(int row) {
    if ((round_.done >> row) & 1) {
        return;
    }
    reach_now();
    const int n         = planner_.piece(round_.reach, row);
    const int64_t start = ggml_time_us();
    compute_logits(ctx_, row, n);
    const float seconds = 1e-6f * (ggml_time_us() - start);
    planner_.saw_piece(n, seconds);
    round_.output_seconds += seconds;
    for (int i = row; i < row + n; ++i) {
        round_.done |= uint64_t(1) << i;
    }
}

// Samples at the end of the slot's path. If a draft token agrees, the path continues with it: 1, else 0.
int session::sample_row(slot_state & s, llama_sampler * sampler, int32_t & token) {
    const int row = s.round_path.back(), n_rows = (int) s.round_tokens.size();
    need_logits(s.round_at[row]);
    token     = sample(sampler, s.round_at[row]);
    s.sampled = row == 0 ? token : s.sampled;
    int next  = row + 1;
    while (next < n_rows && !(s.round_parents[next] == row && s.round_tokens[next] == token)) {
        ++next;
    }
    if (next == n_rows || llama_vocab_is_eog(llama_model_get_vocab(llama_get_model(ctx_)), token)) {
        return 0;
    }
    s.round_path.push_back(next);
    return 1;
}

namespace {

// The code of the exception being handled, and its message.
int32_t caught(std::string & message) {
    try {
        try {
            throw;
        } catch (const error & e) {
            message = e.what();
            return e.status;
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {  // a sampler's, of a grammar say
            message = e.what();
            return EAGLE3_E_INTERNAL;
        }
    } catch (const std::bad_alloc &) {
        message = "out of memory";
        return EAGLE3_E_MEMORY;
    }
}

}  // namespace

// Goes level by level, in the order of the batch. Once a sampler has taken a token, nothing is allocated:
// what it took is reported.
void session::verify(
    llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure) {
    require(under_way(), EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    const size_t n = round_.slots.size();
    require(
        std::find(samplers, samplers + n, nullptr) == samplers + n, EAGLE3_E_ARGUMENT, "a sampler is NULL");
    std::vector<bool> over(n, false);
    for (const int slot : round_.slots) {
        at(slot).round_path.reserve(at(slot).round_tokens.size());
        at(slot).round_path.assign(1, 0);
    }
    round_.at      = stage::verified;
    round_.sampled = true;
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
            } catch (...) {  // the others go on
                counts[i] = caught(failure);
                over[i]   = true;
                if (counts[i] == EAGLE3_E_DECODE) {
                    throw;
                }
            }
            more = more || !over[i];
        }
    }
}

int session::verified_row(int slot, int i) const {
    const slot_state & s           = at(slot);
    const std::vector<int> & slots = round_.slots;
    require(round_.sampled && std::find(slots.begin(), slots.end(), slot) != slots.end(), EAGLE3_E_ARGUMENT,
        format("slot %d sampled no rows of the last decode", slot));
    require(i >= 0 && i < (int) s.round_path.size(), EAGLE3_E_ARGUMENT,
        format("the last round sampled %zu rows, not %d", s.round_path.size(), i + 1));
    return s.round_at[s.round_path[i]];
}

bool session::can_tree() {
    check_rests();  // its tree would be lost
    const int32_t root = -1;
    const bool ok      = llama_memory_tree_set(memory_, &root, 1);
    llama_memory_tree_set(memory_, nullptr, 0);
    return ok;
}

// -- commit -----------------------------------------------------------------------------------------------

// The round is over for all its slots; what they keep is another matter.
void session::end_round() {
    round_.at = stage::none;
    for (const int slot : round_.slots) {
        at(slot).in_round = false;
    }
}

// Ends the round; none of its rows stay. Allocates nothing, so that it works without memory, too.
void session::abandon_round() {
    end_round();
    draft_.planned = false;
    llama_memory_tree_set(memory_, nullptr, 0);
    bool whole = true;
    for (const int slot : round_.slots) {
        whole = drop_from(slot, at(slot).n_past) && whole;
    }
    set_capture(capture_);
    if (!whole) {
        throw error(EAGLE3_E_UNSUPPORTED,
            "the target cannot drop part of a sequence: the slots of the round are empty now");
    }
}

// The first n rows of the slot's path. Of a chain they may be any, verified or not.
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

// What each slot keeps of the round, for its sources.
std::vector<kept_tokens> session::kept_of(const int32_t * keep) const {
    std::vector<kept_tokens> kept;
    for (size_t i = 0; i < round_.slots.size(); ++i) {
        const slot_state & s = at(round_.slots[i]);
        kept_tokens k        = {round_.slots[i], s.n_past, {}, {}, false};
        for (const int32_t row : kept_path(s, keep[i])) {
            k.tokens.push_back(s.round_tokens[row]);
            k.rows.push_back(s.round_at[row]);
        }
        kept.push_back(std::move(k));
    }
    return kept;
}

// Of a tree: these rows stay in the target's memory, in order, and no others.
void session::keep_tree(const std::vector<kept_tokens> & kept) {
    if (!round_.tree) {
        return;
    }
    std::vector<uint32_t> rows;
    for (const kept_tokens & k : kept) {
        rows.insert(rows.end(), k.rows.begin(), k.rows.end());
    }
    std::sort(rows.begin(), rows.end());
    if (!llama_memory_tree_keep(memory_, rows.data(), (uint32_t) rows.size())) {
        throw error(EAGLE3_E_INTERNAL, "the target's memory has lost its tree");
    }
}

// Ends the round of every slot, also if one of them fails. Throws the first failure. E_ARGUMENT leaves it
// under way.
void session::commit(const int32_t * keep) {
    if (!under_way()) {
        return;
    }
    std::vector<kept_tokens> kept;
    try {
        kept = kept_of(keep);
        keep_tree(kept);
    } catch (const error & e) {
        if (e.status != EAGLE3_E_ARGUMENT) {
            abandon_round();
        }
        throw;
    } catch (...) {
        abandon_round();
        throw;
    }
    end_round();
    int n_tokens = 0;
    std::exception_ptr failure;
    for (const kept_tokens & k : kept) {
        try {
            keep_rows(k);
            n_tokens += (int) k.tokens.size();
        } catch (...) {
            failure = failure ? failure : std::current_exception();
        }
    }
    if (planner_.ready() && n_tokens > 0) {
        tell_planner(n_tokens);
    }
    draft_.planned = false;
    set_capture(capture_);
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Commits a slot: in the target, then in the sources. If a source fails, the rows stay.
void session::keep_rows(const kept_tokens & k) {
    slot_state & s   = at(k.slot);
    const int n_keep = (int) k.tokens.size();
    if (!round_.tree && n_keep < (int) s.round_tokens.size() && !drop_from(k.slot, s.n_past + n_keep)) {
        throw error(EAGLE3_E_UNSUPPORTED,
            format("the target cannot drop part of a sequence: slot %d is empty now", k.slot));
    }
    if (n_keep == 0) {
        return;
    }
    s.n_past += n_keep;
    tell(k);
    if (planner_.ready()) {
        learn(s);
    }
}

// Teaches the planner which of the draft tokens that verification reached were accepted, for each source that
// offered them.
void session::learn(slot_state & s) {
    const int n_rows = (int) s.round_tokens.size();
    std::vector<int> depth(n_rows, 0);
    std::vector<std::array<int, MAX_SOURCES>> children(n_rows);
    for (int row = 1; row < n_rows && n_rows - 1 == (int) s.draft_evidence.size(); ++row) {
        const int parent    = s.round_parents[row];
        depth[row]          = depth[parent] + 1;
        const auto at_path  = std::find(s.round_path.begin(), s.round_path.end(), parent);
        const bool reached  = at_path != s.round_path.end();
        const bool accepted = reached && at_path + 1 != s.round_path.end() && at_path[1] == row;
        for (int from = 0; from < MAX_SOURCES; ++from) {
            const float q = s.draft_evidence[row - 1][from];
            if (q == NOT_OFFERED) {
                continue;
            }
            const int rank = children[parent][from]++;
            if (reached) {
                planner_.learn(from, depth[row], rank, q, accepted, s.trust[from]);
            }
        }
    }
    learn_undrafted(s);
}

// Teaches the planner which of the first tokens that were offered and not drafted the target sampled.
void session::learn_undrafted(slot_state & s) {
    std::array<int, MAX_SOURCES> ranks{};
    for (const slot_state::first_token & v : s.undrafted) {
        for (int from = 0; from < MAX_SOURCES && s.sampled >= 0; ++from) {
            if (v.evidence[from] != NOT_OFFERED) {
                planner_.learn(from, 1, ranks[from]++, v.evidence[from], v.token == s.sampled, s.trust[from]);
            }
        }
    }
}

// Tells the planner how long the round took and how many tokens it brought.
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
    r.passes_s = draft_.passes_seconds;
    planner_.saw_round(r);
}

}  // namespace eagle3
