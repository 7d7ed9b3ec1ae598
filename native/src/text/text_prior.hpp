// This says what matches of the text are worth before a planner has seen how they turn out.
#pragma once

#include <cmath>

namespace eagle3 {

// Returns the probability that the target's next token is the one that follows a match. length: tokens of its
// longest match, n: matches that say it, n_other: matches at least as long that say another token.
//
// It is a logistic regression over 120,000 answer tokens of SmolLM2-135M to prompts of all kinds (greedy and
// sampled); `replay FILE prior` (native/tests) prints the counts that it is fitted to. A match that
// others contradict is worth the same at any length.
inline float text_prior(int length, int n, int n_other) {
    const float sole = n_other == 0 ? 0.64f * std::log2((float) length) : 0.0f;
    const float odds =
        -1.13f + sole + 0.63f * std::log2((float) n) - 0.73f * std::log2(1.0f + (float) n_other);
    return 1.0f / (1.0f + std::exp(-odds));
}

}  // namespace eagle3
