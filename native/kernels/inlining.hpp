// How much of a kernel is one function: all of it, because what is not inlined keeps its sums in memory.
//
// With sanitizers the compiler would take minutes for such functions, as each access becomes several. There a
// kernel is many functions. What it computes is the same, because only the source says how numbers are
// rounded.
#pragma once

#if defined(EAGLE3_SANITIZED)
#define EAGLE3_INLINE inline
#else
#define EAGLE3_INLINE [[gnu::always_inline]] inline
#endif

namespace eagle3::kernels {

// The compiler writes out so many steps of a loop.
constexpr int unrolled(int n) {
#if defined(EAGLE3_SANITIZED)
    return n > 0;
#else
    return n;
#endif
}

}  // namespace eagle3::kernels
