// SPDX-License-Identifier: Apache-2.0
// The sums of the gradients; what a block's logits give is in cross_entropy.cu.
#include <algorithm>

#include "cc/common/cuda.cuh"
#include "cc/cross_entropy/linear_cross_entropy.h"

namespace tf_ops {
namespace {

constexpr int kThreads = 256;

// As many blocks as keep the GPU busy; each thread takes several items.
unsigned Grid(int64_t items) {
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  return std::clamp<int64_t>(blocks, 1, 16 * CurrentDevice().multiprocessors);
}

// kSize elements by one instruction, where their addresses allow it.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T x[kSize];
};

template <typename... Pointers>
bool Aligned(int64_t size, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % size == 0) && ...);
}

// A pack to a thread. No __restrict__: the results may be where the sum is. Sum is float, or
// uint16_t for the bits of a bfloat16 with its rest.
template <typename Sum, typename T, int kSize>
__global__ void __launch_bounds__(kThreads)
    LinearCrossEntropyHiddenGradKernel(const Sum* sum, const int16_t* rest, const T* addend,
                                       int64_t packs, Sum* new_sum, int16_t* new_rest) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= packs) return;
  auto s = reinterpret_cast<const Pack<Sum, kSize>*>(sum)[i];
  const auto a = reinterpret_cast<const Pack<T, kSize>*>(addend)[i];
  if constexpr (std::is_same_v<Sum, float>) {
#pragma unroll
    for (int e = 0; e < kSize; ++e) s.x[e] += float(a.x[e]);
  } else {
    auto r = reinterpret_cast<const Pack<int16_t, kSize>*>(rest)[i];
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const float value = __uint_as_float((uint32_t{s.x[e]} << 16) + r.x[e]) + float(a.x[e]);
      const uint32_t bits = isnan(value) ? 0x7fc00000 : __float_as_uint(value);
      s.x[e] = (bits + 0x8000) >> 16;
      r.x[e] = bits - (uint32_t{s.x[e]} << 16);
    }
    reinterpret_cast<Pack<int16_t, kSize>*>(new_rest)[i] = r;
  }
  reinterpret_cast<Pack<Sum, kSize>*>(new_sum)[i] = s;
}

// Packs of the block go to their rows of `whole`. Their size divides those of the rows, but where
// in a row they start is known here only.
template <typename From, typename To, int kSize>
__global__ void __launch_bounds__(kThreads)
    LinearCrossEntropyKernelGradKernel(const From* block, const int64_t* span, KernelGradProblem p,
                                       To* whole) {
  const int64_t first = span[0] * p.unit, stride = int64_t{kThreads} * gridDim.x;
  if (span[0] < 0 || span[0] > p.last) return;
  const bool aligned = first % kSize == 0;
  const int64_t packs_per_row = p.width / kSize, packs = p.rows * packs_per_row;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < packs; i += stride) {
    // Divisions of 64 bits are slow.
    const int64_t row =
        packs <= INT32_MAX ? uint32_t(i) / uint32_t(packs_per_row) : i / packs_per_row;
    const int64_t pack = i - row * packs_per_row;
    const auto in = reinterpret_cast<const Pack<From, kSize>*>(block)[i];
    Pack<To, kSize> out;
#pragma unroll
    for (int e = 0; e < kSize; ++e) out.x[e] = To(float(in.x[e]));
    To* target = whole + row * p.cols + first + pack * kSize;
    if (aligned) {
      *reinterpret_cast<Pack<To, kSize>*>(target) = out;
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) target[e] = out.x[e];
    }
  }
}

}  // namespace

Status LinearCrossEntropyHiddenGrad(Gpu gpu, TensorView sum, TensorView rest, TensorView addend,
                                    TensorView new_sum, TensorView new_rest) {
  if (Status s = CheckHiddenGrad(sum, rest, addend, new_sum, new_rest);
      !s.ok() || sum.size() == 0) {
    return s;
  }
  return DispatchType<float, half, bf16>("linear_cross_entropy", addend.dtype, [&](auto t) {
    using T = decltype(t);
    const auto launch = [&](auto of_sum, auto size) {
      using Sum = decltype(of_sum);
      const int64_t packs = sum.size() / size, blocks = (packs - 1) / kThreads + 1;
      LinearCrossEntropyHiddenGradKernel<Sum, T, size><<<blocks, kThreads, 0, gpu.stream>>>(
          sum.as<const Sum>(), rest.as<const int16_t>(), addend.as<const T>(), packs,
          new_sum.as<Sum>(), new_rest.as<int16_t>());
      return CudaStatus();
    };
    const auto with = [&](auto of_sum) {
      constexpr int kSize = 16 / sizeof(of_sum);
      const bool whole = sum.size() % kSize == 0 && Aligned(16, sum.data, new_sum.data) &&
                         Aligned(2 * kSize, rest.data, new_rest.data) &&
                         Aligned(kSize * sizeof(T), addend.data);
      return whole ? launch(of_sum, std::integral_constant<int, kSize>{})
                   : launch(of_sum, std::integral_constant<int, 1>{});
    };
    return sum.dtype == DType::kFloat32 ? with(0.0f) : with(uint16_t{0});
  });
}

Status LinearCrossEntropyKernelGrad(Gpu gpu, TensorView whole, TensorView block, TensorView span,
                                    bool transpose_kernel, TensorView new_whole) {
  KernelGradProblem p;
  if (Status s = DescribeKernelGrad(whole, block, span, transpose_kernel, new_whole, &p); !s.ok()) {
    return s;
  }
  if (new_whole.data != whole.data && whole.bytes() > 0) {
    cudaMemcpyAsync(new_whole.data, whole.data, whole.bytes(), cudaMemcpyDeviceToDevice,
                    gpu.stream);
  }
  if (block.size() == 0) return CudaStatus();
  return DispatchType<float, half, bf16>("linear_cross_entropy", whole.dtype, [&](auto to) {
    using To = decltype(to);
    return DispatchType<float, half, bf16>("linear_cross_entropy", block.dtype, [&](auto from) {
      using From = decltype(from);
      const auto launch = [&](auto size) {
        LinearCrossEntropyKernelGradKernel<From, To, size>
            <<<Grid(block.size() / size), kThreads, 0, gpu.stream>>>(
                block.as<const From>(), span.as<const int64_t>(), p, new_whole.as<To>());
        return CudaStatus();
      };
      constexpr int kSize = 16 / sizeof(To);
      const bool packed = p.width % kSize == 0 && p.cols % kSize == 0 &&
                          Aligned(kSize * sizeof(From), block.data) && Aligned(16, new_whole.data);
      return packed ? launch(std::integral_constant<int, kSize>{})
                    : launch(std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace tf_ops
