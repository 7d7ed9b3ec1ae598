// The two ways to sum a block, by an instruction that sums fours of bytes and without it, give the same
// integers in each format, whatever the bytes are. A processor takes one of them alone.
#include "product.hpp"

#include <cstdio>
#include <cstdlib>
#include <random>

#if EAGLE3_LANES

namespace {

using namespace eagle3::kernels;

constexpr int R = 3, G = 2;

std::mt19937 rng;

template <typename F> void check(const char * name) {
    alignas(64) block bytes_of[G][COLUMNS * file_bytes<F>()];
    const blocks<G> w = {{bytes_of[0], bytes_of[1]}};
    row_block<R> x{};
    for (int round = 0; round < 2000; ++round) {
        for (auto & of_group : bytes_of) {
            for (block & b : of_group) {
                b = (block) rng();
            }
        }
        auto * bytes = (int8_t *) x.bytes;
        for (size_t i = 0; i < sizeof(x.bytes); ++i) {
            // the extremes more often than not
            bytes[i] = (int8_t) (round % 2 ? (rng() % 2 ? 127 : -127) : (int) (rng() % 255) - 127);
        }
        for (int r = 0; r < R; ++r) {
            x.sum[r] = 0;
            for (int j = 0; j < 8; ++j) {
                for (int t = 0; t < 4; ++t) {
                    x.sum[r] += bytes[4 * (j * R + r) + t];
                }
            }
        }
        block_sums<R, G> dots, plain;
        sum_by_dots<F, R, G>(w, x, dots);
        if constexpr (F::SIGNED) {
            sum_signed<F, R, G>(w, x, plain);
        } else {
            sum_unsigned<F, R, G>(w, x, plain);
        }
        if (std::memcmp(dots, plain, sizeof(dots)) != 0) {
            std::fprintf(stderr, "%s: other sums by dot products\n", name);
            std::exit(1);
        }
    }
}

}  // namespace

#endif

int main(int argc, char ** argv) {
#if EAGLE3_LANES
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    check<q8_0>("Q8_0");
    check<q4_0>("Q4_0");
    check<q4_1>("Q4_1");
    check<q5_0>("Q5_0");
    check<q5_1>("Q5_1");
    check<iq4_nl>("IQ4_NL");
    check<mxfp4>("MXFP4");
#else
    (void) argc;
    (void) argv;
#endif
    std::puts("ok");
}
