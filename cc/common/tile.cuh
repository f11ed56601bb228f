// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit tiles in shared memory by a warp, and what moves the tiles (mma.cuh).
#pragma once

#include "cc/common/mma.cuh"

namespace tf_ops {

template <int kDim>
__device__ constexpr int Swizzled(int row, int chunk) {
  return row * kDim + (chunk ^ (row & 7)) * 8;
}

template <typename T>
__device__ uint32_t Pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, 4);
  }
  return bits;
}

template <typename T>
__device__ float Unpack(uint32_t bits, int i) {
  const uint16_t half_bits = i ? bits >> 16 : bits & 0xffff;
  T value;
  memcpy(&value, &half_bits, 2);
  return float(value);
}

// x, of which the compiler knows nothing: what a rarely taken branch derives from it is computed
// there, instead of being kept in registers from outside the loop.
__device__ inline int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// f(i, j, e) of each element of a kM x kN fragment.
template <int kM, int kN, typename F>
__device__ void ForEachElement(const F& f) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(i, j, e);
    }
  }
}

// The first `rows` rows of `from`, `stride` elements apart and `dim` long, to a tile of kRows x
// kDim; zeros beyond. `aligned`: every row is 16-byte aligned. Follow with WaitForCopies.
template <int kRows, int kDim, int kThreads, typename T>
__device__ void LoadTile(T* tile, const T* from, int64_t stride, int dim, int rows, bool aligned) {
  constexpr int kChunks = kDim / 8, kCopies = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0);
  static_assert(kThreads % kChunks == 0);
  if (aligned) {
    constexpr int kStep = kThreads / kChunks;  // rows between two copies of a thread
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    if (chunk * 8 >= dim) rows = 0;
    const T* at = from + row * stride + chunk * 8;
    const uint32_t to = SharedAddress(tile + Swizzled<kDim>(row, chunk));
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const bool valid = row + n * kStep < rows;
      // `row` is below kStep: the rows' low bits, which permute the chunks, do not carry.
      const uint32_t permuted = to ^ (n * kStep % 8 * 16);
      CopyAsync<16>(permuted + n * kStep * kDim * 2, valid ? at : from, valid);
      at += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int n = threadIdx.x; n < kRows * kChunks; n += kThreads) {
    const int row = n / kChunks, chunk = n % kChunks;
    T values[8];
    for (int i = 0; i < 8; ++i) {
      const bool valid = row < rows && chunk * 8 + i < dim;
      values[i] = valid ? from[row * stride + chunk * 8 + i] : T(0.0f);
    }
    uint4 bits;
    memcpy(&bits, values, 16);
    *reinterpret_cast<uint4*>(tile + Swizzled<kDim>(row, chunk)) = bits;
  }
}

// c[i][j] += a b^T: a is kM x 16 rows of a tile from `a_row` on, b kN x 8 rows from `b_row` on.
template <typename T, int kDim, int kM, int kN>
__device__ void MultiplyRows(float (&c)[kM][kN][4], const T* a, int a_row, const T* b, int b_row) {
  const int lane = threadIdx.x % 32;
  const uint32_t a_base = SharedAddress(a + Swizzled<kDim>(a_row + lane % 16, lane / 16));
  const uint32_t b_base =
      SharedAddress(b + Swizzled<kDim>(b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    // Flipping bits of the chunk's index is flipping bits of the address.
    const uint32_t a_at = a_base ^ (k * 32), b_at = b_base ^ (k * 32);
    uint32_t fa[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) LoadMatrices(fa[i], a_at + i * 16 * kDim * 2);
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      uint32_t fb[4];
      LoadMatrices(fb, b_at + j * 8 * kDim * 2);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        MultiplyAdd<T>(c[i][j], fa[i], fb[0], fb[1]);
        MultiplyAdd<T>(c[i][j + 1], fa[i], fb[2], fb[3]);
      }
    }
  }
}

// c[i][j] += a b: a in registers, b 16 x kK rows of a tile from `b_row` on.
template <typename T, int kDim, int kM, int kK>
__device__ void MultiplyColumns(float (&c)[kM][kDim / 8][4], const uint32_t (&a)[kM][kK][4],
                                const T* b, int b_row) {
  const int lane = threadIdx.x % 32;
  const uint32_t b_base = SharedAddress(b + Swizzled<kDim>(b_row + lane % 16, lane / 16));
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2) {
      uint32_t fb[4];
      LoadMatricesTransposed(fb, (b_base ^ (j * 16)) + k * 16 * kDim * 2);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        MultiplyAdd<T>(c[i][j], a[i][k], fb[0], fb[1]);
        MultiplyAdd<T>(c[i][j + 1], a[i][k], fb[2], fb[3]);
      }
    }
  }
}

// A product's result as the left operand of the next.
template <typename T, int kM, int kN>
__device__ void PackFragments(uint32_t (&a)[kM][kN / 2][4], const float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      a[i][j / 2][j % 2 * 2] = Pack<T>(c[i][j][0], c[i][j][1]);
      a[i][j / 2][j % 2 * 2 + 1] = Pack<T>(c[i][j][2], c[i][j][3]);
    }
  }
}

template <typename T>
constexpr uint32_t kExponentBits = std::is_same_v<T, half> ? 0x7c00 : 0x7f80;

// Zeroes the Inf and NaN among kRows rows of a tile; whether this thread met one. The block
// must have a barrier before and after.
template <int kRows, int kDim, int kThreads, typename T>
__device__ bool ClearNonFinite(T* rows) {
  bool found = false;
#pragma unroll 1
  for (int n = threadIdx.x; n < kRows * kDim / 8; n += kThreads) {
    uint4& chunk = reinterpret_cast<uint4*>(rows)[n];
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    bool changed = false;
#pragma unroll
    for (uint32_t& word : words) {
      constexpr uint32_t kLow = kExponentBits<T>, kHigh = kLow << 16;
      const uint32_t keep =
          ((word & kLow) == kLow ? 0 : 0xffffu) | ((word & kHigh) == kHigh ? 0 : 0xffff0000u);
      changed |= keep != 0xffffffffu;
      word &= keep;
    }
    if (changed) chunk = make_uint4(words[0], words[1], words[2], words[3]);
    found |= changed;
  }
  return found;
}

// What ClearNonFinite took out of c += a b: a[i][k] b[k][j] of each Inf or NaN b[k][j], where
// visible(row, k). b is read from `from`, `rows` rows of it. Rare, hence slow and small.
template <typename T, int kDim, int kM, int kK, typename Visible>
__device__ void AddNonFinite(float (&c)[kM][kDim / 8][4], const uint32_t (&a)[kM][kK][4],
                             const T* from, int64_t stride, int dim, int rows,
                             const Visible& visible) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 1
  for (int k = 0; k < min(kK * 16, rows); ++k) {
    float weight[kM][2];
    bool sees[kM][2];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kK; ++j) {
          // By masks: conditional loads would put `a` into memory.
          bits |= a[i][j][r] & -uint32_t(k / 8 == j * 2);
          bits |= a[i][j][2 + r] & -uint32_t(k / 8 == j * 2 + 1);
        }
        bits = __shfl_sync(0xffffffff, bits, lane - t + k % 8 / 2);
        weight[i][r] = Unpack<T>(bits, k % 2);
        sees[i][r] = visible(i * 16 + r * 8 + lane / 4, k);
      }
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = j * 8 + t * 2 + e;
        const float value = column < dim ? float(from[k * stride + column]) : 0.0f;
        if (isfinite(value)) continue;
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          if (sees[i][0]) c[i][j][e] += weight[i][0] * value;
          if (sees[i][1]) c[i][j][2 + e] += weight[i][1] * value;
        }
      }
    }
  }
}

// Rows of c to `to`, `stride` elements apart and `dim` long; row r of this warp is left out
// where r >= rows, and is scale[i][half] times c, or 0 where that is 0.
template <typename T, int kM, int kN>
__device__ void StoreRows(const float (&c)[kM][kN][4], const float (&scale)[kM][2], T* to,
                          int64_t stride, int dim, int rows) {
  const int lane = threadIdx.x % 32;
  const bool in_pairs = (reinterpret_cast<uintptr_t>(to) | dim * 2) % 4 == 0;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = i * 16 + r * 8 + lane / 4;
      if (row >= rows) continue;
      T* row_to = to + row * stride;
      const float f = scale[i][r];
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int column = j * 8 + lane % 4 * 2;
        const float x = f == 0.0f ? 0.0f : c[i][j][r * 2] * f;
        const float y = f == 0.0f ? 0.0f : c[i][j][r * 2 + 1] * f;
        if (in_pairs) {
          if (column < dim) *reinterpret_cast<uint32_t*>(row_to + column) = Pack<T>(x, y);
        } else {
          if (column < dim) row_to[column] = T(x);
          if (column + 1 < dim) row_to[column + 1] = T(y);
        }
      }
    }
  }
}

}  // namespace tf_ops
