// What matches of the text are worth before a planner has seen how they turn out.
#pragma once

#include <algorithm>

namespace eagle3 {

// The probability that the target's next token is the one that follows a match. length: tokens of its longest
// match, n: matches that say it, n_other: matches at least as long that say another.
inline float text_prior(int length, int n, int n_other) {
    constexpr float SOLE[] = {0.0f, 0.15f, 0.30f, 0.45f, 0.55f, 0.65f, 0.72f, 0.78f, 0.82f};
    float p = SOLE[std::min(length, 8)];
    if (length > 8) {
        p = length > 16 ? 0.92f : 0.86f;
    }
    if (n_other > 0) {
        p *= (float) n / (float) (n + n_other);
    } else if (n > 1) {
        p += (1.0f - p) * 0.3f;
    }
    return p;
}

}  // namespace eagle3
