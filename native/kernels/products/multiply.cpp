#include "products/multiply.hpp"

#include "tensors.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace eagle3::kernels {

namespace {

int blocks_of(const kernel & k, const ggml_tensor * weights) {
    return (int) (weights->ne[0] / k.rows->block);
}

size_t row_bytes(const kernel & k, const ggml_tensor * weights) {
    return 4 * k.rows->n_word * (size_t) blocks_of(k, weights);
}

size_t tile_bytes(const kernel & k, const ggml_tensor * weights, int64_t n_row) {
    return row_bytes(k, weights) * (size_t) (n_row + MOST_IDLE);
}

// Finds row i of the activations: all batches' rows in turn.
const float * input(const ggml_tensor * x, int64_t i) {
    return (const float *) row_at(x, i);
}

thread_local std::vector<float> made;  // what a gate makes of rows; kept, as each layer has one

// These are rows of activations, in a part of their columns. A thread may have one at a time.
class rows_of {
  public:
    rows_of(const ggml_tensor * x, const ggml_tensor * gated, int64_t from, int64_t to)
        : x_(x), gated_(gated), from_(from), n_(to - from) {
        const auto n_float = (size_t) (MOST_ROWS * n_);
        if (gated && made.size() < n_float) {
            made.resize(n_float);
        }
    }

    // Gets rows `first` to first + n. The pointers are to where column 0 is or would be.
    void get(int64_t first, int n, const float ** rows) {
        for (int r = 0; r < n; ++r) {
            rows[r] = gated_ ? make(first + r, made.data() + r * n_) : input(x_, first + r);
        }
    }

  private:
    const float * make(int64_t row, float * to) const {
        const ggml_tensor *gate = gated_->src[0], *up = gated_->src[1];
        const auto * x = (const float *) ((const char *) gate->data + row * gate->nb[1]);
        const auto * g = up ? (const float *) ((const char *) up->data + row * up->nb[1]) : x;
        if (!up) {
            (ggml_get_op_params_i32(gated_, 1) != 0 ? x : g) += gated_->ne[0];  // the halves are swapped
        }
        ggml_vec_swiglu_f32((int) n_, to, x + from_, g + from_);
        return to - from_;
    }

    const ggml_tensor *x_, *gated_;
    int64_t from_, n_;
};

// A mark says where in a thread's columns, in groups of 16, others may help. Each is in a cache line of its
// own, because they look at it only when they are done.
struct alignas(64) mark {
    int64_t next;
};

// Each thread has a run of the columns, so that what it reads is one stream: the first half at once, then a
// few at a time. When none are left, it helps others with theirs, so that all end at the same time, whatever
// else their cores do and however fast these are.
template <typename F>
void share_columns(const ggml_compute_params * params, int64_t n_group, mark * marks, F && f) {
    constexpr int MOST_HELPED = 8;  // threads: it takes time to look at them
    const int nth             = params->nth;
    const int64_t step        = std::max<int64_t>(n_group / (16 * nth), 1);
    for (int k = 0; k < std::min(nth, MOST_HELPED); ++k) {
        const int owner     = (params->ith + k) % nth;
        const int64_t begin = n_group * owner / nth, end = n_group * (owner + 1) / nth;
        const int64_t half = begin + (end - begin) / 2;
        if (k == 0) {
            f(begin, half);
        }
        for (int64_t from;
            (from = half + __atomic_fetch_add(&marks[owner].next, step, __ATOMIC_RELAXED)) < end;) {
            f(from, std::min(from + step, end));
        }
    }
}

int64_t groups_of(const matmul & p) {
    return p.op->src[0]->ne[1] / COLUMNS;
}

// Asks for the columns that a thread begins with, as far as a product itself asks ahead.
void ask_for_first(const matmul * products, int n_product, int64_t group) {
    for (const matmul * p = products; p < products + n_product; ++p) {
        const ggml_tensor * w = p->op->src[0];
        if (group < groups_of(*p)) {
            const char * at = (const char *) w->data + group * COLUMNS * p->k->column_bytes(w->ne[0]);
            for (size_t i = 0; i < FAR; i += 64) {
                __builtin_prefetch(at + i, 0, 2);
            }
            return;
        }
        group -= groups_of(*p);
    }
}

// Multiplies groups of columns, from `first` to `last`, with all rows. work has the rounded rows.
void multiply_groups(const matmul & p, int64_t first, int64_t last, int n_block, const char * work) {
    constexpr int64_t N_STAY = 64;  // rows of a prompt that stay in the cache while the columns pass
    const int64_t n_row = ggml_nrows(p.op->src[1]), stride = p.op->ne[0];
    const size_t group_bytes = COLUMNS * p.k->column_bytes(p.op->src[0]->ne[0]);
    const size_t bytes       = row_bytes(*p.k, p.op->src[0]);
    // Tiles of a prompt find the columns in the cache. From memory, one stream of them is faster than two.
    const int64_t at_once = n_row > MOST_ROWS ? 2 : 1;
    for (int64_t i0 = 0; i0 < n_row; i0 += N_STAY) {
        for (int64_t g = first; g < last; g += at_once) {
            for (int64_t i = i0; i < std::min(i0 + N_STAY, n_row); i += MOST_ROWS) {
                p.k->multiply((const char *) p.op->src[0]->data + g * group_bytes,
                    std::min(last - g, at_once), work + i * bytes,
                    (int) std::min<int64_t>(MOST_ROWS, n_row - i), n_block,
                    (float *) p.op->data + i * stride + g * COLUMNS, (size_t) stride);
            }
        }
    }
}

}  // namespace

size_t work_of_product(const kernel & k, const ggml_tensor * op, int n_thread) {
    return tile_bytes(k, op->src[0], ggml_nrows(op->src[1])) + sizeof(mark) * (size_t) (n_thread + 1);
}

bool is_gate(const ggml_tensor * op) {
    const auto is_of_rows = [](const ggml_tensor * t) {
        return t->type == GGML_TYPE_F32 && ggml_is_contiguous_1(t);
    };
    return op->op == GGML_OP_GLU && ggml_get_glu_op(op) == GGML_GLU_OP_SWIGLU && is_of_rows(op) &&
           is_of_rows(op->src[0]) && (!op->src[1] || is_of_rows(op->src[1]));
}

void multiply(
    const matmul * products, int n_product, const ggml_compute_params * params, const ggml_tensor * gated) {
    const ggml_tensor * x = products[0].op->src[1];
    const rounding & how  = *products[0].k->rows;
    const int64_t n_row   = ggml_nrows(x);
    const int n_block     = blocks_of(*products[0].k, products[0].op->src[0]);
    const size_t bytes    = row_bytes(*products[0].k, products[0].op->src[0]);
    char * work           = (char *) params->wdata;
    int64_t n_group       = 0;
    for (int i = 0; i < n_product; ++i) {
        GGML_ASSERT(params->wsize >= work_of_product(*products[i].k, products[i].op, params->nth));
        GGML_ASSERT(ggml_is_contiguous(products[i].op));
        n_group += groups_of(products[i]);
    }
    // each thread rounds a part of every row
    const int from = n_block * params->ith / params->nth, to = n_block * (params->ith + 1) / params->nth;
    rows_of activations(x, gated, (int64_t) from * how.block, (int64_t) to * how.block);
    for (int64_t i = 0; i < n_row; i += MOST_ROWS) {
        const float * rows[MOST_ROWS];
        const int n = (int) std::min<int64_t>(MOST_ROWS, n_row - i);
        activations.get(i, n, rows);
        round_rows(how, n, n_block, from, to, rows, work + i * bytes);
    }
    auto * marks = (mark *) GGML_PAD(
        (uintptr_t) (work + tile_bytes(*products[0].k, products[0].op->src[0], n_row)), sizeof(mark));
    marks[params->ith].next = 0;
    ask_for_first(products, n_product, n_group * params->ith / params->nth);  // while the others round
    ggml_barrier(params->threadpool);
    share_columns(params, n_group, marks, [&](int64_t first, int64_t last) {
        for (const matmul * p = products; first < last; ++p) {
            const int64_t n = groups_of(*p);
            multiply_groups(*p, std::min(first, n), std::min(last, n), n_block, work);
            first = std::max<int64_t>(first - n, 0);
            last -= n;
        }
    });
}

// -- experts ----------------------------------------------------------------------------------------------

namespace {

// A token uses an expert: row `row` of the activations gives row `out` of the result.
struct use {
    int32_t row, out;
};

// The parts of the work buffer.
struct experts_work {
    char * rows;      // each rounded as a tile of its own
    char * tiles;     // one for each thread
    float * sums;     // each thread's, for a tile and 16 columns
    int32_t * first;  // by expert, in uses; one more
    use * uses;
    size_t bytes;

    experts_work(const kernel & k, const ggml_tensor * op, char * at, int n_thread) {
        const ggml_tensor *w = op->src[0], *x = op->src[1], *ids = op->src[2];
        const auto take = [&, start = at](size_t n) {
            char * p = at;
            at += GGML_PAD(n, 64);
            bytes = (size_t) (at - start);
            return p;
        };
        rows  = take(row_bytes(k, w) * (size_t) ggml_nrows(x));
        tiles = take(tile_bytes(k, w, MOST_ROWS) * (size_t) n_thread);
        sums  = (float *) take(sizeof(float) * COLUMNS * MOST_ROWS * (size_t) n_thread);
        first = (int32_t *) take(sizeof(int32_t) * (size_t) (w->ne[2] + 1));
        uses  = (use *) take(sizeof(use) * (size_t) ggml_nelements(ids));
    }
};

// Which tokens use which expert, in the order of the experts.
void sort_uses(const ggml_tensor * op, const experts_work & work) {
    const ggml_tensor *x = op->src[1], *ids = op->src[2];
    const int64_t n_expert = op->src[0]->ne[2];
    const auto each        = [&](auto && f) {
        for (int64_t token = 0; token < ids->ne[1]; ++token) {
            for (int64_t i = 0; i < ids->ne[0]; ++i) {
                const auto e =
                    *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + i * ids->nb[0]);
                GGML_ASSERT(e >= 0 && e < n_expert);
                f(e, use{(int32_t) (token * x->ne[1] + i % x->ne[1]), (int32_t) (token * ids->ne[0] + i)});
            }
        }
    };
    std::fill(work.first, work.first + n_expert + 1, 0);
    each([&](int32_t e, use) { ++work.first[e + 1]; });
    for (int64_t e = 0; e < n_expert; ++e) {
        work.first[e + 1] += work.first[e];
    }
    // each expert's place moves on with its uses, and is then where the next one's was
    each([&](int32_t e, use u) { work.uses[work.first[e]++] = u; });
    std::copy_backward(work.first, work.first + n_expert, work.first + n_expert + 1);
    work.first[0] = 0;
}

// Multiplies the columns of a thread with the rows that use an expert.
void multiply_expert(const kernel & k, const experts_work & work, const ggml_compute_params * params,
    ggml_tensor * op, int expert) {
    const ggml_tensor * w = op->src[0];
    const char * matrix   = (const char *) w->data + (size_t) expert * w->nb[2];
    const size_t bytes    = COLUMNS * k.column_bytes(w->ne[0]);  // for a group
    const int n_block     = blocks_of(k, w);
    const int64_t n_group = w->ne[1] / COLUMNS;
    const int64_t from    = n_group * params->ith / params->nth;
    const int64_t to      = n_group * (params->ith + 1) / params->nth;
    char * tile           = work.tiles + tile_bytes(k, w, MOST_ROWS) * (size_t) params->ith;
    float * sums          = work.sums + (size_t) COLUMNS * MOST_ROWS * (size_t) params->ith;
    for (int32_t i = work.first[expert]; i < work.first[expert + 1]; i += MOST_ROWS) {
        const int n = std::min<int>(MOST_ROWS, work.first[expert + 1] - i);
        const void * rows[MOST_ROWS];
        for (int r = 0; r < n; ++r) {
            rows[r] = work.rows + (size_t) work.uses[i + r].row * row_bytes(k, w);
        }
        gather_rows(*k.rows, n, n_block, rows, tile);
        for (int64_t g = from; g < to; ++g) {
            k.multiply(matrix + g * bytes, 1, tile, n, n_block, sums, COLUMNS);
            for (int r = 0; r < n; ++r) {
                std::memcpy((float *) op->data + work.uses[i + r].out * op->ne[0] + g * COLUMNS,
                    sums + (size_t) r * COLUMNS, COLUMNS * sizeof(float));
            }
        }
    }
}

}  // namespace

size_t work_of_experts(const kernel & k, const ggml_tensor * op, int n_thread) {
    return experts_work(k, op, nullptr, n_thread).bytes;
}

void multiply_experts(const kernel & k, const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor *weights = op->src[0], *x = op->src[1];
    const experts_work work(k, op, (char *) params->wdata, params->nth);
    GGML_ASSERT(params->wsize >= work.bytes);
    GGML_ASSERT(ggml_is_contiguous(op));
    for (int64_t i = params->ith; i < ggml_nrows(x); i += params->nth) {
        const float * row = input(x, i);
        round_rows(*k.rows, 1, blocks_of(k, weights), 0, blocks_of(k, weights), &row,
            work.rows + (size_t) i * row_bytes(k, weights));
    }
    if (params->ith == 0) {
        sort_uses(op, work);
    }
    ggml_barrier(params->threadpool);
    for (int e = 0; e < (int) weights->ne[2]; ++e) {
        multiply_expert(k, work, params, op, e);
    }
}

}  // namespace eagle3::kernels
