// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cc/common/dispatch.h"
#include "cc/common/tuning.h"
#include "cc/group_normalization/group_normalization.h"

namespace tf_ops {

constexpr int kStrip = 512;  // channels at a time: their sums stay in the nearest cache
constexpr int kBlock = 64;   // additions in float32 before one in float64

}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/group_normalization/group_normalization_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

// Enough channels for whole vectors where they come last, else a group.
int64_t GroupsAtOnce(DType dtype, const GroupNormalizationProblem& p, const char* kernel) {
  if (p.inner > 1) return 1;
  const Tunable groups = {kernel, "CPU", {"samples", "outer", "channels", "groups"}};
  const int64_t heuristic =
      std::clamp<int64_t>(128 / std::max<int64_t>(p.group_channels, 1), 1, p.groups);
  // A task has one group, or as many as fit a strip.
  const auto legal = [&](int64_t n) {
    return n == 1 || (n > 1 && n <= p.groups && n * p.group_channels <= kStrip);
  };
  return Choose(groups, dtype, {p.samples, p.outer, p.channels, p.groups}, heuristic,
                {1, 2, 4, 8, 16, 32, 64}, legal);
}

// Calls f(T{}, W{}, std::bool_constant<channels come last>{}); W is the weights' type.
template <typename F>
Status DispatchTypes(DType dtype, const GroupNormalizationProblem& p, const F& f) {
  return DispatchType<float, half, bf16>("group_normalization", dtype, [&](auto t) {
    const auto with_weights = [&](auto w) {
      p.inner == 1 ? f(t, w, std::true_type{}) : f(t, w, std::false_type{});
    };
    if (p.float_weights) {
      with_weights(float{});
    } else {
      with_weights(t);
    }
    return Ok();
  });
}

// Calls f(sample, first group, last group) for all of them.
template <typename F>
void ForGroups(const Cpu& cpu, const GroupNormalizationProblem& p, int64_t step, int64_t cost,
               const F& f) {
  const int64_t steps = (p.groups + step - 1) / step;
  const int64_t elements = step * p.group_channels * p.outer * p.inner;
  cpu.ParallelFor(p.samples * steps, cost * elements + 100, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % steps * step;
      f(i / steps, first, std::min(first + step, p.groups));
    }
  });
}

}  // namespace

Status GroupNormalization(Cpu cpu, TensorView x, TensorView gamma, TensorView beta, int groups,
                          float epsilon, TensorView y, TensorView mean, TensorView rstd) {
  GroupNormalizationProblem p;
  if (Status s = DescribeGroupNormalization(x, gamma, beta, groups, mean, rstd, &p); !s.ok()) {
    return s;
  }
  if (!y.SameShapeAndDType(x)) return InvalidArgument("group_normalization: y must be as x");
  p.epsilon = epsilon;
  p.y = y.data;
  return DispatchTypes(x.dtype, p, [&](auto t, auto w, auto last) {
    const auto run = TF_OPS_SIMD(NormalizeGroups<decltype(t), decltype(w), decltype(last)::value>);
    const int64_t step = GroupsAtOnce(x.dtype, p, "group_normalization/forward");
    ForGroups(cpu, p, step, 2,
              [&](int64_t n, int64_t first, int64_t end) { run(p, n, first, end); });
  });
}

Status GroupNormalizationGrad(Cpu cpu, TensorView dy, TensorView x, TensorView gamma,
                              TensorView beta, TensorView mean, TensorView rstd, int groups, float,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace) {
  GroupNormalizationProblem p;
  if (Status s = DescribeGroupNormalizationGrad(dy, x, gamma, beta, mean, rstd, groups, dx, dgamma,
                                                dbeta, workspace, &p);
      !s.ok()) {
    return s;
  }
  return DispatchTypes(x.dtype, p, [&](auto t, auto w, auto last) {
    using W = decltype(w);
    const auto run = TF_OPS_SIMD(NormalizeGroupsGrad<decltype(t), W, decltype(last)::value>);
    const int64_t step = GroupsAtOnce(x.dtype, p, "group_normalization/grad");
    ForGroups(cpu, p, step, 3,
              [&](int64_t n, int64_t first, int64_t end) { run(p, n, first, end); });
    const auto sum_samples = [&](const float* sums, void* out) {
      if (!out) return;
      for (int64_t c = 0; c < p.channels; ++c) {
        double total = 0.0;
        for (int64_t n = 0; n < p.samples; ++n) total += sums[n * p.channels + c];
        static_cast<W*>(out)[c] = W(float(total));
      }
    };
    sum_samples(p.sum_dy_xhat, p.dgamma);
    sum_samples(p.sum_dy, p.dbeta);
  });
}

}  // namespace tf_ops
