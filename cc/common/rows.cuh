// SPDX-License-Identifier: Apache-2.0
// Kernels over rows: vectors, sums over a row, and how many threads take a row.
#pragma once

#include <initializer_list>

#include "cc/common/cuda.cuh"

namespace tf_ops {

template <int kBytes>
struct RawBytes;
template <>
struct RawBytes<16> {
  using Type = uint4;
};
template <>
struct RawBytes<4> {
  using Type = uint32_t;
};
template <>
struct RawBytes<2> {
  using Type = uint16_t;
};
// kVec elements of T as they lie in memory: 16 bytes, or one element.
template <typename T, int kVec>
using Raw = typename RawBytes<kVec * sizeof(T)>::Type;

template <typename T, int kVec>
__device__ void Unpack(const Raw<T, kVec>& raw, float (&out)[kVec]) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVec; ++i) out[i] = float(elements[i]);
}

template <typename T, int kVec>
__device__ Raw<T, kVec> Pack(const float (&in)[kVec]) {
  Raw<T, kVec> raw;
  T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = T(in[i]);
  return raw;
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
