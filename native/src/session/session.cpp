#include "session/session.hpp"

#include "target/deferral.hpp"
#include "target/lost_device.hpp"
#include "llama-ext.h"

#include <algorithm>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace eagle3 {

session::session(llama_context * ctx, const head * h, int n_slots) : slots_(ctx, h, n_slots) {
    tell_of_lost_devices();
    round_.choose_threads(llama_model_n_devices(llama_get_model(ctx)) == 0);
}

// The destructor leaves the context as it was before the session: without a round, without a tree, with
// capture off.
session::~session() {
    try {
        round_.abandon();
        for (int slot = 0; slot < slots_.size(); ++slot) {
            slots_.settle(slot);
        }
    } catch (const std::exception &) {  // a slot that cannot go back is empty
    }
}

void session::use(drafter_model & own) {
    round_.check_rests();
    slots_.use(own);
}

// A round under way was decoded with capture or without, and ends so.
void session::set_capture(bool on) {
    slots_.want_passes(on);
    if (!round_.under_way()) {
        slots_.apply_wanted();
    }
}

// Says whether the memory can hold a tree. It must not be asked during a round, whose tree would be lost.
bool session::can_tree() {
    round_.check_rests();
    const int32_t root = -1;
    const bool ok      = llama_memory_tree_set(slots_.memory, &root, 1);
    llama_memory_tree_set(slots_.memory, nullptr, 0);
    return ok;
}

const char * session::tree_refusal() const {
    return llama_memory_tree_refusal(slots_.memory);
}

// -- texts ------------------------------------------------------------------------------------------------

// Decodes tokens after what the slot holds. Returns what its sources will be told of them.
kept_tokens session::decode_text(int slot, const int32_t * tokens, int n, bool all_logits) {
    round_.check_rests();
    slots_.check_text(slot, tokens, n);
    round_.begin_other();
    slots_.settle(slot);
    slots_.target.keep_checkpoint(slot);
    kept_tokens k = slots_.lay_out_text(slot, tokens, n, all_logits);
    slots_.run_rows(n, &slot, 1);
    return k;
}

// Computes the logits of the last of n rows that were decoded without them.
void session::compute_last(int slot, int n) {
    try {
        compute_logits(slots_.ctx, n - 1, 1);
    } catch (...) {
        slots_.drop_rows(&slot, 1);
        throw;
    }
}

// The decode before could not know the sampler; the next one will have found what it needs.
int session::sample(llama_sampler * sampler, int row) {
    int token;
    slots_.n_largest = std::max(slots_.n_largest, n_largest_for(sampler));
    return sample_found(slots_.ctx, sampler, row, token) ? token : eagle3::sample(slots_.ctx, sampler, row);
}

void session::prefill(int slot, const int32_t * tokens, int n, bool all_logits) {
    // A head that reads what follows the last layer needs each row, but nobody needs its logits.
    const bool unread = !all_logits && slots_.passes() && slots_.passes()->needs_all_logits();
    const deferral deferred(slots_.ctx, unread);
    const logits_stay stays(slots_.ctx, !all_logits && (unread || slots_.n_largest > 0), slots_.n_largest);
    const kept_tokens k = decode_text(slot, tokens, n, all_logits || unread);
    if (unread) {
        compute_last(slot, n);
    }
    planner_.new_text();
    slots_.kept_prompt(k);
}

void session::rewind(int slot, int n_past) {
    const int held = slots_.at(slot).n_past;
    require(n_past >= 0 && n_past <= held, EAGLE3_E_ARGUMENT,
        format("cannot rewind from %d to %d", held, n_past));
    round_.end_of(slot);
    slots_.rewind(slot, n_past);
}

void session::settle(int slot) {
    round_.check_rests();
    if (!slots_.at(slot).waiting.empty()) {
        round_.begin_other();
        slots_.settle(slot);
    }
}

void session::reset(int slot, int n_past) {
    slots_.at(slot);
    require(n_past >= 0 && n_past <= slots_.n_ctx, EAGLE3_E_ARGUMENT,
        format("position %d is outside the context", n_past));
    require(n_past == 0 || llama_memory_seq_pos_max(slots_.memory, slot) >= 0, EAGLE3_E_ARGUMENT,
        format("slot %d cannot be at position %d: the target holds nothing of its sequence", slot, n_past));
    round_.end_of(slot);
    slots_.reset(slot, n_past);
}

// -- state ------------------------------------------------------------------------------------------------

int64_t session::state_size(int slot) const {
    slots_.at(slot);
    slots_.need_state();
    return slots_.state_size(slot);
}

void session::state_get(int slot, uint8_t * out) const {
    slots_.need_state();
    round_.check_rests(slot);
    slots_.state_get(slot, out);
}

void session::state_set(int slot, const uint8_t * data, int64_t size) {
    slots_.need_state();
    round_.check_rests(slot);
    const std::vector<int64_t> begins = slots_.check_state(data, size);
    round_.drop_draft();
    slots_.state_set(slot, data, begins);
}

int session::text_match(int slot, int32_t token) const {
    slots_.at(slot);
    slots_.check_tokens(&token, 1);
    return slots_.text() ? slots_.text()->match(slot, token) : 0;
}

void session::set_memory(int slot, std::shared_ptr<const text_memory> memory) {
    slots_.at(slot);
    if (slots_.text()) {
        slots_.text()->set_memory(slot, std::move(memory));
    }
}

// -- the planner's costs ----------------------------------------------------------------------------------

// The round under way was drafted by other costs: its time is not counted.
void session::set_plan(const costs & c) {
    planner_.set(c);
    drafter_.forget_last();
    round_.new_costs();
    if (slots_.passes()) {
        slots_.passes()->forget_graphs();  // measuring had the largest passes that there are
    }
#ifdef __GLIBC__
    malloc_trim(0);  // and rows of logits, which the C library would keep
#endif
}

// Measures the numbers in turns, so that a disturbance falls on all of them. A large model has no time for
// more than some of them.
void session::measure_threads(int slot) {
    constexpr int MOST_TURNS       = 4;
    constexpr int64_t MOST_MICROS  = 150000;
    const std::vector<int> numbers = round_.threads().numbers();
    if (numbers.size() < 2) {
        return;
    }
    timed_decode(slot, 1);  // a first decode may read the model's file
    const int64_t end = ggml_time_us() + MOST_MICROS;
    std::vector<float> sums(numbers.size(), 0.0f), times = sums;
    for (int turn = 0; turn < MOST_TURNS; ++turn) {
        for (size_t i = 0; i < numbers.size() && (turn + i == 0 || ggml_time_us() < end); ++i) {
            const thread_scope scope(slots_.ctx, numbers[i]);
            sums[i] += timed_decode(slot, 1);
            times[i] += 1.0f;
        }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] = sums[i] / std::max(times[i], 1.0f);
    }
    round_.measured_threads(sums);
}

float session::measure_target(int slot, int n) {
    const thread_scope scope(slots_.ctx, round_.threads());
    return timed_decode(slot, n);
}

float session::timed_decode(int slot, int n) {
    const int n_past = slots_.at(slot).n_past;
    round_.check_rests();
    require(n >= 1 && n <= MAX_ROWS, EAGLE3_E_ARGUMENT, format("%d rows, expected 1..%d", n, MAX_ROWS));
    std::vector<int32_t> tokens;
    for (int i = 0; i < n; ++i) {
        // any text costs the same, except that the experts of the same tokens would stay in the CPU's cache
        tokens.push_back((int32_t) ((100u + 37u * n_timed_++) % (uint32_t) slots_.n_vocab));
    }
    slots_.settle(slot);
    slots_.target.keep_checkpoint(slot);
    if (!slots_.target.will_drop(n)) {
        slots_.target.begin_round(slot);
    }
    const deferral deferred(slots_.ctx, true);
    const logits_stay stays(slots_.ctx, true, slots_.n_largest);
    const int64_t start = ggml_time_us();
    decode_text(slot, tokens.data(), n, true);
    llama_synchronize(slots_.ctx);
    const float seconds = 1e-6f * (ggml_time_us() - start);
    slots_.must_drop_from(slot, n_past);
    return seconds;
}

// Computes into rows of its own, which are freed: the context's would stay in memory, however few are ever
// drafted. Where nothing was left out there is nothing to wait for: the clock would measure its own noise.
float session::measure_output(int n) {
    if (llama_get_deferred_logits(slots_.ctx).n_nodes == 0) {
        return 0.0f;
    }
    std::vector<float> rows((size_t) std::max(n, 1) * slots_.n_vocab);
    const thread_scope scope(slots_.ctx, round_.threads());
    const int64_t start = ggml_time_us();
    compute_logits(slots_.ctx, 0, n, rows.data());
    return 1e-6f * (ggml_time_us() - start);
}

float session::measure_passes(int slot, int n, bool ahead) {
    const int n_past = slots_.at(slot).n_past;
    require(slots_.passes() != nullptr, EAGLE3_E_ARGUMENT, "the session has no drafter that takes passes");
    pass_source & own = *slots_.passes();
    require(n >= 1 && n <= MAX_ROWS && n_past + n <= slots_.n_ctx, EAGLE3_E_ARGUMENT,
        format("%d rows, expected 1..%d", n, MAX_ROWS));
    const thread_scope scope(slots_.ctx, round_.threads());
    return ahead ? own.measure_step(slot, n_past, n) : own.measure(slot, n_past, n);
}

float session::measure_back(int slot) {
    const int n_past = slots_.at(slot).n_past;
    round_.check_rests();
    round_.begin_other();
    if (slots_.target.drops_any()) {
        return 0.0f;
    }
    slots_.settle(slot);
    if (n_past == 0) {  // nothing is held, and nothing can be copied
        const int32_t token = 100 % slots_.n_vocab;
        decode_text(slot, &token, 1, true);
        slots_.target.decoded(slot, 1);
    }
    float seconds = 0.0f;
    bool back     = true;
    for (int i = 0; i < 2 && back; ++i) {  // the first one may touch its memory for the first time
        const int64_t start = ggml_time_us();
        back                = slots_.target.goes_back(slot);
        seconds             = 1e-6f * (ggml_time_us() - start);
    }
    if (!back || n_past == 0) {
        slots_.must_drop_from(slot, n_past, !back);
    }
    return seconds;
}

// -- memory -----------------------------------------------------------------------------------------------

eagle3_memory session::memory() const {
    eagle3_memory m = {};
    for (const auto & [type, data] : llama_get_memory_breakdown(slots_.ctx)) {
        m.target_weights += (int64_t) data.model;
        m.target_cache += (int64_t) data.context;
        m.target_compute += (int64_t) data.compute;
    }
    m.target_cache += (int64_t) slots_.target.checkpoint_bytes();
    if (const pass_source * own = slots_.passes()) {
        const pass_source::bytes b = own->memory();

        m.head_weights = (int64_t) b.weights;
        m.head_cache   = (int64_t) b.cache;
        m.head_compute = (int64_t) b.compute;
    }
    return m;
}

// -- the head alone ---------------------------------------------------------------------------------------

void session::check_head_alone(int slot, const int32_t * tokens, int n) {
    slots_.need_head();
    round_.check_rests(slot);
    require(
        n >= 1 && n <= slots_.n_ctx, EAGLE3_E_ARGUMENT, format("%d rows, expected 1..%d", n, slots_.n_ctx));
    slots_.check_tokens(tokens, n);
    round_.drop_draft();
}

void session::head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
    float * state, float * logits) {
    check_head_alone(slot, tokens, n);
    slots_.need_head().forward(slot, slots_.at(slot).n_past, tokens, features, n, g, state, logits);
}

const std::vector<float> & session::head_trace(
    int slot, const int32_t * tokens, const float * features, int n, const char * stage) {
    check_head_alone(slot, tokens, n);
    return slots_.need_head().trace(slot, slots_.at(slot).n_past, tokens, features, n, stage);
}

}  // namespace eagle3
