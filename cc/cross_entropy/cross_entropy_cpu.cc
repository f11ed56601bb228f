// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cc/common/dispatch.h"
#include "cc/cross_entropy/linear_cross_entropy.h"

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

// The place of a label among the logits, which may be a block of classes without it.
int64_t Place(const CrossEntropyProblem& p, int64_t label) { return label - p.first_class; }
bool HasPlace(const CrossEntropyProblem& p, int64_t label) {
  return Place(p, label) >= 0 && Place(p, label) < p.classes;
}

bool Ignored(const CrossEntropyProblem& p, int64_t label) {
  return p.has_ignore_class && label == p.ignore_class;
}

template <typename Labels>
int64_t FirstBadLabel(const CrossEntropyProblem& p, const Labels* labels) {
  const auto bad = [&p](int64_t label) {
    return (uint64_t(label) >= uint64_t(p.all_classes)) & !Ignored(p, label);
  };
  bool any = false;
  for (int64_t i = 0; i < p.tokens; ++i) any |= bad(labels[i]);
  return any ? std::find_if(labels, labels + p.tokens, bad) - labels : p.tokens;
}

// Before anything is read at a label.
Status CheckLabels(const CrossEntropyProblem& p) {
  const int64_t i = p.labels32 ? FirstBadLabel(p, p.labels32) : FirstBadLabel(p, p.labels64);
  if (i == p.tokens) return Ok();
  return InvalidArgument("cross_entropy: label " + std::to_string(Label(p, i)) + " of token " +
                         std::to_string(i) + " is outside [0, " + std::to_string(p.all_classes) +
                         ")");
}

Status SetSpan(const TensorView& span, CrossEntropyProblem* p) {
  p->span = span.as<const int64_t>();
  p->first_class = p->span[0];
  p->all_classes = p->span[1];
  // Written so that no sum overflows.
  if (p->first_class < 0 || p->all_classes < p->classes ||
      p->first_class > p->all_classes - p->classes) {
    return InvalidArgument("linear_cross_entropy: " + std::to_string(p->classes) +
                           " classes from class " + std::to_string(p->first_class) +
                           " on are not among " + std::to_string(p->all_classes));
  }
  return Ok();
}

SoftmaxSums Add(const SoftmaxSums& a, const SoftmaxSums& b) {
  const float max = std::max(a.max, b.max), reference = max == -INFINITY ? 0.0f : max;
  return {max, a.sum * std::exp(a.max - reference) + b.sum * std::exp(b.max - reference),
          a.sum_x + b.sum_x};
}

// Calls finish(token, sums) for each token; those of an ignored one are of no use.
template <typename T, typename Finish>
void ForEachToken(const Cpu& cpu, const CrossEntropyProblem& p, const T* logits,
                  const Finish& finish) {
  if (p.classes <= kFewClasses) {
    const auto sum_few_classes = TF_OPS_SIMD(SumFewClasses<T>);
    cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
      SoftmaxSums sums[kTokensAtOnce];
      for (int64_t i = begin; i < end; i += kTokensAtOnce) {
        const int64_t n = std::min<int64_t>(kTokensAtOnce, end - i);
        sum_few_classes(logits + i * p.classes, n, p.classes, p.soft_cap, sums);
        for (int64_t j = 0; j < n; ++j) finish(i + j, sums[j]);
      }
    });
    return;
  }
  const auto sum_classes = TF_OPS_SIMD(SumClasses<T>);
  const int64_t parts = Parts(p);
  const auto sums_of = [&](int64_t token, int64_t part) {
    SoftmaxSums sums{};
    if (!Ignored(p, Label(p, token))) {
      const int64_t begin = p.classes * part / parts, end = p.classes * (part + 1) / parts;
      sum_classes(logits + token * p.classes + begin, end - begin, p.soft_cap, &sums);
    }
    return sums;
  };
  if (parts == 1) {
    cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) finish(i, sums_of(i, 0));
    });
    return;
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
}

template <typename T>
Status Gradient(const Cpu& cpu, const CrossEntropyProblem& p, const float* dloss, const T* x,
                const float* max, const float* log_sum, T* dx) {
  const auto gradient_of = [&](int64_t token) -> TokenGradient {
    const float g = dloss[token], m = max[token], l = log_sum[token];
    const float factor = p.z_loss > 0.0f ? g * (1.0f + 2.0f * p.z_loss * (m + l)) : g;
    return {m, factor * std::exp(-l), g * p.label_smoothing / float(p.all_classes),
            g * (1.0f - p.label_smoothing)};
  };
  if (p.classes <= kFewClasses) {
    const auto grad_few_classes = TF_OPS_SIMD(GradFewClasses<T>);
    cpu.ParallelFor(p.tokens, Cost(p, p.classes), [&](int64_t begin, int64_t end) {
      TokenGradient gradients[kTokensAtOnce];
      int64_t places[kTokensAtOnce];
      for (int64_t i = begin; i < end; i += kTokensAtOnce) {
        const int64_t n = std::min<int64_t>(kTokensAtOnce, end - i);
        for (int64_t j = 0; j < n; ++j) {
          gradients[j] = gradient_of(i + j);
          const int64_t label = Label(p, i + j);
          const bool has_place = HasPlace(p, label);
          places[j] = has_place ? Place(p, label) : 0;
          if (!has_place) gradients[j].target = 0.0f;
        }
        grad_few_classes(x + i * p.classes, n, p.classes, places, p.soft_cap, gradients,
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
        grad_classes(x + offset, end - begin, Place(p, label) - begin, p.soft_cap,
                     gradient_of(token), dx + offset);
      }
    }
  });
  return Ok();
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
    const auto capped_logit = TF_OPS_SIMD(CappedLogit<T>);
    const T* x = logits.as<const T>();
    ForEachToken(cpu, p, x, [&](int64_t token, const SoftmaxSums& sums) {
      const int64_t label = Label(p, token);
      float &y = loss.as<float>()[token], &m = max.as<float>()[token],
            &l = log_sum.as<float>()[token];
      y = m = l = 0.0f;
      if (Ignored(p, label)) return;
      m = sums.max;
      l = std::log(sums.sum);
      y = (1.0f - p.label_smoothing) *
              (m - capped_logit(x + token * p.classes + label, p.soft_cap)) +
          l;
      // Infinite terms are left out where their factor is 0.
      if (p.label_smoothing > 0.0f) y += p.label_smoothing * float(m - sums.sum_x / p.classes);
      if (p.z_loss > 0.0f) y += p.z_loss * ((m + l) * (m + l));
    });
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
    return Gradient(cpu, p, dloss.as<const float>(), logits.as<const T>(), max.as<const float>(),
                    log_sum.as<const float>(), dlogits.as<T>());
  });
}

Status LinearCrossEntropy(Cpu cpu, TensorView labels, TensorView logits, TensorView span,
                          TensorView sums, bool has_ignore_class, int64_t ignore_class,
                          float label_smoothing, float soft_cap, TensorView new_sums) {
  CrossEntropyProblem p;
  if (Status s = DescribeBlockSums(labels, logits, span, sums, has_ignore_class, ignore_class,
                                   label_smoothing, soft_cap, new_sums, &p);
      !s.ok()) {
    return s;
  }
  if (Status s = SetSpan(span, &p); !s.ok()) return s;
  if (Status s = CheckLabels(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("linear_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    const auto capped_logit = TF_OPS_SIMD(CappedLogit<T>);
    const T* x = logits.as<const T>();
    const auto* before = sums.as<const BlockSums>();
    auto* after = new_sums.as<BlockSums>();
    ForEachToken(cpu, p, x, [&](int64_t token, const SoftmaxSums& block) {
      const int64_t label = Label(p, token);
      const BlockSums b = before[token];
      const SoftmaxSums total = Add({b.max, b.sum, b.sum_x}, block);
      after[token] = {total.max, float(total.sum), float(total.sum_x), b.x_label};
      if (Ignored(p, label)) {
        after[token] = b;
      } else if (HasPlace(p, label)) {
        after[token].x_label = capped_logit(x + token * p.classes + Place(p, label), p.soft_cap);
      }
    });
    return Ok();
  });
}

Status LinearCrossEntropyGrad(Cpu cpu, TensorView dloss, TensorView labels, TensorView logits,
                              TensorView span, TensorView max, TensorView log_sum,
                              bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                              float z_loss, float soft_cap, TensorView dlogits) {
  CrossEntropyProblem p;
  if (Status s = DescribeBlockGrad(dloss, labels, logits, span, max, log_sum, has_ignore_class,
                                   ignore_class, label_smoothing, z_loss, soft_cap, dlogits, &p);
      !s.ok()) {
    return s;
  }
  if (Status s = SetSpan(span, &p); !s.ok()) return s;
  if (Status s = CheckLabels(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("linear_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    return Gradient(cpu, p, dloss.as<const float>(), logits.as<const T>(), max.as<const float>(),
                    log_sum.as<const float>(), dlogits.as<T>());
  });
}

}  // namespace tf_ops
