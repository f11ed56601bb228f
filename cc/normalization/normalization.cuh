// SPDX-License-Identifier: Apache-2.0
// What the forward and the gradient kernels share: vectors, sums over a row, and the choice of
// how many threads take a row.
#pragma once

#include "cc/common/cuda.cuh"
#include "cc/common/rows.cuh"
#include "cc/normalization/normalization.h"

namespace tf_ops {

// Vector number `at` of weights, which are of type T or float. They stay in L1: every row of a
// group takes the same ones.
template <typename T, int kVec>
__device__ void LoadWeights(const void* weights, bool is_float, int64_t at, float (&out)[kVec]) {
  if (!is_float) {
    Unpack<T, kVec>(__ldg(static_cast<const Raw<T, kVec>*>(weights) + at), out);
  } else if constexpr (kVec % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 v = __ldg(static_cast<const float4*>(weights) + at * (kVec / 4) + i / 4);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  } else {
    out[0] = __ldg(static_cast<const float*>(weights) + at);
  }
}

// The row of the weights that a row takes. Divisions of 64 bits are slow.
__device__ inline int64_t GroupOf(const NormalizationProblem& p, int64_t row) {
  if (p.groups == 1) return 0;
  if (p.rows <= INT32_MAX) return static_cast<uint32_t>(row) % static_cast<uint32_t>(p.groups);
  return row % p.groups;
}

// The sum of kCount floats of shared memory, the same order for every thread.
template <int kCount>
__device__ float SumShared(const float* values) {
  float sum = 0.0f;
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(values + i);
      sum += (v.x + v.y) + (v.z + v.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += values[i];
  }
  return sum;
}

// What SumOverRow keeps of each warp; calls alternate between the halves, so that one barrier a
// call is enough.
template <int kValues, int kCount = 32>
struct alignas(16) WarpSums {
  float values[2][kValues][kCount];
};

// Adds up each value[i] over the kThreads threads of a row, of which the block has kRows; they get
// all the sums. With more than a warp to a row all of its threads call this together.
template <int kThreads, int kRows = 1, int kValues>
__device__ void SumOverRow(float (&value)[kValues], WarpSums<kValues>& warps, int& half) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
#pragma unroll
    for (int offset = (kThreads < 32 ? kThreads : 32) / 2; offset > 0; offset /= 2) {
      value[i] += __shfl_xor_sync(0xffffffff, value[i], offset);
    }
  }
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    const int row = threadIdx.x / kThreads;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) warps.values[half][i][threadIdx.x / 32] = value[i];
    }
    if constexpr (kRows == 1) {
      __syncthreads();
    } else {  // barrier 0 is the whole block's
      asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "n"(kThreads) : "memory");
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      value[i] = SumShared<kWarps>(&warps.values[half][i][row * kWarps]);
    }
    half ^= 1;
  }
}

// Calls f(T{}, std::bool_constant<subtract_mean>{}, std::integral_constant<int, kVec>{}): vectors
// of 16 bytes where all of `pointers` and the rows allow it, else single elements.
template <typename F>
Status DispatchVectors(const NormalizationProblem& p, std::initializer_list<const void*> pointers,
                       F&& f) {
  return DispatchType<float, half, bf16>("normalization", p.dtype, [&](auto t) {
    constexpr int kVec = 16 / sizeof(t);
    bool aligned = p.cols % kVec == 0;
    for (const void* pointer : pointers) aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    const auto with_mean = [&](auto mean) {
      return aligned ? f(t, mean, std::integral_constant<int, kVec>{})
                     : f(t, mean, std::integral_constant<int, 1>{});
    };
    return p.subtract_mean ? with_mean(std::true_type{}) : with_mean(std::false_type{});
  });
}

// A row is taken by kThreads threads of each of kBlocks blocks. A thread holds kChunks vectors of
// it, of its block's kThreads * kChunks: vector lane + chunk * kThreads.
template <int kThreads, int kChunks, int kBlocks = 1>
struct RowLayout {
  static constexpr int kThreadsPerRow = kThreads, kChunksPerThread = kChunks;
  static constexpr int kBlocksPerRow = kBlocks, kVectors = kBlocks * kThreads * kChunks;
};

// Calls f(layout) with the Layouts that hold a row, until one returns true: it has launched.
template <typename... Layouts, typename F>
bool DispatchLayout(int64_t vectors, F&& f) {
  return ((vectors <= Layouts::kVectors && f(Layouts{})) || ...);
}

}  // namespace tf_ops
