// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cc/glu/glu.h"

#define TF_OPS_SIMD_FILE "cc/glu/glu_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {

Status RunGatedLinearUnit(Cpu cpu, const GatedLinearUnitProblem& p) {
  return DispatchType<float, half, bf16>("gated_linear_unit", p.dtype, [&](auto t) {
    using T = decltype(t);
    DispatchActivation(p.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      // Elements are shared out, not rows, which may be few; a block is cut where a row ends.
      cpu.ParallelFor(p.rows * p.cols, p.dy ? 4 : 3, [&](int64_t begin, int64_t end) {
        const auto *gate = static_cast<const T*>(p.gate), *up = static_cast<const T*>(p.up);
        for (int64_t i = begin, n; i < end; i += n) {
          const int64_t row = i / p.cols, at = row * p.stride + i % p.cols;
          n = std::min((row + 1) * p.cols, end) - i;
          if (p.dy) {
            TF_OPS_SIMD(GatedLinearUnitGradElements<T, kActivation>)
            (static_cast<const T*>(p.dy) + i, gate + at, up + at, n, static_cast<T*>(p.dgate) + at,
             static_cast<T*>(p.dup) + at);
          } else {
            TF_OPS_SIMD(GatedLinearUnitElements<T, kActivation>)
            (gate + at, up + at, n, static_cast<T*>(p.y) + i);
          }
        }
      });
    });
    return Ok();
  });
}

}  // namespace tf_ops
