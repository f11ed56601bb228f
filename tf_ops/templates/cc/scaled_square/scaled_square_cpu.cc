// SPDX-License-Identifier: Apache-2.0
#include "cc/scaled_square/scaled_square.h"

#define TF_OPS_SIMD_FILE "cc/scaled_square/scaled_square_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {

// What an element costs, in cycles: a block of less than some 10,000 is not worth a thread.
constexpr int64_t kCycles = 1;

Status ScaledSquare(Cpu cpu, TensorView x, float scale, TensorView y) {
  if (Status s = CheckScaledSquare(x, y); !s.ok()) return s;
  return DispatchType<float, half, bf16>("scaled_square", x.dtype, [&](auto t) {
    using T = decltype(t);
    const auto run = TF_OPS_SIMD(ScaledSquareElements<T>);
    cpu.ParallelFor(x.size(), kCycles, [&](int64_t begin, int64_t end) {
      run(x.as<T>() + begin, scale, end - begin, y.as<T>() + begin);
    });
    return Ok();
  });
}

Status ScaledSquareGrad(Cpu cpu, TensorView dy, TensorView x, float scale, TensorView dx) {
  if (Status s = CheckScaledSquare(x, dy); !s.ok()) return s;
  if (Status s = CheckScaledSquare(x, dx); !s.ok()) return s;
  return DispatchType<float, half, bf16>("scaled_square", x.dtype, [&](auto t) {
    using T = decltype(t);
    const auto run = TF_OPS_SIMD(ScaledSquareGradElements<T>);
    cpu.ParallelFor(x.size(), kCycles, [&](int64_t begin, int64_t end) {
      const int64_t n = end - begin;
      run(dy.as<T>() + begin, x.as<T>() + begin, scale, n, dx.as<T>() + begin);
    });
    return Ok();
  });
}

}  // namespace tf_ops
