// SPDX-License-Identifier: Apache-2.0
// The sums of the gradients; what a block's logits give is in cross_entropy_cpu.cc.
#include <algorithm>
#include <cstring>

#include "cc/common/dispatch.h"
#include "cc/cross_entropy/linear_cross_entropy.h"

#define TF_OPS_SIMD_FILE "cc/cross_entropy/linear_cross_entropy_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {

Status LinearCrossEntropyHiddenGrad(Cpu cpu, TensorView sum, TensorView rest, TensorView addend,
                                    TensorView new_sum, TensorView new_rest) {
  if (Status s = CheckHiddenGrad(sum, rest, addend, new_sum, new_rest); !s.ok()) return s;
  return DispatchType<float, half, bf16>("linear_cross_entropy", addend.dtype, [&](auto t) {
    using T = decltype(t);
    if (sum.dtype == DType::kBFloat16) {
      const auto add_row = TF_OPS_SIMD(AddSplitRow<T>);
      cpu.ParallelFor(sum.size(), 1, [&](int64_t begin, int64_t end) {
        add_row(sum.as<const bf16>() + begin, rest.as<const int16_t>() + begin,
                addend.as<const T>() + begin, end - begin, new_sum.as<bf16>() + begin,
                new_rest.as<int16_t>() + begin);
      });
      return Ok();
    }
    const auto add_row = TF_OPS_SIMD(AddRow<T>);
    cpu.ParallelFor(sum.size(), 1, [&](int64_t begin, int64_t end) {
      add_row(sum.as<const float>() + begin, addend.as<const T>() + begin, end - begin,
              new_sum.as<float>() + begin);
    });
    return Ok();
  });
}

Status LinearCrossEntropyKernelGrad(Cpu cpu, TensorView whole, TensorView block, TensorView span,
                                    bool transpose_kernel, TensorView new_whole) {
  KernelGradProblem p;
  if (Status s = DescribeKernelGrad(whole, block, span, transpose_kernel, new_whole, &p); !s.ok()) {
    return s;
  }
  const int64_t first = span.as<const int64_t>()[0];
  if (first < 0 || first > p.last) {
    return InvalidArgument("linear_cross_entropy: the block is not among the classes");
  }
  if (new_whole.data != whole.data) std::memcpy(new_whole.data, whole.data, whole.bytes());
  return DispatchType<float, half, bf16>("linear_cross_entropy", whole.dtype, [&](auto to) {
    using To = decltype(to);
    return DispatchType<float, half, bf16>("linear_cross_entropy", block.dtype, [&](auto from) {
      using From = decltype(from);
      const auto convert_row = TF_OPS_SIMD(ConvertRow<From, To>);
      const From* source = block.as<const From>();
      To* target = new_whole.as<To>() + first * p.unit;
      // By elements: a transposed kernel is a single row.
      cpu.ParallelFor(p.rows * p.width, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
          const int64_t row = i / p.width, col = i % p.width;
          const int64_t n = std::min(p.width - col, end - i);
          convert_row(source + i, n, target + row * p.cols + col);
          i += n;
        }
      });
      return Ok();
    });
  });
}

}  // namespace tf_ops
