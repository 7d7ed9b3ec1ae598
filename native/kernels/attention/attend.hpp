// Attention of units for a number of registers that the compiler knows. A size of heads that is often used
// has a file of its own, so that no file takes long to compile.
#pragma once

#include "attention/scores.hpp"
#include "attention/values.hpp"
#include "attention/widen.hpp"

namespace eagle3::kernels::attention {

// NK, NV: registers of a head's keys and values, 0 for any number.
template <int NK, int NV>
void attend_units(const unit * units, int n_unit, const head & k, const head & v, float scale, float softcap,
    float * block) {
    const int nk = NK ? NK : k.registers(), nv = NV ? NV : v.registers();
    float * turned = block + STEP * LANES * std::max(nk, nv);
    each_step<NK>(units, n_unit, k, &v, nk, block,
        [&](const unit * same, int n, int i) { add_scores(block, turned, nk, same, n, i, scale, softcap); });
    for (int u = 0; u < n_unit; ++u) {
        const unit & w = units[u];
        w.out[0]       = maximum(w.scores, w.n);
        w.out[1]       = exponentials(w.scores, w.n, w.out[0]);
        for (int d = 0; d < nv; ++d) {
            put(w.out + 2 + d * LANES, floats{});
        }
    }
    constexpr int N = !MANY_REGISTERS ? 1 : NV && 4 * NV <= CELLS ? 4 : 2;
    each_step<NV>(units, n_unit, v, nullptr, nv, block,
        [&](const unit * same, int n, int i) { add_values<N, NV>(block, nv, same, n, i); });
}

}  // namespace eagle3::kernels::attention
