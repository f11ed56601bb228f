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

// Adds up each value[i] over the kThreads threads of a row, which get all the sums. With more
// than a warp to a row the whole block is one row and all of it calls this together; calls
// alternate between two halves of `partial`, so that one barrier is enough.
template <int kThreads, int kValues>
__device__ void SumOverRow(float (&value)[kValues], float (&partial)[2][kValues][32], int& half) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
#pragma unroll
    for (int offset = (kThreads < 32 ? kThreads : 32) / 2; offset > 0; offset /= 2) {
      value[i] += __shfl_xor_sync(0xffffffff, value[i], offset);
    }
  }
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (lane == 0) partial[half][i][threadIdx.x / 32] = value[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      value[i] = partial[half][i][lane % kWarps];
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2) {
        value[i] += __shfl_xor_sync(0xffffffff, value[i], offset);
      }
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

// A row is taken by kThreads threads, each of which holds kChunks vectors of it: vector
// lane + chunk * kThreads.
template <int kThreads, int kChunks>
struct RowLayout {
  static constexpr int kThreadsPerRow = kThreads, kChunksPerThread = kChunks;
  static constexpr int kVectors = kThreads * kChunks;
};

// Calls f(layout) with the Layouts that hold a row, until one returns true: it has launched.
template <typename... Layouts, typename F>
bool DispatchLayout(int64_t vectors, F&& f) {
  return ((vectors <= Layouts::kVectors && f(Layouts{})) || ...);
}

}  // namespace tf_ops
