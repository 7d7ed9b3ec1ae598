// These are the calls of eagle3.h that make samplers.
#include "api/capi.hpp"
#include "sampling/thoughts.hpp"

using namespace eagle3;

int32_t eagle3_thoughts(const struct llama_vocab * vocab, const char * start, const char * const * ends,
    int32_t n_ends, int32_t inside, int32_t budget, const int32_t * closing, int32_t n_closing,
    struct llama_sampler * grammar, struct llama_sampler ** out) {
    return guard([&]() -> int32_t {
        not_null(vocab, "vocab");
        not_null(start, "start");
        not_null(out, "out");
        require(n_ends > 0 && ends != nullptr, EAGLE3_E_ARGUMENT, "there are no end tags");
        require(
            n_closing >= 0 && (n_closing == 0 || closing != nullptr), EAGLE3_E_ARGUMENT, "closing is NULL");
        thoughts_settings settings = {vocab, start, {ends, ends + n_ends}, inside != 0, budget, {}};
        const int n_vocab          = llama_vocab_n_tokens(vocab);
        for (int32_t i = 0; i < n_closing; ++i) {
            require(closing[i] >= 0 && closing[i] < n_vocab, EAGLE3_E_ARGUMENT,
                "closing has no token of the vocabulary");
            settings.closing.push_back(closing[i]);
        }
        *out = make_thoughts(std::move(settings), grammar);
        return EAGLE3_OK;
    });
}
