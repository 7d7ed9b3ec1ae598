// Attention of rows and heads that have the same keys and values. A cell's keys and values are widened to
// floats once for those that see it. Each row and head is computed as if it were alone.
#pragma once

#include "attention/cells.hpp"
#include "attention/lanes.hpp"

namespace eagle3::kernels::attention {

// A unit is a row and head over some of the cells that it sees.
struct unit {
    const float * q;        // padded with zeros to whole registers, as out is padded
    const int32_t * cells;  // in order, n of them and, up to the next multiple of sixteen, any
    int n;
    int n_same;           // how many of the first are those of the unit before
    const float * added;  // to the scores, by the mask; then -INFINITY up to a multiple of sixteen
    float * scores;       // as many; overwritten
    float * out;          // maximum of the scores, sum of their exponentials, values by these
};

// These are the keys or values of a head, n numbers a cell. Where n ends within a register, its rest is zero.
struct head {
    const char * data;
    size_t stride;
    ggml_type type;
    int n;

    int registers() const { return (n + LANES - 1) / LANES; }
};

// Computes units. block has space for two times sixteen cells of keys or values, whichever are larger, and is
// aligned to 64 bytes.
using attend = void (*)(const unit * units, int n_unit, const head & k, const head & v, float scale,
    float softcap, float * block);

// They compute heads whose keys and values have so many numbers each, or any number.
extern const attend attend_64, attend_80, attend_96, attend_128, attend_256, attend_any;

// Chooses one of them. It is null for shapes without a kernel: these take queries of floats, and one mask for
// all heads.
attend attend_of(const ggml_tensor * op);

}  // namespace eagle3::kernels::attention
