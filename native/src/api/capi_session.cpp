// These are the calls of eagle3.h on a session.
#include "api/capi.hpp"

#include <algorithm>

using namespace eagle3;

namespace {

// Bit i is set if the source with id i offered the token.
int32_t bits_of(const evidence_list & e) {
    int32_t bits = 0;
    for (int id = 0; id < MAX_SOURCES; ++id) {
        bits |= e[id] == NOT_OFFERED ? 0 : 1 << id;
    }
    return bits;
}

}  // namespace

int32_t eagle3_session_open(
    struct llama_context * ctx, eagle3_head * head, int32_t n_slots, eagle3_session ** out) {
    return guard([&]() -> int32_t {
        not_null(ctx, "ctx");
        not_null(out, "out");
        require(n_slots >= 1 && n_slots <= (int32_t) llama_n_seq_max(ctx), EAGLE3_E_ARGUMENT,
            format("n_slots is %d, the context has %u sequences", n_slots, llama_n_seq_max(ctx)));
        *out = new eagle3_session{std::make_unique<session>(ctx, head ? head->impl.get() : nullptr, n_slots)};
        return EAGLE3_OK;
    });
}

int32_t eagle3_session_use(eagle3_session * s, eagle3_drafter * d) {
    return guard([&]() -> int32_t {
        not_null(d, "drafter");
        get(s).use(*d->impl);
        return EAGLE3_OK;
    });
}

void eagle3_session_close(eagle3_session * s) {
    delete s;
}

int32_t eagle3_session_set_capture(eagle3_session * s, int32_t on) {
    return guard([&]() -> int32_t {
        get(s).set_capture(on != 0);
        return EAGLE3_OK;
    });
}

int32_t eagle3_n_past(const eagle3_session * s, int32_t slot) {
    return guard([&]() -> int32_t { return get(s).n_past(slot); });
}

int32_t eagle3_memory_get(const eagle3_session * s, struct eagle3_memory * out) {
    return guard([&]() -> int32_t {
        not_null(out, "out");
        *out = get(s).memory();
        return EAGLE3_OK;
    });
}

int32_t eagle3_rewind(eagle3_session * s, int32_t slot, int32_t n_past) {
    return guard([&]() -> int32_t {
        get(s).rewind(slot, n_past);
        return EAGLE3_OK;
    });
}

int32_t eagle3_settle(eagle3_session * s, int32_t slot) {
    return guard([&]() -> int32_t {
        get(s).settle(slot);
        return EAGLE3_OK;
    });
}

int32_t eagle3_prefill(
    eagle3_session * s, int32_t slot, const int32_t * tokens, int32_t n, int32_t all_logits) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        get(s).prefill(slot, tokens, n, all_logits != 0);
        return EAGLE3_OK;
    });
}

int32_t eagle3_can_tree(eagle3_session * s) {
    return guard([&]() -> int32_t { return get(s).can_tree(); });
}

const char * eagle3_tree_refusal(const eagle3_session * s) {
    const char * why = nullptr;
    guard([&]() -> int32_t {
        why = get(s).tree_refusal();
        return EAGLE3_OK;
    });
    return why;
}

int32_t eagle3_verified_row(const eagle3_session * s, int32_t slot, int32_t i) {
    return guard([&]() -> int32_t { return get(s).last_round().verified_row(slot, i); });
}

int32_t eagle3_plan_set(eagle3_session * s, const struct eagle3_costs * c) {
    return guard([&]() -> int32_t {
        if (c) {
            check(*c);
        }
        get(s).set_plan(c ? *c : costs{});
        return EAGLE3_OK;
    });
}

int32_t eagle3_plan_get(eagle3_session * s, struct eagle3_plan_info * out) {
    return guard([&]() -> int32_t {
        not_null(out, "out");
        const planner & p = get(s).plan();
        require(p.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
        *out = {p.rate(), (float) p.n_slots() / p.plain_seconds(), get(s).slot(0).trust[0], p.asleep(),
            p.foreseen().seconds, p.foreseen().plain};
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_target(eagle3_session * s, int32_t slot, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_target(slot, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_output(eagle3_session * s, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_output(n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_head(eagle3_session * s, int32_t slot, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_head(slot, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_step(eagle3_session * s, int32_t slot, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_step(slot, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_back(eagle3_session * s, int32_t slot, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_back(slot);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_threads(eagle3_session * s, int32_t slot) {
    return guard([&]() -> int32_t {
        get(s).measure_threads(slot);
        return EAGLE3_OK;
    });
}

int32_t eagle3_threads_choose(eagle3_session * s, int32_t on) {
    return guard([&]() -> int32_t {
        get(s).choose_threads(on != 0);
        return EAGLE3_OK;
    });
}

int32_t eagle3_threads_now(eagle3_session * s) {
    return guard([&]() -> int32_t { return get(s).threads(); });
}

float eagle3_sampling_seconds(const eagle3_session * s, int32_t slot) {
    float seconds = 0.0f;
    guard([&]() -> int32_t {
        seconds = get(s).slot(slot).round.sampling_s;
        return EAGLE3_OK;
    });
    return seconds;
}

int32_t eagle3_sample(eagle3_session * s, struct llama_sampler * sampler, int32_t row) {
    return guard([&]() -> int32_t {
        not_null(sampler, "sampler");
        return get(s).sample(sampler, row);
    });
}

int32_t eagle3_round_draft(eagle3_session * s, const struct eagle3_ask * asks, int32_t n, int32_t * drafted) {
    return guard([&]() -> int32_t {
        not_null(asks, "asks");
        not_null(drafted, "drafted");
        require(n >= 1, EAGLE3_E_ARGUMENT, format("a round of %d slots", n));
        const int32_t total = get(s).draft(std::vector<ask>(asks, asks + n));
        for (int32_t i = 0; i < n; ++i) {
            drafted[i] = (int32_t) get(s).slot(asks[i].slot).draft.tokens.size();
        }
        return total;
    });
}

int32_t eagle3_round_drafted(const eagle3_session * s, int32_t i, int32_t * tokens, int32_t * parents,
    float * probs, int32_t * sources) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        const eagle3::round & r = get(s).last_round();
        require(r.at() != stage::none, EAGLE3_E_ARGUMENT, "no round is drafted");
        require(
            i >= 0 && i < (int32_t) r.of().size(), EAGLE3_E_ARGUMENT, format("the round has no ask %d", i));
        const slot_draft & d = get(s).slot(r.of()[i]).draft;
        const size_t n       = d.tokens.size();
        std::copy_n(d.tokens.begin(), n, tokens);
        if (parents) {
            std::copy_n(d.parents.begin(), n, parents);
        }
        if (probs) {
            std::fill_n(probs, n, 0.0f);
            std::transform(d.evidence.begin(), d.evidence.end(), probs,
                [](const evidence_list & e) { return std::max(e[PASSES], 0.0f); });
        }
        if (sources) {
            std::fill_n(sources, n, 0);
            std::transform(d.evidence.begin(), d.evidence.end(), sources, bits_of);
        }
        return (int32_t) n;
    });
}

const char * eagle3_source_name(const eagle3_session * s, int32_t i) {
    const char * name = nullptr;
    guard([&]() -> int32_t {
        name = get(s).source_name(i);
        return EAGLE3_OK;
    });
    return name;
}

int32_t eagle3_round_decode(eagle3_session * s) {
    return guard([&]() -> int32_t {
        get(s).decode();
        return EAGLE3_OK;
    });
}

int32_t eagle3_round_verify(
    eagle3_session * s, struct llama_sampler * const * samplers, int32_t * out, int32_t * counts) {
    return guard([&]() -> int32_t {
        not_null(samplers, "samplers");
        not_null(out, "out");
        not_null(counts, "counts");
        std::string failure;
        get(s).verify(samplers, out, counts, failure);
        if (!failure.empty()) {
            fail(EAGLE3_OK, failure.c_str());
        }
        return EAGLE3_OK;
    });
}

int32_t eagle3_round_failure(const eagle3_session * s, int32_t i) {
    return guard([&]() -> int32_t { return get(s).last_round().failure_of(i); });
}

int32_t eagle3_round_commit(eagle3_session * s, const int32_t * keep) {
    return guard([&]() -> int32_t {
        not_null(keep, "keep");
        get(s).commit(keep);
        return EAGLE3_OK;
    });
}

int32_t eagle3_plain_rounds(eagle3_session * s, const struct eagle3_ask * ask, struct llama_sampler * sampler,
    struct eagle3_run * run) {
    return guard([&]() -> int32_t {
        not_null(ask, "ask");
        not_null(run, "run");
        get(s).plain_rounds(*ask, sampler, *run);
        return EAGLE3_OK;
    });
}

int64_t eagle3_state_size(const eagle3_session * s, int32_t slot) {
    return guard([&]() -> int64_t { return get(s).state_size(slot); });
}

int64_t eagle3_state_get(const eagle3_session * s, int32_t slot, uint8_t * out, int64_t cap) {
    return guard([&]() -> int64_t {
        not_null(out, "out");
        const int64_t n = get(s).state_size(slot);
        require(cap >= n, EAGLE3_E_ARGUMENT, "the buffer is too small");
        get(s).state_get(slot, out);
        return n;
    });
}

int32_t eagle3_state_set(eagle3_session * s, int32_t slot, const uint8_t * data, int64_t size) {
    return guard([&]() -> int32_t {
        not_null(data, "data");
        get(s).state_set(slot, data, size);
        return EAGLE3_OK;
    });
}

int32_t eagle3_state_reset(eagle3_session * s, int32_t slot, int32_t n_past) {
    return guard([&]() -> int32_t {
        get(s).reset(slot, n_past);
        return EAGLE3_OK;
    });
}

int32_t eagle3_head_forward(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, float * g, float * state, float * logits) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        not_null(features, "features");
        get(s).head_forward(slot, tokens, features, n, g, state, logits);
        return EAGLE3_OK;
    });
}

int64_t eagle3_head_trace(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, const char * stage, float * out, int64_t cap) {
    return guard([&]() -> int64_t {
        not_null(tokens, "tokens");
        not_null(features, "features");
        not_null(stage, "stage");
        not_null(out, "out");
        const std::vector<float> & values = get(s).head_trace(slot, tokens, features, n, stage);
        require((int64_t) values.size() <= cap, EAGLE3_E_ARGUMENT,
            format(
                "stage %.40s has %zu values, there is room for %lld", stage, values.size(), (long long) cap));
        std::copy(values.begin(), values.end(), out);
        return (int64_t) values.size();
    });
}
