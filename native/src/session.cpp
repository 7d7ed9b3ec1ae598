#include "session.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>

namespace eagle3 {

session::session(llama_context * ctx, const head * h, int n_slots)
    : ctx_(ctx), memory_(llama_get_memory(ctx)), n_batch_((int) llama_n_batch(ctx)),
      n_ctx_((int) llama_n_ctx_seq(ctx)), slots_(n_slots) {
    const llama_model * model = llama_get_model(ctx);
    n_vocab_                  = llama_vocab_n_tokens(llama_model_get_vocab(model));
    require(memory_ != nullptr, EAGLE3_E_UNSUPPORTED, "the target has no memory of its sequence");
    if (h) {
        require(model == h->target, EAGLE3_E_ARGUMENT, "the head was opened for another model");
        require(!llama_model_is_recurrent(model) && !llama_model_is_hybrid(model), EAGLE3_E_UNSUPPORTED,
            "the target is recurrent or hybrid and cannot drop part of a sequence");
        auto own = std::make_unique<head_source>(ctx, *h, n_slots, n_ctx_);
        head_    = own.get();
        sources_.push_back(std::move(own));
    }
    most_rows_ = std::min({n_batch_, (int) llama_n_ubatch(ctx), MAX_ROWS});
    batch_     = llama_batch_init(n_batch_, 0, 1);
}

void session::add_source(std::unique_ptr<source> source) {
    const int id = 1 + (int) sources_.size() - (head_ != nullptr);  // 0 is the head's
    require(id < MAX_SOURCES, EAGLE3_E_ARGUMENT, "too many sources of drafts");
    require(!source->takes_passes(), EAGLE3_E_ARGUMENT, "only the head may draft by passes");
    source->id = id;
    sources_.push_back(std::move(source));
}

// Leaves the context as it was before the session: without a round, without a tree, with capture off.
session::~session() {
    try {
        abandon_round();
    } catch (const std::exception &) {  // a slot that cannot go back is empty
    }
    llama_memory_tree_set(memory_, nullptr, 0);
    llama_batch_free(batch_);
}

slot_state & session::at(int slot) {
    require(slot >= 0 && slot < (int) slots_.size(), EAGLE3_E_ARGUMENT, format("no slot %d", slot));
    return slots_[slot];
}

const slot_state & session::at(int slot) const {
    return const_cast<session *>(this)->at(slot);
}

head_source & session::need_head() {
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    return *head_;
}

// A round under way was decoded with capture or without, and ends so.
void session::set_capture(bool on) {
    capture_ = on;
    if (head_ && !under_way()) {
        head_->set_capture(on);
    }
}

// The round under way was drafted by other costs: its time is not counted.
void session::set_plan(const costs & c) {
    planner_.set(c);
    draft_.planned = false;
}

void session::check_tokens(const int32_t * tokens, int n) const {
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", tokens[i]));
    }
}

// -- bookkeeping ------------------------------------------------------------------------------------------

void session::rewind(int slot, int n_past) {
    slot_state & s = at(slot);
    require(n_past >= 0 && n_past <= s.n_past, EAGLE3_E_ARGUMENT,
        format("cannot rewind from %d to %d", s.n_past, n_past));
    end_round_of(s);
    if (!llama_memory_seq_rm(memory_, slot, n_past, -1)) {
        throw error(EAGLE3_E_UNSUPPORTED, "the target cannot drop part of a sequence");
    }
    s.n_past = n_past;
    for (const auto & from : sources_) {
        from->rewind(slot, n_past);
    }
}

void session::reset(int slot, int n_past) {
    slot_state & s = at(slot);
    require(n_past >= 0 && n_past <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("position %d is outside the context", n_past));
    require(n_past == 0 || llama_memory_seq_pos_max(memory_, slot) >= 0, EAGLE3_E_ARGUMENT,
        format("slot %d cannot be at position %d: the target holds nothing of its sequence", slot, n_past));
    end_round_of(s);
    s        = slot_state();
    s.n_past = n_past;
    for (const auto & from : sources_) {
        from->reset(slot, n_past);
    }
}

// Tells every source, also if one of them fails. Throws the first failure.
void session::tell(const kept_tokens & k) {
    std::exception_ptr failure;
    for (const auto & from : sources_) {
        try {
            from->kept(k);
        } catch (...) {
            failure = failure ? failure : std::current_exception();
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// The next decode would overwrite the rows of a round under way.
void session::check_rests() const {
    require(!under_way(), EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
}

void session::check_slot_rests(int slot) const {
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    require(!at(slot).in_round, EAGLE3_E_ARGUMENT,
        format("a round of slot %d is under way: commit it first", slot));
}

// A slot has changed, or time has passed that is no part of a round: a draft that is not decoded yet is void.
void session::drop_draft() {
    if (round_.at == stage::drafted) {
        round_.at = stage::none;
    }
}

// Before the slot changes: the round that it takes part in ends, for all its slots.
void session::end_round_of(const slot_state & s) {
    if (s.in_round) {
        abandon_round();
    }
    drop_draft();
}

// -- state: the bytes of the sources, one after the other -------------------------------------------------

int64_t session::state_size(int slot) const {
    at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    int64_t size = 0;
    for (const auto & from : sources_) {
        size += from->state_size(slot);
    }
    return size;
}

void session::state_get(int slot, uint8_t * out) const {
    check_slot_rests(slot);
    for (const auto & from : sources_) {
        from->save(slot, at(slot).n_past, out);
        out += from->state_size(slot);
    }
}

void session::state_set(int slot, const uint8_t * data, int64_t size) {
    at(slot);
    check_slot_rests(slot);
    std::vector<int64_t> begins(1, 0);
    for (const auto & from : sources_) {
        begins.push_back(begins.back() + from->check(data + begins.back(), size - begins.back()));
    }
    require(begins.back() == size, EAGLE3_E_FORMAT, "the state is damaged or belongs to another head");
    drop_draft();
    slot_state s;
    s.n_past = head_source::saved_n_past(data);  // the head is the first source
    for (size_t i = 0; i < sources_.size(); ++i) {
        sources_[i]->restore(slot, s.n_past, data + begins[i]);
    }
    at(slot) = std::move(s);
}

// -- the head alone ---------------------------------------------------------------------------------------

void session::check_head_alone(int slot, const int32_t * tokens, int n) {
    check_slot_rests(slot);
    require(n >= 1 && n <= n_ctx_, EAGLE3_E_ARGUMENT, format("%d rows, expected 1..%d", n, n_ctx_));
    check_tokens(tokens, n);
    drop_draft();
}

void session::head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
    float * state, float * logits) {
    check_head_alone(slot, tokens, n);
    head_->forward(slot, at(slot).n_past, tokens, features, n, g, state, logits);
}

const std::vector<float> & session::head_trace(
    int slot, const int32_t * tokens, const float * features, int n, const char * stage) {
    check_head_alone(slot, tokens, n);
    return head_->trace(slot, at(slot).n_past, tokens, features, n, stage);
}

}  // namespace eagle3
