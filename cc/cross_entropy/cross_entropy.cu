// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "cc/common/cuda.cuh"
#include "cc/common/tuning.h"
#include "cc/cross_entropy/linear_cross_entropy.h"

namespace tf_ops {
namespace {

constexpr int kThreads = 256;
// 16-byte loads that a thread has in flight. The cap takes registers, and more time than they.
template <bool kCapped>
constexpr int kLoads = kCapped ? 2 : 4;

// Over some classes of a token, x being the capped logits.
struct SoftmaxSums {
  float max;    // of x
  float sum;    // of exp(x - max)
  float sum_x;  // only where labels are smoothed
};

// 16 bytes of a row. __ldcg is no non-coherent load, so that dlogits may alias logits.
template <typename T>
struct Vector {
  static constexpr int kSize = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  uint4 words;

  __device__ static Vector Load(const Vector* p) { return {__ldcg(&p->words)}; }
  __device__ void Store(Vector* p) const { p->words = words; }

  __device__ static Vector MinusInf() {
    const uint32_t w = sizeof(T) == 4            ? 0xff800000u
                       : std::is_same_v<T, half> ? 0xfc00fc00u
                                                 : 0xff80ff80u;
    return {{w, w, w, w}};
  }
  __device__ void Unpack(float* x) const {
    UnpackWord(words.x, x);
    UnpackWord(words.y, x + kPerWord);
    UnpackWord(words.z, x + 2 * kPerWord);
    UnpackWord(words.w, x + 3 * kPerWord);
  }
  __device__ static Vector Pack(const float* x) {
    return {{PackWord(x), PackWord(x + kPerWord), PackWord(x + 2 * kPerWord),
             PackWord(x + 3 * kPerWord)}};
  }

  __device__ static void UnpackWord(uint32_t word, float* x) {
    if constexpr (std::is_same_v<T, float>) {
      x[0] = __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, bf16>) {
      x[0] = __uint_as_float(word << 16);
      x[1] = __uint_as_float(word & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
      x[0] = pair.x;
      x[1] = pair.y;
    }
  }
  __device__ static uint32_t PackWord(const float* x) {
    if constexpr (std::is_same_v<T, float>) {
      return __float_as_uint(x[0]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[0], x[1]);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

// A row as whole 16-byte vectors between two ends that are accessed by element.
struct Split {
  int64_t head, vectors, tail_at, ends;  // elements, vectors, element, elements
  template <typename T>
  __device__ static Split Of(const T* row, int64_t classes, bool aligned) {
    constexpr int kSize = Vector<T>::kSize;
    const int64_t to_boundary = (16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T);
    Split s;
    s.head = aligned && to_boundary < classes ? to_boundary : classes;
    s.vectors = (classes - s.head) / kSize;
    s.tail_at = s.head + s.vectors * kSize;
    s.ends = classes - s.vectors * kSize;
    return s;
  }
  // The place of the i-th of the elements at the ends.
  __device__ int64_t End(int64_t i) const { return i < head ? i : tail_at + (i - head); }
};

// To 2 ulp; 0 below the normal numbers. The difference of two logits is exact or harmlessly
// rounded where it is formed, before it is scaled: a multiply-add of both would lose 1e-4 at
// logits of 1e4.
__device__ float Exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

template <bool kCapped>
__device__ float Cap(float x, float soft_cap) {
  return kCapped ? soft_cap * tanhf(x * (1.0f / soft_cap)) : x;
}

// Sums are relative to the largest entry so far, or to 0 while there are only -inf, whose
// difference would be NaN.
__device__ float Reference(float max) { return max == -INFINITY ? 0.0f : max; }

template <int kCount>
__device__ void Add(const float (&x)[kCount], SoftmaxSums* s) {
  float max = s->max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, x[i]);  // passes over NaN; the sum keeps it
  const float reference = Reference(max);
  float sum = s->sum * Exp(s->max - reference);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += Exp(x[i] - reference);
  s->max = max;
  s->sum = sum;
}

__device__ SoftmaxSums Add(const SoftmaxSums& a, const SoftmaxSums& b) {
  const float max = fmaxf(a.max, b.max), reference = Reference(max);
  return {max, a.sum * Exp(a.max - reference) + b.sum * Exp(b.max - reference), a.sum_x + b.sum_x};
}

// Over kLanes neighbouring lanes of a warp, all of which get the result.
template <int kLanes>
__device__ SoftmaxSums AddLanes(SoftmaxSums s) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    s = Add(s,
            {__shfl_xor_sync(0xffffffff, s.max, offset), __shfl_xor_sync(0xffffffff, s.sum, offset),
             __shfl_xor_sync(0xffffffff, s.sum_x, offset)});
  }
  return s;
}

__device__ int64_t Label(const CrossEntropyProblem& p, int64_t token) {
  return p.labels32 ? p.labels32[token] : p.labels64[token];
}

// The place of a label among the logits, which may be a block of classes without it.
__device__ int64_t Place(const CrossEntropyProblem& p, int64_t label) {
  return p.span ? label - p.span[0] : label;
}
__device__ int64_t AllClasses(const CrossEntropyProblem& p) {
  return p.span ? p.span[1] : p.classes;
}

__device__ bool Ignored(const CrossEntropyProblem& p, int64_t label) {
  return p.has_ignore_class && label == p.ignore_class;
}

// kGroup threads share a row, which they read once. Each sums its vectors relative to the
// largest entry it has met, with one correction per kUnroll vectors; then the group adds up.
// Every lane of a warp takes part in the shuffles, so groups without a row have no classes.
// finish(token, ignored, has_label, capped logit of the label, sums) is called once per token.
template <int kGroup, bool kCapped, typename T, typename Finish>
__global__ void __launch_bounds__(kGroup > kThreads ? kGroup : kThreads)
    SparseSoftmaxCrossEntropyKernel(CrossEntropyProblem p, const T* logits, Finish finish) {
  const int lane = threadIdx.x % kGroup;
  const int64_t token = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  const bool in_range = token < p.tokens;
  const int64_t label = in_range ? Label(p, token) : 0, place = Place(p, label);
  const bool ignored = Ignored(p, label), smooth = p.label_smoothing > 0.0f;
  const int64_t classes = in_range && !ignored ? p.classes : 0;
  const T* row = logits + token * p.classes;
  // Early, so that it is there when it is wanted.
  const bool has_label = place >= 0 && place < classes;
  const float at_label = lane == 0 && has_label ? float(row[place]) : 0.0f;

  using Vec = Vector<T>;
  constexpr int kUnroll = kLoads<kCapped>;
  const Split split = Split::Of(row, classes, true);
  SoftmaxSums sums = {-INFINITY, 0.0f, 0.0f};
#pragma unroll 1
  for (int64_t i = lane; i < split.ends; i += kGroup) {
    const float x[1] = {Cap<kCapped>(float(row[split.End(i)]), p.soft_cap)};
    Add(x, &sums);
    if (smooth) sums.sum_x += x[0];
  }
  const Vec* vectors = reinterpret_cast<const Vec*>(row + split.head);
  for (int64_t first = lane; first < split.vectors; first += kGroup * kUnroll) {
    Vec in[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      in[u] = Vec::MinusInf();
      if (first + u * kGroup < split.vectors) in[u] = Vec::Load(vectors + first + u * kGroup);
    }
    float x[kUnroll * Vec::kSize];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) in[u].Unpack(x + u * Vec::kSize);
    // What lies beyond the row stays -inf: the cap would make -c of it.
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < kUnroll * Vec::kSize; ++i) {
        if (first + i / Vec::kSize * kGroup < split.vectors) x[i] = Cap<kCapped>(x[i], p.soft_cap);
      }
    }
    if (smooth) {
#pragma unroll
      for (int i = 0; i < kUnroll * Vec::kSize; ++i) {
        if (first + i / Vec::kSize * kGroup < split.vectors) sums.sum_x += x[i];
      }
    }
    Add(x, &sums);
  }

  sums = AddLanes<(kGroup < 32 ? kGroup : 32)>(sums);
  if constexpr (kGroup > 32) {
    constexpr int kWarps = kGroup / 32;
    __shared__ SoftmaxSums partial[kWarps];
    if (lane % 32 == 0) partial[lane / 32] = sums;
    __syncthreads();
    if (lane >= 32) return;
    if (lane < kWarps) {
      sums = partial[lane];
    } else {
      sums = {-INFINITY, 0.0f, 0.0f};
    }
    sums = AddLanes<32>(sums);
  }
  if (lane > 0 || !in_range) return;
  finish(p, token, ignored, has_label, Cap<kCapped>(at_label, p.soft_cap), sums);
}

struct WriteLoss {
  float *loss, *max, *log_sum;
  __device__ void operator()(const CrossEntropyProblem& p, int64_t token, bool ignored,
                             bool has_label, float x_label, const SoftmaxSums& sums) const {
    float y = 0.0f, m = 0.0f, l = 0.0f;
    if (!ignored) {
      m = sums.max;
      l = logf(sums.sum);
      y = (1.0f - p.label_smoothing) * (m - x_label) + l;
      // Infinite terms are left out where their factor is 0.
      if (p.label_smoothing > 0.0f) y += p.label_smoothing * (m - sums.sum_x / float(p.classes));
      if (p.z_loss > 0.0f) y += p.z_loss * ((m + l) * (m + l));
      if (!has_label) y = NAN;
    }
    loss[token] = y;
    max[token] = m;
    log_sum[token] = l;
  }
};

// `after` may be `before`.
struct AddBlock {
  const BlockSums* before;
  BlockSums* after;
  __device__ void operator()(const CrossEntropyProblem&, int64_t token, bool ignored,
                             bool has_label, float x_label, const SoftmaxSums& block) const {
    const BlockSums b = before[token];
    if (ignored) {
      after[token] = b;
      return;
    }
    const SoftmaxSums total = Add({b.max, b.sum, b.sum_x}, block);
    after[token] = {total.max, total.sum, total.sum_x, has_label ? x_label : b.x_label};
  }
};

// dx_j = exp(x_j - max) scale - shift, less `target` at the label.
template <bool kCapped>
struct TokenGradient {
  float max, scale, shift, target, soft_cap;
  __device__ float Of(float logit, bool is_label) const {
    const float x = Cap<kCapped>(logit, soft_cap);
    float dx = Exp(x - max) * scale - shift;
    if (is_label) dx -= target;
    if constexpr (kCapped) {
      // 1 - tanh^2, which would cancel where the cap bites.
      const float e = expf(-2.0f * fabsf(logit * (1.0f / soft_cap)));
      dx *= 4.0f * e / ((1.0f + e) * (1.0f + e));
    }
    return dx;
  }
};

// kGroup threads share a row. Whatever a thread writes it alone has read before: dlogits may
// be logits.
template <int kGroup, bool kCapped, typename T>
__global__ void __launch_bounds__(kGroup > kThreads ? kGroup : kThreads)
    SparseSoftmaxCrossEntropyGradKernel(const float* dloss, CrossEntropyProblem p, const T* logits,
                                        const float* max, const float* log_sum, T* dlogits) {
  const int lane = threadIdx.x % kGroup;
  const int64_t token = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  if (token >= p.tokens) return;
  // All asked for at once, before the label is needed.
  const float d = dloss[token], m = max[token], l = log_sum[token];
  const int64_t label = Label(p, token), place = Place(p, label), all_classes = AllClasses(p);
  const T* row = logits + token * p.classes;
  T* drow = dlogits + token * p.classes;

  using Vec = Vector<T>;
  constexpr int kUnroll = kLoads<kCapped>;
  const bool aligned =
      reinterpret_cast<uintptr_t>(row) % 16 == reinterpret_cast<uintptr_t>(drow) % 16;
  const Split split = Split::Of(row, p.classes, aligned);
  const Vec* vectors = reinterpret_cast<const Vec*>(row + split.head);
  Vec* dvectors = reinterpret_cast<Vec*>(drow + split.head);

  if (Ignored(p, label)) {
#pragma unroll 1
    for (int64_t i = lane; i < split.ends; i += kGroup) drow[split.End(i)] = T(0.0f);
#pragma unroll 1
    for (int64_t i = lane; i < split.vectors; i += kGroup) Vec{}.Store(dvectors + i);
    return;
  }

  const float factor = p.z_loss > 0.0f ? d * (1.0f + 2.0f * p.z_loss * (m + l)) : d;
  const TokenGradient<kCapped> gradient = {
      m, label >= 0 && label < all_classes ? factor * expf(-l) : NAN,
      d * p.label_smoothing / float(all_classes), d * (1.0f - p.label_smoothing), p.soft_cap};

#pragma unroll 1
  for (int64_t i = lane; i < split.ends; i += kGroup) {
    const int64_t j = split.End(i);
    drow[j] = T(gradient.Of(float(row[j]), j == place));
  }
  for (int64_t first = lane; first < split.vectors; first += kGroup * kUnroll) {
    Vec in[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kGroup < split.vectors) in[u] = Vec::Load(vectors + first + u * kGroup);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kGroup;
      if (i >= split.vectors) break;
      const int64_t in_vector = place - split.head - i * Vec::kSize;
      const bool has_label = in_vector >= 0 && in_vector < Vec::kSize;
      const float at_label = has_label ? float(row[place]) : 0.0f;
      float x[Vec::kSize];
      in[u].Unpack(x);
#pragma unroll
      for (int e = 0; e < Vec::kSize; ++e) x[e] = gradient.Of(x[e], false);
      Vec::Pack(x).Store(dvectors + i);
      if (has_label) drow[place] = T(gradient.Of(at_label, true));
    }
  }
}

// Calls launch(kGroup, kCapped, grid, block) with the number of threads that suits the rows. A warp
// a row never waits for other warps; there must be as many rows as keep the GPU busy.
template <int kMaxGroup, typename Launch>
Status WithGroups(const char* kernel, DType dtype, const CrossEntropyProblem& p,
                  const Launch& launch) {
  const bool many = p.tokens >= 32 * CurrentDevice().multiprocessors;
  const int suits = p.classes <= 16                            ? 4
                    : p.classes <= (many ? 8192 : 2048)        ? 32
                    : p.tokens < 256 && p.classes >= (1 << 15) ? 1024
                                                               : 256;
  const Tunable threads = {kernel, "GPU", {"tokens", "classes"}};
  // Fewer than 4 loops over 256 classes would keep a thread long; more threads than classes idle.
  const auto legal = [&](int64_t n) {
    return (n == 4 || n == 32 || n == 256 || n == 1024) && n <= kMaxGroup && n <= 4 * p.classes &&
           p.classes <= 256 * n;
  };
  const int group = int(Choose(threads, dtype, {p.tokens, p.classes}, std::min(suits, kMaxGroup),
                               {4, 32, 256, 1024}, legal));
  return DispatchInt<4, 32, 256, 1024>("cross_entropy: threads per row", group, [&](auto n) {
    constexpr int kGroup = std::min<int>(n, kMaxGroup), kBlock = std::max(kGroup, kThreads),
                  kRows = kBlock / kGroup;
    const unsigned grid = (p.tokens + kRows - 1) / kRows;
    if (p.soft_cap > 0.0f) {
      launch(std::integral_constant<int, kGroup>{}, std::true_type{}, grid, kBlock);
    } else {
      launch(std::integral_constant<int, kGroup>{}, std::false_type{}, grid, kBlock);
    }
    return CudaStatus();
  });
}

Status Gradient(Gpu gpu, const CrossEntropyProblem& p, const TensorView& dloss,
                const TensorView& logits, const TensorView& max, const TensorView& log_sum,
                const TensorView& dlogits) {
  return DispatchType<float, half, bf16>("cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    return WithGroups<1024>(
        "cross_entropy/grad", logits.dtype, p,
        [&](auto group, auto capped, unsigned grid, int block) {
          SparseSoftmaxCrossEntropyGradKernel<group, capped, T><<<grid, block, 0, gpu.stream>>>(
              dloss.as<const float>(), p, logits.as<const T>(), max.as<const float>(),
              log_sum.as<const float>(), dlogits.as<T>());
        });
  });
}

}  // namespace

Status SparseSoftmaxCrossEntropy(Gpu gpu, TensorView labels, TensorView logits,
                                 bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                                 float z_loss, float soft_cap, TensorView loss, TensorView max,
                                 TensorView log_sum) {
  CrossEntropyProblem p;
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               z_loss, soft_cap, {&loss, &max, &log_sum}, &p);
      !s.ok() || p.tokens == 0) {
    return s;
  }
  return DispatchType<float, half, bf16>("sparse_softmax_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    return WithGroups<1024>(
        "cross_entropy/forward", logits.dtype, p,
        [&](auto group, auto capped, unsigned grid, int block) {
          SparseSoftmaxCrossEntropyKernel<group, capped><<<grid, block, 0, gpu.stream>>>(
              p, logits.as<const T>(),
              WriteLoss{loss.as<float>(), max.as<float>(), log_sum.as<float>()});
        });
  });
}

Status SparseSoftmaxCrossEntropyGrad(Gpu gpu, TensorView dloss, TensorView labels,
                                     TensorView logits, TensorView max, TensorView log_sum,
                                     bool has_ignore_class, int64_t ignore_class,
                                     float label_smoothing, float z_loss, float soft_cap,
                                     TensorView dlogits) {
  CrossEntropyProblem p;
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               z_loss, soft_cap, {&dloss, &max, &log_sum}, &p);
      !s.ok() || p.tokens == 0) {
    return s;
  }
  if (!dlogits.SameShapeAndDType(logits)) {
    return InvalidArgument("sparse_softmax_cross_entropy: dlogits must be as logits");
  }
  return Gradient(gpu, p, dloss, logits, max, log_sum, dlogits);
}

Status LinearCrossEntropy(Gpu gpu, TensorView labels, TensorView logits, TensorView span,
                          TensorView sums, bool has_ignore_class, int64_t ignore_class,
                          float label_smoothing, float soft_cap, TensorView new_sums) {
  CrossEntropyProblem p;
  if (Status s = DescribeBlockSums(labels, logits, span, sums, has_ignore_class, ignore_class,
                                   label_smoothing, soft_cap, new_sums, &p);
      !s.ok() || p.tokens == 0) {
    return s;
  }
  return DispatchType<float, half, bf16>("linear_cross_entropy", logits.dtype, [&](auto t) {
    using T = decltype(t);
    // Blocks are narrow, and adding them takes registers that 1024 threads do not have.
    return WithGroups<256>(
        "cross_entropy/block_sums", logits.dtype, p,
        [&](auto group, auto capped, unsigned grid, int block) {
          SparseSoftmaxCrossEntropyKernel<group, capped><<<grid, block, 0, gpu.stream>>>(
              p, logits.as<const T>(),
              AddBlock{sums.as<const BlockSums>(), new_sums.as<BlockSums>()});
        });
  });
}

Status LinearCrossEntropyGrad(Gpu gpu, TensorView dloss, TensorView labels, TensorView logits,
                              TensorView span, TensorView max, TensorView log_sum,
                              bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                              float z_loss, float soft_cap, TensorView dlogits) {
  CrossEntropyProblem p;
  if (Status s = DescribeBlockGrad(dloss, labels, logits, span, max, log_sum, has_ignore_class,
                                   ignore_class, label_smoothing, z_loss, soft_cap, dlogits, &p);
      !s.ok() || p.tokens == 0) {
    return s;
  }
  return Gradient(gpu, p, dloss, logits, max, log_sum, dlogits);
}

}  // namespace tf_ops
