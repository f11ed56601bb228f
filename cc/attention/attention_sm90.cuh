// SPDX-License-Identifier: Apache-2.0
// What the forward and backward kernels for sm_90a share.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cc/attention/attention_gpu.h"
#include "cc/attention/attention_sm90.h"
#include "cc/common/hopper.cuh"

namespace tf_ops {

// How many heads to work on at a time: as many as leave half of an H100's L2 of 50 MB free.
inline int HeadsPerGroup(int64_t bytes_per_head, int64_t heads) {
  const int64_t fit = (int64_t{24} << 20) / std::max<int64_t>(bytes_per_head, 1);
  return int(std::min(std::max<int64_t>(fit, 1), heads));
}

constexpr float kLog2E = 1.44269504f;

// How many queries and keys of a batch row are valid, and how far a query sees.
struct Sm90Visibility {
  int queries, keys;
  int diagonal;  // query i sees the keys below min(keys, i + diagonal)

  __device__ Sm90Visibility(const AttentionProblem& p, int batch) {
    const auto length = [&](const int32_t* lengths, int size) {
      return lengths ? min(max(lengths[batch], 0), size) : size;
    };
    queries = length(p.query_seq_lengths, int(p.seq_q));
    keys = length(p.key_value_seq_lengths, int(p.seq_k));
    diagonal = !p.is_causal ? keys : p.bottom_right ? keys - queries + 1 : 1;
  }
  __device__ int Limit(int query) const { return min(keys, query + diagonal); }
};

// The tiles of one block. Every other round goes backwards through the blocks, so that no block
// always has the longest tile of a round.
struct TileSchedule {
  int round = 0;
  __device__ __forceinline__ int Next() {
    const int blocks = gridDim.x, block = blockIdx.x;
    const int index = round * blocks + (round % 2 ? blocks - 1 - block : block);
    ++round;
    return index;
  }
};

// The stage of the ring that comes next, and the parity of its phase.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  template <int kStages>
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ bool SeesOneKey(float delta) {
  return __float_as_uint(delta) == kOneKeyDelta;
}

template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Copies `rows` rows of one head, kDim columns wide, into swizzled panels; `full` expects them.
template <int kDim, typename T>
__device__ __forceinline__ void LoadPanels(T* to, int rows, const CUtensorMap& map, uint64_t* full,
                                           int head, int first_row, int batch) {
#pragma unroll
  for (int panel = 0; panel < kDim / kPanelCols; ++panel) {
    TmaLoad(to + panel * rows * kPanelCols, map, full, panel * kPanelCols, head, first_row, batch);
  }
}

// The other way, 64 rows of a tile that has `rows`.
template <int kDim, typename T>
__device__ __forceinline__ void StorePanels(const CUtensorMap& map, const T* from, int rows,
                                            int head, int first_row, int batch) {
#pragma unroll
  for (int panel = 0; panel < kDim / kPanelCols; ++panel) {
    TmaStore(map, from + panel * rows * kPanelCols, panel * kPanelCols, head, first_row, batch);
  }
}

// Zeroes up to 64 rows of one head of a [batch, size, heads, dim] tensor, by 128 threads.
template <typename T>
__device__ __forceinline__ void ZeroRows(void* tensor, int64_t batch, int64_t size, int64_t heads,
                                         int64_t dim, int head, int first_row) {
  for (int row = first_row; row < min(first_row + 64, int(size)); ++row) {
    T* to = static_cast<T*>(tensor) + ((batch * size + row) * heads + head) * dim;
    for (int i = threadIdx.x % 128; i < dim; i += 128) to[i] = T(0.0f);
  }
}

// 0 times NaN is NaN: a value that some rows of a product do not see must not be NaN or Inf when
// the product is formed. Zeroes such entries of a tile in shared memory, and notes for each column
// the row that most see: the first, or the last where !kFirst, among the first valid_rows, which
// had +Inf, in nearest[0], and -Inf, in nearest[1]; NaN counts as both. All kThreads consumer
// threads call it; all are told whether any was found.
template <bool kFirst>
constexpr int kNoRow = kFirst ? INT_MAX : -1;

template <int kRows, int kDim, int kThreads, bool kFirst, typename T>
__device__ __forceinline__ bool ClearNonFinite(T* tile, int (&nearest)[2][kDim], int valid_rows) {
  constexpr uint32_t kExponents = std::is_same_v<T, bf16> ? 0x7f807f80 : 0x7c007c00;
  constexpr uint32_t kLowestBits = std::is_same_v<T, bf16> ? 0x00800080 : 0x04000400;
  const auto overflows = [](uint32_t pair) {  // sign bits of those whose exponent is all ones
    return ((pair & kExponents) + kLowestBits) & 0x80008000;
  };
  bool found = false;
#pragma unroll 4
  for (int i = threadIdx.x - 128; i < kRows * kDim / 8; i += kThreads) {
    uint4* const chunk = reinterpret_cast<uint4*>(tile) + i;
    const uint4 x = *chunk;
    if (!(overflows(x.x) | overflows(x.y) | overflows(x.z) | overflows(x.w))) continue;
    found = true;
    const int row = i / 8 % kRows, column = i / 8 / kRows * kPanelCols + (i % 8 ^ row % 8) * 8;
    T* const entries = reinterpret_cast<T*>(chunk);
#pragma unroll 1
    for (int c = 0; c < 8; ++c) {
      const float entry = float(entries[c]);
      if (fabsf(entry) <= 3.4e38f) continue;
      entries[c] = T(0.0f);
      for (int sign = 0; sign < 2; ++sign) {
        if (row >= valid_rows || entry == (sign ? INFINITY : -INFINITY)) continue;
        int* const to = &nearest[sign][column + c];
        kFirst ? atomicMin(to, row) : atomicMax(to, row);
      }
    }
  }
  if (found) FenceAsyncProxy();
  return NamedBarrierOr(8, kThreads, found);
}

// Adds them to the results of the rows that see them: sees(r, nearest) of the thread's row r.
template <int kDim, int kThreads, bool kFirst, typename Sees>
__device__ __forceinline__ void SpreadNonFinite(float (&d)[kDim / 2], int (&nearest)[2][kDim],
                                                Sees sees) {
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    for (int sign = 0; sign < 2; ++sign) {
      const int row = nearest[sign][i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2];
      if (row != kNoRow<kFirst> && sees(i / 2 % 2, row)) d[i] += sign ? -INFINITY : INFINITY;
    }
  }
  NamedBarrierSync(8, kThreads);
  for (int i = threadIdx.x - 128; i < 2 * kDim; i += kThreads) {
    nearest[i / kDim][i % kDim] = kNoRow<kFirst>;
  }
  NamedBarrierSync(8, kThreads);
}

// At the start of a kernel.
template <bool kFirst, int kDim>
__device__ __forceinline__ void ForgetNonFinite(int (&nearest)[2][kDim]) {
  if (threadIdx.x < kDim) nearest[0][threadIdx.x] = nearest[1][threadIdx.x] = kNoRow<kFirst>;
}

// Writes an accumulator of 64 x kDim to `rows`, the thread's first row of panels that have
// `panel_bytes` each, in their swizzle.
template <typename T, int kDim>
__device__ __forceinline__ void WritePanels(const float (&d)[kDim / 2], char* rows, int panel_bytes,
                                            int lane) {
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int group = i / 2, below = i % 2;  // eight columns; the row, or the one 8 below
    const int swizzled = (group % 8 ^ lane / 4) * 16 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(rows + group / 8 * panel_bytes + below * 8 * kPanelRowBytes +
                                 swizzled) = Pack<T>(d[2 * i], d[2 * i + 1]);
  }
  FenceAsyncProxy();
}

// The accumulator of a product, as the A operand of the next one.
template <typename T, int kSize>
__device__ __forceinline__ void PackOperand(const float (&d)[kSize], uint32_t (&a)[kSize / 8][4]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) a[i / 4][i % 4] = Pack<T>(d[2 * i], d[2 * i + 1]);
}

}  // namespace tf_ops
