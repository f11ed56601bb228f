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

// 16 bytes are taken as words: element by element, the compiler makes eight loads of one from
// shared memory.
template <typename T, int kVec>
__device__ void Unpack(const Raw<T, kVec>& raw, float (&out)[kVec]) {
  if constexpr (sizeof(raw) == 16) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, bf16>) {
        out[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
      } else {
        out[i] = __half2float(__ushort_as_half(words[i / 2] >> 16 * (i % 2)));
      }
    }
  } else {
    out[0] = float(*reinterpret_cast<const T*>(&raw));
  }
}

template <typename T, int kVec>
__device__ Raw<T, kVec> Pack(const float (&in)[kVec]) {
  Raw<T, kVec> raw;
  T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = T(in[i]);
  return raw;
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
