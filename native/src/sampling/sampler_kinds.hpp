// This tells samplers of llama.cpp apart, and walks along a chain of them.
#pragma once

#include "llama.h"

namespace eagle3 {

// A sampler's kind is told by the functions it has.
struct sampler_kinds {
    const llama_sampler_i * empty;  // penalties that are all off, and others that do nothing
    const llama_sampler_i * greedy;
    const llama_sampler_i * dist;
    const llama_sampler_i * grammar;
    const llama_sampler_i * top_p;
    const llama_sampler_i * min_p;
    const llama_sampler_i * temp;

    static const sampler_kinds & known() {
        static const sampler_kinds kinds;
        return kinds;
    }

  private:
    static const llama_sampler_i * of(llama_sampler * s) {
        const llama_sampler_i * iface = s->iface;
        llama_sampler_free(s);
        return iface;
    }
    sampler_kinds()
        : empty(of(llama_sampler_init_penalties(1, 0, 1.0f, 0.0f, 0.0f))),
          greedy(of(llama_sampler_init_greedy())), dist(of(llama_sampler_init_dist(0))),
          grammar(of(llama_sampler_init_grammar(nullptr, "", ""))),
          top_p(of(llama_sampler_init_top_p(0.5f, 1))), min_p(of(llama_sampler_init_min_p(0.5f, 1))),
          temp(of(llama_sampler_init_temp(2.0f))) {}
};

// Returns the sampler number i of a chain, or the sampler itself in place of a chain of one; null behind the
// last.
inline llama_sampler * link(llama_sampler * sampler, int i) {
    if (llama_sampler_chain_get(sampler, -1) == nullptr) {
        return i == 0 ? sampler : nullptr;
    }
    return i < llama_sampler_chain_n(sampler) ? llama_sampler_chain_get(sampler, i) : nullptr;
}

}  // namespace eagle3
