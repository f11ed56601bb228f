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

// Up to so many classes a vector holds a class of several tokens, beyond several classes of one.
constexpr int kFewClasses = 64;  // where both ways take the same time

}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/cross_entropy/cross_entropy_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

// So few tokens do not keep the threads busy: their classes are shared out as well.
constexpr int kFewTokens = 32, kMaxParts = 32;
constexpr int64_t kMinClassesPerPart = 16384;
constexpr int kTokensAtOnce = 64;  // where there are few classes

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
    if (p.classes <= kFewClasses) {
      const auto sum_few_classes = TF_OPS_SIMD(SumFewClasses<T>);
      cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
        SoftmaxSums sums[kTokensAtOnce];
        for (int64_t i = begin; i < end; i += kTokensAtOnce) {
          const int64_t n = std::min<int64_t>(kTokensAtOnce, end - i);
          sum_few_classes(logits.as<const T>() + i * p.classes, n, p.classes, p.soft_cap, sums);
          for (int64_t j = 0; j < n; ++j) finish(i + j, sums[j]);
        }
      });
      return Ok();
    }
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
    const T* x = logits.as<const T>();
    T* dx = dlogits.as<T>();
    const auto gradient_of = [&](int64_t token) -> TokenGradient {
      const float g = dloss.as<const float>()[token], m = max.as<const float>()[token],
                  l = log_sum.as<const float>()[token];
      const float factor = p.z_loss > 0.0f ? g * (1.0f + 2.0f * p.z_loss * (m + l)) : g;
      return {m, factor * std::exp(-l), g * p.label_smoothing / float(p.classes),
              g * (1.0f - p.label_smoothing)};
    };
    if (p.classes <= kFewClasses) {
      const auto grad_few_classes = TF_OPS_SIMD(GradFewClasses<T>);
      cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
        TokenGradient gradients[kTokensAtOnce];
        int64_t labels[kTokensAtOnce];
        for (int64_t i = begin; i < end; i += kTokensAtOnce) {
          const int64_t n = std::min<int64_t>(kTokensAtOnce, end - i);
          for (int64_t j = 0; j < n; ++j) {
            gradients[j] = gradient_of(i + j);
            const int64_t label = Label(p, i + j);
            labels[j] = Ignored(p, label) ? 0 : label;
          }
          grad_few_classes(x + i * p.classes, n, p.classes, labels, p.soft_cap, gradients,
                           dx + i * p.classes);
          for (int64_t j = i; j < i + n; ++j) {
            if (Ignored(p, Label(p, j))) std::fill_n(dx + j * p.classes, p.classes, T(0.0f));
          }
        }
      });
      return Ok();
    }
    const auto grad_classes = TF_OPS_SIMD(GradClasses<T>);
    const int64_t parts = Parts(p);
    cpu.ParallelFor(p.tokens * parts, Cost(p, p.classes / parts), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t token = i / parts, part = i % parts, label = Label(p, token);
        const int64_t begin = p.classes * part / parts, end = p.classes * (part + 1) / parts;
        const int64_t offset = token * p.classes + begin;
        if (Ignored(p, label)) {
          std::fill_n(dx + offset, end - begin, T(0.0f));
        } else {
          grad_classes(x + offset, end - begin, label - begin, p.soft_cap, gradient_of(token),
                       dx + offset);
        }
      }
    });
    return Ok();
  });
}

}  // namespace tf_ops
