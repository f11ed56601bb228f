// SPDX-License-Identifier: Apache-2.0
// What the forward and backward kernels for sm_90a share.
#pragma once

#include <algorithm>
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

// Which keys of a batch row the mask shows, where it is the same for all heads and queries.
struct Sm90KeyMask {
  int from, to;  // the first, and the one after the last
  int holes;     // whether it hides some between them
};

// Of all batch rows. Without a mask, null.
struct Sm90KeyMasks {
  const Sm90KeyMask* rows;
  const uint32_t* bits;  // [batch, words], a bit for each key
  int words;
};

// Whether a query sees all the keys up to one that depends on the query, as it does without a mask
// and a window to the left. Kernels of such problems, kPrefix, are compiled apart: what the others
// ask for costs them registers.
inline bool SeesPrefixes(const AttentionProblem& p) { return !p.mask && p.window_left < 0; }

// How many queries and keys of a batch row are valid, and which of them a query sees.
struct Sm90Visibility {
  int queries, keys;
  int first, end;        // query i sees the keys from i + first on, those before i + end
  int from;              // and none before this one
  const uint32_t* bits;  // null, or a bit for each key: whether the mask shows it

  __device__ Sm90Visibility(const AttentionProblem& p, const Sm90KeyMasks& masks, int batch)
      : from(0), bits(nullptr) {
    const auto length = [&](const int32_t* lengths, int size) {
      return lengths ? min(max(lengths[batch], 0), size) : size;
    };
    constexpr int kUnbounded = 1 << 30;  // sequences are of at most 2^29
    queries = length(p.query_seq_lengths, int(p.seq_q));
    keys = length(p.key_value_seq_lengths, int(p.seq_k));
    const int offset = p.bottom_right ? keys - queries : 0;
    first = p.window_left < 0 ? -kUnbounded : offset - int(p.window_left);
    end = p.window_right < 0 ? kUnbounded : offset + int(p.window_right) + 1;
    if (masks.rows) {
      const Sm90KeyMask mask = masks.rows[batch];
      keys = min(keys, mask.to);
      from = mask.from;
      if (mask.holes) bits = masks.bits + int64_t{batch} * masks.words;
    }
  }
  // A query sees keys of [KeyBegin, KeyEnd) only; a key is seen by queries of [QueryBegin,
  // QueryEnd) only.
  template <bool kPrefix>
  __device__ int KeyBegin(int query) const {
    return kPrefix ? 0 : max(from, query + first);
  }
  __device__ int KeyEnd(int query) const { return min(keys, query + end); }
  __device__ int QueryBegin(int key) const { return max(0, key - end + 1); }
  template <bool kPrefix>
  __device__ int QueryEnd(int key) const {
    return kPrefix ? queries : min(queries, key - first + 1);
  }
  __device__ bool HasBit(int key) const { return bits[key / 32] >> key % 32 & 1; }
  template <bool kPrefix>
  __device__ bool Sees(int query, int key) const {
    return query < queries && key >= KeyBegin<kPrefix>(query) && key < KeyEnd(query) &&
           (kPrefix || !bits || HasBit(key));
  }
  __device__ bool SeesOneKey(int query) const {
    const int begin = KeyBegin<false>(query), key_end = KeyEnd(query);
    if (!bits) return key_end - begin == 1;
    int seen = 0;
    for (int word = begin / 32; word * 32 < key_end && seen < 2; ++word) {
      uint32_t shown = bits[word];
      if (word * 32 < begin) shown &= ~0u << begin % 32;
      if (word * 32 + 32 > key_end) shown &= ~(~0u << key_end % 32);
      seen += __popc(shown);
    }
    return seen == 1;
  }
  // The keys [AllSeeFrom, AllSeeTo) are seen by all queries from the first to the last.
  template <bool kPrefix>
  __device__ int AllSeeFrom(int last_query) const {
    return KeyBegin<kPrefix>(last_query);
  }
  template <bool kPrefix>
  __device__ int AllSeeTo(int first_query, int last_query) const {
    return last_query < queries && (kPrefix || !bits) ? KeyEnd(first_query) : 0;
  }
  // The first query to see all keys from the first to the last.
  template <bool kPrefix>
  __device__ int AllSeenFrom(int first_key, int last_key) const {
    const bool shown =
        last_key < keys &&
        (kPrefix || (first_key >= from && (!bits || (first_key == last_key && HasBit(last_key)))));
    return shown ? QueryBegin(last_key) : queries;
  }
};

// The tile that a consumer warp works on, in shared memory: its registers are for the products.
template <typename Tile>
__device__ __forceinline__ const Tile& KeepTile(Tile& of_warp, const Tile& tile) {
  __syncwarp();  // all lanes are done with the last one
  if (threadIdx.x % 32 == 0) of_warp = tile;
  __syncwarp();
  return of_warp;
}

// Finds the Sm90KeyMask and the bits of each batch row, by a block each.
static __global__ void __launch_bounds__(1024)
    KeyMaskSm90Kernel(const __grid_constant__ AttentionProblem p, Sm90KeyMask* rows, uint32_t* bits,
                      int words) {
  const int batch = blockIdx.x, lane = threadIdx.x % 32;
  const bool* mask = p.mask + batch * p.mask_strides[0];
  __shared__ int from, to, count;
  if (threadIdx.x == 0) from = int(p.seq_k), to = 0, count = 0;
  __syncthreads();
  for (int word = threadIdx.x / 32; word < words; word += 32) {
    const int64_t key = int64_t{word} * 32 + lane;
    const uint32_t shown =
        __ballot_sync(0xffffffff, key < p.seq_k && mask[key * p.mask_strides[3]]);
    if (lane != 0) continue;
    bits[int64_t{batch} * words + word] = shown;
    if (!shown) continue;
    atomicMin(&from, word * 32 + __ffs(shown) - 1);
    atomicMax(&to, word * 32 + 32 - __clz(shown));
    atomicAdd(&count, __popc(shown));
  }
  __syncthreads();
  if (threadIdx.x == 0) rows[batch] = {from, to, count < to - from};
}

// Fills `memory`, of Sm90KeyMaskBytes.
inline Status MakeKeyMasks(Gpu gpu, const AttentionProblem& p, char* memory, Sm90KeyMasks* masks) {
  *masks = {};
  if (!p.mask) return Ok();
  auto* const rows = reinterpret_cast<Sm90KeyMask*>(memory);
  auto* const bits = reinterpret_cast<uint32_t*>(memory + AlignedBytes(p.batch * sizeof *rows));
  *masks = {rows, bits, int(Sm90MaskWords(p.seq_k))};
  KeyMaskSm90Kernel<<<unsigned(p.batch), 1024, 0, gpu.stream>>>(p, rows, bits, masks->words);
  return CudaStatus();
}

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

template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t packed) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
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

// Zeroes up to `rows` rows of one head of a [batch, size, heads, dim] tensor, by 64 threads.
template <typename T>
__device__ __forceinline__ void ZeroRows(void* tensor, int64_t batch, int64_t size, int64_t heads,
                                         int64_t dim, int head, int first_row, int rows) {
  for (int row = first_row; row < min(first_row + rows, int(size)); ++row) {
    T* to = static_cast<T*>(tensor) + ((batch * size + row) * heads + head) * dim;
    for (int i = threadIdx.x % 64; i < dim; i += 64) to[i] = T(0.0f);
  }
}

// 0 times NaN is NaN: a value that some rows of a product do not see must not be NaN or Inf when
// the product is formed. Zeroes such entries of a tile in shared memory, and notes the rows among
// the first valid_rows that had some: a bit each in `found`. All kThreads consumer threads call it;
// all are told whether there was any.
constexpr int kClearBarrier = 8;  // the named barrier for it

template <int kRows>
using RowBits = uint32_t[(kRows + 31) / 32];

template <int kRows, int kDim, int kThreads, typename T>
__device__ __forceinline__ bool ClearNonFinite(T* tile, RowBits<kRows>& found, int valid_rows) {
  constexpr uint32_t kExponents = std::is_same_v<T, bf16> ? 0x7f807f80 : 0x7c007c00;
  constexpr uint32_t kLowestBits = std::is_same_v<T, bf16> ? 0x00800080 : 0x04000400;
  const auto overflows = [](uint32_t pair) {  // sign bits of those whose exponent is all ones
    return ((pair & kExponents) + kLowestBits) & 0x80008000;
  };
  bool any = false;
#pragma unroll 4
  for (int i = threadIdx.x - 128; i < kRows * kDim / 8; i += kThreads) {
    uint4* const chunk = reinterpret_cast<uint4*>(tile) + i;
    const uint4 x = *chunk;
    if (!(overflows(x.x) | overflows(x.y) | overflows(x.z) | overflows(x.w))) continue;
    any = true;
    const int row = i / 8 % kRows;
    if (row < valid_rows) atomicOr(&found[row / 32], 1u << row % 32);
    T* const entries = reinterpret_cast<T*>(chunk);
#pragma unroll 1
    for (int c = 0; c < 8; ++c) {
      if (!(fabsf(float(entries[c])) <= 3.4e38f)) entries[c] = T(0.0f);
    }
  }
  if (any) FenceAsyncProxy();
  return NamedBarrierOr(kClearBarrier, kThreads, any);
}

// Adds what was cleared to the results of the rows that see it: sees(r, row) of the thread's row
// r. It is read again from memory, where `tensor` is [batch, size, heads, dim] and the tile starts
// at first_row: this is rare, and may be slow. The kThreads threads that call it meet at `barrier`.
template <int kRows, int kDim, int kThreads, typename T, typename Sees>
__device__ __forceinline__ void SpreadNonFinite(float (&d)[kDim / 2], RowBits<kRows>& found,
                                                const void* tensor, int64_t batch, int64_t size,
                                                int64_t heads, int64_t dim, int head, int first_row,
                                                int barrier, Sees sees) {
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    if (!(found[row / 32] >> row % 32 & 1)) continue;
    const T* const from =
        static_cast<const T*>(tensor) + ((batch * size + first_row + row) * heads + head) * dim;
    const bool seen[2] = {sees(0, row), sees(1, row)};
#pragma unroll
    for (int i = 0; i < kDim / 2; i += 4) {
      const int column = i * 2 + threadIdx.x % 4 * 2;
      uint32_t pair = 0;
      if (column < dim) pair = *reinterpret_cast<const uint32_t*>(from + column);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = n ? Unpack<T>(pair).y : Unpack<T>(pair).x;
        const float added = fabsf(x) <= 3.4e38f ? 0.0f : x;
        d[i + n] += seen[0] ? added : 0.0f;
        d[i + 2 + n] += seen[1] ? added : 0.0f;
      }
    }
  }
  NamedBarrierSync(barrier, kThreads);
  const int thread = (threadIdx.x - 128) % kThreads;
  if (thread < int(sizeof found / sizeof found[0])) found[thread] = 0;
  NamedBarrierSync(barrier, kThreads);
}

// At the start of a kernel.
template <int kWords>
__device__ __forceinline__ void ForgetRows(uint32_t (&found)[kWords]) {
  if (threadIdx.x < kWords) found[threadIdx.x] = 0;
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
