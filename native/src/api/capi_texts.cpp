// These are the calls of eagle3.h on texts that drafts are made from.
#include "api/capi.hpp"

#include <algorithm>

using namespace eagle3;

int32_t eagle3_text_match(const eagle3_session * s, int32_t slot, int32_t token) {
    return guard([&]() -> int32_t { return get(s).text_match(slot, token); });
}

int32_t eagle3_forced(const eagle3_session * s, struct llama_sampler * sampler) {
    return guard([&]() -> int32_t { return get(s).n_forced(sampler); });
}

int32_t eagle3_text_memory_open(int64_t n_bytes, eagle3_text_memory ** out) {
    return guard([&]() -> int32_t {
        not_null(out, "out");
        *out = new eagle3_text_memory{std::make_shared<text_memory>(n_bytes)};
        return EAGLE3_OK;
    });
}

void eagle3_text_memory_close(eagle3_text_memory * m) {
    delete m;
}

int32_t eagle3_text_memory_add(eagle3_text_memory * m, const int32_t * tokens, int32_t n) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        text_memory & memory = get(m);
        require(std::all_of(tokens, tokens + std::max(n, 0), [](int32_t t) { return t >= 0; }),
            EAGLE3_E_ARGUMENT, "a token is below 0");
        memory.add(tokens, n);
        return EAGLE3_OK;
    });
}

int64_t eagle3_text_memory_get(const eagle3_text_memory * m, int32_t * out, int64_t cap) {
    return guard([&]() -> int64_t {
        const text_memory & memory = get(m);
        if (out) {
            require(cap >= memory.size(), EAGLE3_E_ARGUMENT, "the buffer is too small");
            memory.copy(out);
        }
        return memory.size();
    });
}

int32_t eagle3_text_memory_use(eagle3_session * s, int32_t slot, const eagle3_text_memory * m) {
    return guard([&]() -> int32_t {
        get(s).set_memory(slot, m ? m->impl : nullptr);
        return EAGLE3_OK;
    });
}
