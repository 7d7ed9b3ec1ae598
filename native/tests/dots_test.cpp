// The two ways to sum a block, by an instruction that sums fours of bytes and without it, give the same
// integers in each format, whatever the bytes are. A processor takes one of them alone. Sums of superblocks
// are those of the weights that upstream makes of the file, also where all weights and bytes are extremes:
// the parts that are summed in 16 bits fit.
#include "products/product.hpp"

#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#if EAGLE3_LANES

namespace {

using namespace eagle3::kernels;

constexpr int R = 3, G = 2;

std::mt19937 rng;

// Bytes as activations have them. often: the extremes, more often than not.
int8_t activation(bool often) {
    return (int8_t) (often ? (rng() % 2 ? 127 : -127) : (int) (rng() % 255) - 127);
}

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
            bytes[i] = activation(round % 2);
        }
        for (int r = 0; r < R; ++r) {
            int32_t sum = 0;
            for (int j = 0; j < 8; ++j) {
                for (int t = 0; t < 4; ++t) {
                    sum += bytes[4 * (j * R + r) + t];
                }
            }
            x.less_8[r]   = -8 * sum;
            x.less_16[r]  = -16 * sum;
            x.less_128[r] = -128 * sum;
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

// A superblock's scales are 1, so that its weights are whole numbers.
template <typename F> void set_scales(uint8_t * narrow) {
    constexpr uint8_t ONE[2] = {0x00, 0x3c};
    if constexpr (F::HAS_MIN) {
        std::memcpy(narrow, ONE, 2);
        std::memcpy(narrow + 2, ONE, 2);
    } else {
        std::memcpy(narrow + 208, ONE, 2);
    }
}

// Row r of x: bytes, and the sums that go with them.
void fill_row(row_superblock<R> & x, int r, const int8_t * bytes) {
    const auto sum_of = [&](int from, int n) {
        int32_t sum = 0;
        for (int i = 0; i < n; ++i) {
            sum += bytes[from + i];
        }
        return sum;
    };
    const auto two = [](int32_t first, int32_t second) {
        return (int32_t) ((uint32_t) (uint16_t) first | (uint32_t) (uint16_t) second << 16);
    };
    x.scale[r] = 1.0f;
    for (int i = 0; i < 4; ++i) {
        x.sums_of_32[i][r] = two(sum_of(64 * i, 32), sum_of(64 * i + 32, 32));
    }
    for (int i = 0; i < N_OFFSET; ++i) {
        x.offsets[i][r] =
            N_OFFSET == 32 ? -32 * sum_of(8 * i, 8) : two(sum_of(32 * i, 16), sum_of(32 * i + 16, 16));
    }
    for (int i = 0; i < 64; ++i) {
        std::memcpy(&x.bytes[i][r], bytes + 4 * i, 4);
    }
}

// What the product must be, and the size of its terms.
struct expected {
    double sum = 0.0, size = 0.0;
};

expected product_of(const float * weights, const int8_t * bytes) {
    expected e;
    for (int i = 0; i < 256; ++i) {
        e.sum += (double) weights[i] * bytes[i];
        e.size += std::fabs((double) weights[i] * bytes[i]);
    }
    return e;
}

template <typename F> void check_super(ggml_type type) {
    alignas(64) block wide[COLUMNS * file_bytes<F>()];
    const blocks<1> w = {{wide}};
    std::vector<std::vector<float>> weights(COLUMNS, std::vector<float>(256));
    for (int round = 0; round < 400; ++round) {
        for (int c = 0; c < COLUMNS; ++c) {
            uint8_t narrow[file_bytes<F>()];
            const int alike = (int) (rng() % 4);  // all weights the least, or the most, every other time
            for (uint8_t & b : narrow) {
                b = alike == 0 ? 0 : alike == 1 ? 0xff : (uint8_t) rng();
            }
            set_scales<F>(narrow);
            if (!F::HAS_MIN && alike < 2) {
                std::memset(narrow + 192, rng() % 2 ? 127 : -128, 16);
            }
            ggml_get_type_traits(type)->to_float(narrow, weights[c].data(), 256);
            each_part<F>(
                c, [&](size_t to, size_t from, int n) { std::memcpy(wide + to, narrow + from, (size_t) n); });
        }
        row_superblock<R> x{};
        int8_t bytes[R][256];
        for (int r = 0; r < R; ++r) {
            const int8_t same = rng() % 2 ? 127 : -127;
            for (int8_t & b : bytes[r]) {
                b = round % 3 == 0 ? same : activation(round % 3 == 1);
            }
            fill_row(x, r, bytes[r]);
        }
        super_scales scales[1];
        F::unpack(wide, scales[0].scales, scales[0].minima);
        column_sums<R, 1> sums{};
        add_superblock<F, R, 1>(w, x, scales, sums);
        for (int r = 0; r < R; ++r) {
            float out[COLUMNS];
            std::memcpy(out, sums[r], sizeof(out));
            for (int c = 0; c < COLUMNS; ++c) {
                const expected e = product_of(weights[c].data(), bytes[r]);
                if (!(std::fabs(out[c] - e.sum) <= 1e-6 * e.size)) {
                    std::fprintf(stderr, "%s: column %d, row %d: %.0f, expected %.0f\n", ggml_type_name(type),
                        c, r, (double) out[c], e.sum);
                    std::exit(1);
                }
            }
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
    check_super<q4_k>(GGML_TYPE_Q4_K);
    check_super<q5_k>(GGML_TYPE_Q5_K);
    check_super<q6_k>(GGML_TYPE_Q6_K);
#else
    (void) argc;
    (void) argv;
#endif
    std::puts("ok");
}
