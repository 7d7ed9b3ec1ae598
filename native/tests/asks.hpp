// The tests say in one line what they ask: asks of each kind, and rounds of one slot.
#pragma once

#include "eagle3.h"

inline eagle3_ask ask_for(int32_t slot, int32_t token, int32_t kind, int32_t n_max = 0, int32_t depth = 0,
    int32_t width = 1, float p_min = 0.0f) {
    eagle3_ask a = {};
    a.slot       = slot;
    a.token      = token;
    a.kind       = kind;
    a.n_max      = n_max;
    a.depth      = depth;
    a.width      = width;
    a.p_min      = p_min;
    return a;
}

inline eagle3_ask ask_given(
    int32_t slot, int32_t token, const int32_t * tokens, int32_t n, const int32_t * parents = nullptr) {
    eagle3_ask a = ask_for(slot, token, EAGLE3_GIVEN);
    a.tokens     = tokens;
    a.parents    = parents;
    a.n          = n;
    return a;
}

inline eagle3_ask ask_choices(
    int32_t slot, int32_t token, const int32_t * parents, const int32_t * ranks, int32_t n) {
    eagle3_ask a = ask_for(slot, token, EAGLE3_CHOICES);
    a.parents    = parents;
    a.ranks      = ranks;
    a.n          = n;
    return a;
}

// Returns the number of draft tokens, or the error's code.
inline int32_t draft(eagle3_session * s, const eagle3_ask & a) {
    int32_t drafted = 0;
    return eagle3_round_draft(s, &a, 1, &drafted);
}

inline int32_t draft(eagle3_session * s, const eagle3_ask & a, int32_t * tokens, int32_t * parents = nullptr,
    float * probs = nullptr) {
    const int32_t n = draft(s, a);
    return n < 0 ? n : eagle3_round_drafted(s, 0, tokens, parents, probs, nullptr);
}

// Drafts and decodes.
inline int32_t decode(eagle3_session * s, const eagle3_ask & a) {
    const int32_t n = draft(s, a);
    return n < 0 ? n : eagle3_round_decode(s);
}

// Returns the number of tokens in out, or the error's code.
inline int32_t verify(eagle3_session * s, llama_sampler * sampler, int32_t * out) {
    int32_t count    = 0;
    const int32_t rc = eagle3_round_verify(s, &sampler, out, &count);
    return rc < 0 ? rc : count;
}

inline int32_t commit(eagle3_session * s, int32_t keep) {
    return eagle3_round_commit(s, &keep);
}
