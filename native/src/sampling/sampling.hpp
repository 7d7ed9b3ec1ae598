// This samples a row as llama_sampler_sample does, and mostly without its list of all candidates.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>

namespace eagle3 {

// Samples a row of the last decode, -1 for its last with logits. The sampler accepts the token. Throws
// E_ARGUMENT for a row without logits, and what the sampler throws.
int sample(llama_context * ctx, llama_sampler * sampler, int row);

// Does the same without reading the row, where the logits that the device found in it decide what the sampler
// takes. Returns false, and the sampler is as before, where they do not.
bool sample_found(llama_context * ctx, llama_sampler * sampler, int row, int & token);

// Returns how many of the largest logits sample_found wants of each row. It is 0 for a sampler that reads
// whole rows.
int n_largest_for(llama_sampler * sampler);

// Adds the processor time of this thread until the end of the scope, in seconds.
class sampling_clock {
  public:
    explicit sampling_clock(float & sum) : sum_(sum), start_(now()) {}
    ~sampling_clock() { sum_ += (float) (now() - start_); }
    sampling_clock(const sampling_clock &)             = delete;
    sampling_clock & operator=(const sampling_clock &) = delete;

  private:
    static double now();
    float & sum_;
    double start_;
};

// Returns the code of the exception being handled, a sampler's say, and its message. It rethrows nothing.
int32_t caught(std::string & message);

}  // namespace eagle3
