// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cc/common/dispatch.h"
#include "cc/cross_entropy/cross_entropy.h"

namespace tf_ops {

// Over some classes of a token, x being the capped logits.
struct SoftmaxSums {
  float max;   // of x
  double sum;  // of exp(x - max)
  double sum_x;
};

// dx_j = exp(x_j - max) scale - shift, less `target` at the label.
struct TokenGradient {
  float max, scale, shift, target;
};

}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/cross_entropy/cross_entropy_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

// So few tokens do not keep the threads busy: their classes are shared out as well.
constexpr int kFewTokens = 32, kMaxParts = 32;
constexpr int64_t kMinClassesPerPart = 16384;

// A function of the shape alone: the results do not depend on the number of threads.
int64_t Parts(const CrossEntropyProblem& p) {
  if (p.tokens >= kFewTokens) return 1;
  return std::clamp<int64_t>(p.classes / kMinClassesPerPart, 1, kMaxParts);
}

int64_t Cost(const CrossEntropyProblem& p, int64_t classes) {
  return 50 + (p.soft_cap > 0.0f ? 6 : 2) * classes;
}

int64_t Label(const CrossEntropyProblem& p, int64_t token) {
  return p.labels32 ? p.labels32[token] : p.labels64[token];
}

bool Ignored(const CrossEntropyProblem& p, int64_t label) {
  return p.has_ignore_class && label == p.ignore_class;
}

template <typename Labels>
int64_t FirstBadLabel(const CrossEntropyProblem& p, const Labels* labels) {
  const auto bad = [&p](int64_t label) {
    return (uint64_t(label) >= uint64_t(p.classes)) & !Ignored(p, label);
  };
  bool any = false;
  for (int64_t i = 0; i < p.tokens; ++i) any |= bad(labels[i]);
  return any ? std::find_if(labels, labels + p.tokens, bad) - labels : p.tokens;
}

// Before anything is read at a label.
Status CheckLabels(const CrossEntropyProblem& p) {
  const int64_t i = p.labels32 ? FirstBadLabel(p, p.labels32) : FirstBadLabel(p, p.labels64);
  if (i == p.tokens) return Ok();
  return InvalidArgument("sparse_softmax_cross_entropy: label " + std::to_string(Label(p, i)) +
                         " of token " + std::to_string(i) + " is outside [0, " +
                         std::to_string(p.classes) + ")");
}

SoftmaxSums Add(const SoftmaxSums& a, const SoftmaxSums& b) {
  const float max = std::max(a.max, b.max), reference = max == -INFINITY ? 0.0f : max;
  return {max, a.sum * std::exp(a.max - reference) + b.sum * std::exp(b.max - reference),
          a.sum_x + b.sum_x};
}

}  // namespace

Status SparseSoftmaxCrossEntropy(Cpu cpu, TensorView labels, TensorView logits,
                                 bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                                 float z_loss, float soft_cap, TensorView loss, TensorView max,
                                 TensorView log_sum) {
  CrossEntropyProblem p;
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               z_loss, soft_cap, {&loss, &max, &log_sum}, &p);
      !s.ok()) {
    return s;
  }
  if (Status s = CheckLabels(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("sparse_softmax_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    const auto sum_classes = TF_OPS_SIMD(SumClasses<T>);
    const auto capped_logit = TF_OPS_SIMD(CappedLogit<T>);
    const int64_t parts = Parts(p);
    const auto sums_of = [&](int64_t token, int64_t part) {
      SoftmaxSums sums{};
      if (!Ignored(p, Label(p, token))) {
        const int64_t begin = p.classes * part / parts, end = p.classes * (part + 1) / parts;
        sum_classes(logits.as<const T>() + token * p.classes + begin, end - begin, p.soft_cap,
                    &sums);
      }
      return sums;
    };
    const auto finish = [&](int64_t token, const SoftmaxSums& sums) {
      const int64_t label = Label(p, token);
      float &y = loss.as<float>()[token], &m = max.as<float>()[token],
            &l = log_sum.as<float>()[token];
      y = m = l = 0.0f;
      if (Ignored(p, label)) return;
      m = sums.max;
      l = std::log(sums.sum);
      const float x_label =
          capped_logit(logits.as<const T>() + token * p.classes + label, p.soft_cap);
      y = (1.0f - p.label_smoothing) * (m - x_label) + l;
      // Infinite terms are left out where their factor is 0.
      if (p.label_smoothing > 0.0f) y += p.label_smoothing * float(m - sums.sum_x / p.classes);
      if (p.z_loss > 0.0f) y += p.z_loss * ((m + l) * (m + l));
    };
    if (parts == 1) {
      cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) finish(i, sums_of(i, 0));
      });
      return Ok();
    }
    SoftmaxSums sums[kFewTokens * kMaxParts];
    cpu.ParallelFor(p.tokens * parts, Cost(p, p.classes / parts), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sums[i] = sums_of(i / parts, i % parts);
    });
    for (int64_t i = 0; i < p.tokens; ++i) {
      SoftmaxSums total = sums[i * parts];
      for (int64_t j = 1; j < parts; ++j) total = Add(total, sums[i * parts + j]);
      finish(i, total);
    }
    return Ok();
  });
}

Status SparseSoftmaxCrossEntropyGrad(Cpu cpu, TensorView dloss, TensorView labels,
                                     TensorView logits, TensorView max, TensorView log_sum,
                                     bool has_ignore_class, int64_t ignore_class,
                                     float label_smoothing, float z_loss, float soft_cap,
                                     TensorView dlogits) {
  CrossEntropyProblem p;
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               z_loss, soft_cap, {&dloss, &max, &log_sum}, &p);
      !s.ok()) {
    return s;
  }
  if (!dlogits.SameShapeAndDType(logits)) {
    return InvalidArgument("sparse_softmax_cross_entropy: dlogits must be as logits");
  }
  if (Status s = CheckLabels(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("sparse_softmax_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    const auto grad_classes = TF_OPS_SIMD(GradClasses<T>);
    const int64_t parts = Parts(p);
    cpu.ParallelFor(p.tokens * parts, Cost(p, p.classes / parts), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t token = i / parts, part = i % parts, label = Label(p, token);
        const int64_t begin = p.classes * part / parts, end = p.classes * (part + 1) / parts;
        const int64_t offset = token * p.classes + begin;
        if (Ignored(p, label)) {
          std::fill_n(dlogits.as<T>() + offset, end - begin, T(0.0f));
          continue;
        }
        const float g = dloss.as<const float>()[token], m = max.as<const float>()[token],
                    l = log_sum.as<const float>()[token];
        const float factor = p.z_loss > 0.0f ? g * (1.0f + 2.0f * p.z_loss * (m + l)) : g;
        grad_classes(logits.as<const T>() + offset, end - begin, label - begin, p.soft_cap,
                     {m, factor * std::exp(-l), g * p.label_smoothing / float(p.classes),
                      g * (1.0f - p.label_smoothing)},
                     dlogits.as<T>() + offset);
      }
    });
    return Ok();
  });
}

}  // namespace tf_ops
