// A thin layer over the vector instructions that the products are written in. A vector of bytes holds four
// weights of each of its columns, side by side; a vector of integers or floats holds a number of each column.
//
//     N_PART           vectors that make the 16 columns of a block
//     N_REGISTER       registers that the processor has
//     HAS_DOT          bytes are multiplied and summed in fours by one instruction
//     DOT_IS_SIGNED    signed by signed; otherwise unsigned by signed
//     RUNS_ARE_WIDE    the runs of a superblock are summed in 32 bits, where all sums fit
//     RUNS_ARE_SHORT   dot products are summed as long as 16 bits hold them, then times the scale in 32
//
// EAGLE3_LANES is 0 where there are none for this processor.
#pragma once

#include "inlining.hpp"

#include <cstdint>
#include <cstring>

// Keeps a sum in its register. The compiler would add the terms in pairs, and store them until then.
#if defined(__aarch64__)
#define EAGLE3_HOLD(x) asm("" : "+w"(x))
#elif defined(__AVX512F__)
#define EAGLE3_HOLD(x) asm("" : "+v"(x))  // any of the 32
#else
#define EAGLE3_HOLD(x) asm("" : "+x"(x))
#endif
// Makes the compiler forget what it knows of p, so that it cannot move or merge loads through it.
#define EAGLE3_FORGET(p) asm("" : "+r"(p))

namespace eagle3::kernels {

constexpr int COLUMNS = 16;  // in a block: those of AMX's layout, and of a 512-bit vector

}  // namespace eagle3::kernels

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define EAGLE3_LANES 1
#include "products/lanes_avx512.hpp"
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define EAGLE3_LANES 1
#include "products/lanes_avx2.hpp"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define EAGLE3_LANES 1
#include "products/lanes_neon.hpp"
#else
#define EAGLE3_LANES 0
#endif
