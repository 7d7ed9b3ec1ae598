// This is a round on one page: draft, decode, verify, commit. What they call is below, in round_verify.cpp
// in round_memory.cpp and in round_learn.cpp; what chooses the number of threads in round_threads.cpp.
#include "session/round.hpp"

#include "target/deferral.hpp"
#include "sampling/sampling.hpp"

#include <algorithm>
#include <numeric>

namespace eagle3 {

// Drafts tokens that may follow each ask's token.
int round::draft(const std::vector<ask> & asks) {
    check_rests();
    drafter_.check(asks);
    at_      = stage::none;  // nothing to decode, should a slot fail
    sampled_ = false;
    of_.clear();
    const thread_scope scope(slots_.ctx, threads());
    drafter_.draft(asks);
    std::vector<int> of;
    int total = 0;
    for (const ask & a : asks) {
        slot_state & s = slots_.at(a.slot);
        begin(s, a.token);
        s.round.of_prompt = a.kind == EAGLE3_PROMPT;
        of.push_back(a.slot);
        total += (int) s.draft.tokens.size();
    }
    of_ = std::move(of);
    at_ = stage::drafted;
    return total;
}

// Runs one target batch of each slot's token and its draft. The output matrix waits for verification where
// the planner knows what rows cost, and how likely each is reached.
void round::decode() {
    check_rests();
    require(at_ == stage::drafted, EAGLE3_E_ARGUMENT, "nothing to decode: draft first");
    prepare_memory();
    lay_out();
    set_tree();
    const int n       = (int) slot_of_.size();
    const bool drafts = n - n_waiting_ > (int) of_.size();
    const bool defers = planner_.ready() && drafts && knows_reach();
    lay_out_waiting(defers);
    const deferral deferred(slots_.ctx, defers);
    // a sampler of whole rows waits less if a row that is certain to be sampled is copied with the decode
    const bool stay = slots_.n_largest > 0 || drafts;
    const logits_stay stays(slots_.ctx, stay, slots_.n_largest);
    const thread_scope scope(slots_.ctx, threads_);
    const int64_t start = ggml_time_us();
    run(n);
    llama_synchronize(slots_.ctx);
    layers_seconds_ = 1e-6f * (ggml_time_us() - start);
    output_seconds_ = 0.0f;
    whole_          = llama_has_logits_ith(slots_.ctx, n - 1);
    at_             = stage::decoded;
    tell_threads(n);
    for (const int slot : of_) {
        slots_.at(slot).round.under_way = true;
    }
}

// Samples each slot's rows, from child to child, until a token differs from the draft. It goes level by
// level, in the order of the batch. Once a sampler has taken a token, nothing is allocated: what it took is
// reported.
void round::verify(llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure) {
    require(under_way(), EAGLE3_E_ARGUMENT, "nothing to verify: decode first");
    const size_t n = of_.size();
    const thread_scope scope(slots_.ctx, threads_);
    require(
        std::find(samplers, samplers + n, nullptr) == samplers + n, EAGLE3_E_ARGUMENT, "a sampler is NULL");
    std::vector<bool> over(n, false);
    begin_paths();
    slots_.n_largest = 0;
    for (size_t i = 0; i < n; ++i) {
        slots_.n_largest = std::max(slots_.n_largest, n_largest_for(samplers[i]));
    }
    at_      = stage::verified;
    sampled_ = true;
    std::fill_n(counts, n, 0);
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < n; ++i) {
            if (over[i]) {
                continue;
            }
            try {
                over[i] =
                    !sample_row(slots_.at(of_[i]).round, samplers[i], out[i * (MAX_DRAFT + 1) + counts[i]]);
                ++counts[i];
            } catch (...) {  // the others go on
                const int code                  = caught(failure);
                slots_.at(of_[i]).round.failure = code;
                counts[i]                       = counts[i] > 0 ? counts[i] : code;
                over[i]                         = true;
                if (code == EAGLE3_E_DECODE) {
                    throw;
                }
            }
            more = more || !over[i];
        }
    }
}

// Keeps so many rows of each slot and drops the others. It ends the round of every slot, also if one of them
// fails, and throws the first failure. E_ARGUMENT leaves the round under way.
void round::commit(const int32_t * keep) {
    if (!under_way()) {
        return;
    }
    const std::vector<kept_tokens> kept = begin_commit(keep);
    end();
    int n_tokens       = 0;
    const auto failure = for_all(kept, [&](const kept_tokens & k) {
        keep_rows(k);
        n_tokens += (int) k.tokens.size();
    });
    if (planner_.ready() && n_tokens > 0 && !is_trial_) {
        tell_planner(n_tokens);
    }
    drafter_.forget_last();
    slots_.apply_wanted();
    rethrow(failure);
}

// -- what may be called when ------------------------------------------------------------------------------

void round::check_rests() const {
    require(!under_way(), EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
}

void round::check_rests(int slot) const {
    require(!slots_.at(slot).round.under_way, EAGLE3_E_ARGUMENT,
        format("a round of slot %d is under way: commit it first", slot));
}

void round::drop_draft() {
    if (at_ == stage::drafted) {
        at_ = stage::none;
    }
}

void round::end_of(int slot) {
    if (slots_.at(slot).round.under_way) {
        abandon();
    }
    drop_draft();
}

void round::begin_other() {
    drop_draft();
    sampled_ = false;
}

// The round is over for all its slots; what they keep is another matter.
void round::end() {
    at_ = stage::none;
    for (const int slot : of_) {
        slots_.at(slot).round.under_way = false;
    }
}

void round::abandon() {
    end();
    drafter_.forget_last();
    const bool whole = slots_.drop_rows(of_.data(), (int) of_.size());
    slots_.apply_wanted();
    if (!whole) {
        throw error(EAGLE3_E_UNSUPPORTED,
            "the target cannot go back to a part of a sequence: the slots of the round are empty now");
    }
}

// -- decode -----------------------------------------------------------------------------------------------

// Lays out the slot's rows of the round: the token, then its draft.
void round::begin(slot_state & s, int32_t token) {
    slot_round & r = s.round;
    r.tokens.assign(1, token);
    r.parents.assign(1, -1);
    r.path.assign(1, 0);
    r.tree    = false;
    r.sampled = -1;
    for (int i = 0; i < (int) s.draft.tokens.size(); ++i) {
        const int32_t parent = s.draft.parents[i] + 1;
        r.tokens.push_back(s.draft.tokens[i]);
        r.parents.push_back(parent);
        r.tree = r.tree || parent != i;  // a chain is one that any target can check
    }
}

// Fills the batch level by level over all slots: verification reaches the rows of a level together, so they
// share a piece of the output matrix. What waits comes first, and has no number in its slot.
void round::lay_out() {
    slot_of_.clear();
    row_of_.clear();
    tree_ = false;
    std::vector<std::vector<int>> depth;
    size_t n = 0;
    for (const int slot : of_) {
        slot_round & r = slots_.at(slot).round;
        depth.push_back(depths(r.parents.data(), r.parents.size()));
        r.at.assign(r.tokens.size(), 0);
        tree_ = tree_ || r.tree;
        n += r.tokens.size() + slots_.at(slot).waiting.size();
        slot_of_.insert(slot_of_.end(), slots_.at(slot).waiting.size(), slot);
    }
    row_of_.assign(slot_of_.size(), -1);
    n_waiting_     = (int) slot_of_.size();
    const int most = std::min(slots_.n_batch, MAX_ROWS);
    require(n <= (size_t) most, EAGLE3_E_ARGUMENT,
        format("a round of %zu rows, at most %d are allowed", n, most));
    for (int level = 0; slot_of_.size() < n; ++level) {
        for (size_t i = 0; i < of_.size(); ++i) {
            slot_state & s = slots_.at(of_[i]);
            for (size_t row = 0; row < s.round.tokens.size(); ++row) {
                if (depth[i][row] == level) {
                    s.round.at[row] = (int32_t) slot_of_.size();
                    slots_.put_row(s.round.at[row], s.round.tokens[row], s.n_past + level, of_[i], true);
                    slot_of_.push_back(of_[i]);
                    row_of_.push_back((int32_t) row);
                }
            }
        }
    }
}

// Tells the memory which rows of the batch follow which. If that fails, no tree stays behind: the next batch,
// a prompt say, would be taken for it.
void round::set_tree() {
    const int n = (int) slot_of_.size(), n_ubatch = (int) llama_n_ubatch(slots_.ctx);
    std::vector<int32_t> parents(tree_ ? n : 0);
    for (int b = 0; b < (int) parents.size(); ++b) {
        const slot_round & r = slots_.at(slot_of_[b]).round;
        const int32_t parent = r.parents[row_of_[b]];
        parents[b]           = parent < 0 ? -1 : r.at[parent];
    }
    require(!tree_ || n_ubatch >= n, EAGLE3_E_ARGUMENT,
        format("a tree of %d rows does not fit a micro-batch of %d", n, n_ubatch));
    try {
        if (!llama_memory_tree_set(slots_.memory, parents.data(), (uint32_t) parents.size())) {
            const char * why = llama_memory_tree_refusal(slots_.memory);
            throw error(EAGLE3_E_UNSUPPORTED,
                format("the target cannot check a tree: %s", why ? why : "its rows are no tree's"));
        }
    } catch (...) {
        llama_memory_tree_set(slots_.memory, nullptr, 0);
        throw;
    }
}

void round::run(int n) {
    try {
        slots_.run_rows(n, of_.data(), (int) of_.size());
    } catch (...) {
        for (const int slot : of_) {
            if (slots_.at(slot).round.tokens.empty()) {  // it could not go back: nothing to decode again
                drop_draft();
            }
        }
        throw;
    }
}

// -- commit -----------------------------------------------------------------------------------------------

// Returns what each slot keeps; the rows of a tree are in order then. A failure but E_ARGUMENT ends the
// round.
std::vector<kept_tokens> round::begin_commit(const int32_t * keep) {
    try {
        std::vector<kept_tokens> kept = kept_of(keep);
        keep_tree(kept);
        return kept;
    } catch (const error & e) {
        if (e.status != EAGLE3_E_ARGUMENT) {
            abandon();
        }
        throw;
    } catch (...) {
        abandon();
        throw;
    }
}

std::vector<kept_tokens> round::kept_of(const int32_t * keep) const {
    std::vector<kept_tokens> kept;
    for (size_t i = 0; i < of_.size(); ++i) {
        const slot_state & s = slots_.at(of_[i]);
        kept_tokens k        = {of_[i], s.n_past, {}, {}, false};
        for (const int32_t row : kept_path(s.round, keep[i])) {
            k.tokens.push_back(s.round.tokens[row]);
            k.rows.push_back(s.round.at[row]);
        }
        kept.push_back(std::move(k));
    }
    return kept;
}

// Returns the first n rows of the slot's path. Those of a chain may be any, verified or not.
std::vector<int32_t> round::kept_path(const slot_round & r, int n) const {
    std::vector<int32_t> path = r.path;
    if (!r.tree) {
        path.resize(r.tokens.size());
        std::iota(path.begin(), path.end(), 0);
    }
    require(n >= 0 && n <= (int) path.size(), EAGLE3_E_ARGUMENT,
        format("cannot keep %d of %zu rows", n, path.size()));
    path.resize(n);
    return path;
}

// Keeps these rows of a tree in the target's memory, in order, and no others.
void round::keep_tree(const std::vector<kept_tokens> & kept) {
    if (!tree_) {
        return;
    }
    std::vector<uint32_t> rows;
    for (const kept_tokens & k : kept) {
        rows.insert(rows.end(), k.rows.begin(), k.rows.end());
    }
    std::sort(rows.begin(), rows.end());
    if (!llama_memory_tree_keep(slots_.ctx, rows.data(), (uint32_t) rows.size())) {
        throw error(EAGLE3_E_INTERNAL, "the target's memory has lost its tree");
    }
}

// Commits a slot in the target, then in the sources. If a source fails, the rows stay.
void round::keep_rows(const kept_tokens & k) {
    slot_state & s   = slots_.at(k.slot);
    const int n_keep = (int) k.tokens.size(), n_dropped = (int) s.round.tokens.size() - n_keep;
    if (!tree_ && n_dropped > 0) {
        n_copies_ += !slots_.target.will_drop(n_dropped);
        slots_.must_drop_from(k.slot, s.n_past + n_keep);
        s.n_past += n_keep;
    } else {
        slots_.holds(k.slot, s.n_past + n_keep);
    }
    if (n_keep == 0) {
        return;
    }
    slots_.tell(k);
    if (planner_.ready()) {
        learn(s);
    }
}

}  // namespace eagle3
