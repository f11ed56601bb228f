// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cc/normalization/normalization.h"

#define TF_OPS_SIMD_FILE "cc/normalization/normalization_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

// Calls f(T{}, W{}, std::bool_constant<subtract_mean>{}); W, the weights' type, is T or float.
template <typename F>
Status DispatchTypes(const NormalizationProblem& p, F&& f) {
  return DispatchType<float, half, bf16>("normalization", p.dtype, [&](auto t) {
    const auto with_weight = [&](auto w) {
      if (p.subtract_mean) {
        f(t, w, std::true_type{});
      } else {
        f(t, w, std::false_type{});
      }
    };
    if (p.weight_dtype == p.dtype) {
      with_weight(t);
    } else {
      with_weight(float{});
    }
    return Ok();
  });
}

}  // namespace

Status Normalize(Cpu cpu, const NormalizationProblem& p) {
  return DispatchTypes(p, [&](auto t, auto w, auto mean) {
    using T = decltype(t);
    using W = decltype(w);
    constexpr bool kMean = decltype(mean)::value;
    cpu.ParallelFor(p.rows, 2 * p.cols, [&](int64_t begin, int64_t end) {
      TF_OPS_SIMD(NormalizationRows<T, W, kMean>)(p, begin, end);
    });
  });
}

Status NormalizeGrad(Cpu cpu, const NormalizationProblem& p) {
  const int64_t parts = NormalizationCpuParts(p), size = p.groups * p.cols;
  float* const dscale = p.dscale ? p.partial : nullptr;
  float* const dbeta = p.dbeta ? p.partial + (dscale ? parts * size : 0) : nullptr;
  return DispatchTypes(p, [&](auto t, auto w, auto mean) {
    using T = decltype(t);
    using W = decltype(w);
    constexpr bool kMean = decltype(mean)::value;
    // Without weights there are no sums, and rows need not go by parts.
    const bool sums = p.dscale || p.dbeta;
    const int64_t items = sums ? parts : p.rows;
    const int64_t rows_per_group = p.rows / p.groups;
    const int64_t cost = 4 * p.cols * (sums ? p.rows / std::max<int64_t>(parts, 1) : 1);
    cpu.ParallelFor(items, cost, [&](int64_t begin, int64_t end) {
      const auto rows = TF_OPS_SIMD(NormalizationGradRows<T, W, kMean>);
      if (!sums) return rows(p, begin, end, nullptr, nullptr);
      for (int64_t part = begin; part < end; ++part) {
        float* const part_dscale = dscale ? dscale + part * size : nullptr;
        float* const part_dbeta = dbeta ? dbeta + part * size : nullptr;
        if (part_dscale) std::fill_n(part_dscale, size, 0.0f);
        if (part_dbeta) std::fill_n(part_dbeta, size, 0.0f);
        rows(p, rows_per_group * part / parts * p.groups,
             rows_per_group * (part + 1) / parts * p.groups, part_dscale, part_dbeta);
      }
    });
    cpu.ParallelFor(sums ? size : 0, std::max<int64_t>(parts, 1), [&](int64_t begin, int64_t end) {
      const auto sum = TF_OPS_SIMD(SumParts<W>);
      if (p.dscale) sum(dscale, parts, size, begin, end, static_cast<W*>(p.dscale));
      if (p.dbeta) sum(dbeta, parts, size, begin, end, static_cast<W*>(p.dbeta));
    });
  });
}

}  // namespace tf_ops
