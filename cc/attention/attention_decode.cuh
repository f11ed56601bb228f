// SPDX-License-Identifier: Apache-2.0
// The kernels of attention_decode.h. What bounds them is memory: enough of it must be on its way
// at any time (about 50 KB on each multiprocessor of an H200), and each key is read once for all
// heads that share it.
#pragma once

#include "cc/attention/attention_decode.h"
#include "cc/attention/attention_pairs.cuh"
#include "cc/common/tile.cuh"

namespace tf_ops {

struct DecodeProblem {
  AttentionProblem p;
  KeyPages pages;
  DecodeParts parts;
  int row_tile;
  float inverse_cap;
  bool key_aligned, value_aligned;
  void* output;
  float* lse;
};

// Where key j of a batch row is: on a page, whose number may have to be read, and there in row
// Row(page, j) of all [batch seq_k] or [pages page_size]; -1 where the page is none.
struct ContiguousKeys {
  static __device__ int Page(const DecodeProblem&, int64_t, int) { return 0; }
  static __device__ int64_t Row(const DecodeProblem& d, int64_t b, int, int j) {
    return b * d.p.seq_k + j;
  }
};
struct PagedKeys {
  static __device__ int Page(const DecodeProblem& d, int64_t b, int j) {
    return d.pages.table[b * d.pages.pages_per_row + j / int(d.pages.page_size)];
  }
  static __device__ int64_t Row(const DecodeProblem& d, int64_t, int page, int j) {
    const int page_size = int(d.pages.page_size);
    return page >= 0 && page < d.pages.pages ? int64_t{page} * page_size + j % page_size : -1;
  }
};

// Scores of 16-bit types are in base 2.
template <typename T>
constexpr float kScoreUnit = std::is_same_v<T, float> ? 1.0f : kLog2e;

template <typename T>
__device__ float ExpOfScore(float x) {
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return Exp2(x);
}

template <typename T>
__device__ float DecodeScore(const DecodeProblem& d, float product) {
  float x = product * d.p.scale;
  if (d.p.soft_cap > 0.0f) {
    x *= d.inverse_cap;
    if constexpr (std::is_same_v<T, float>) {
      x = tanhf(x);
    } else {
      x = 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
    }
    x *= d.p.soft_cap;
  }
  return x * kScoreUnit<T>;
}

// A block's part of the work: rows [row, row + rows) of a batch row and key head, and keys
// [begin, end), a share of those that any of these rows sees.
struct DecodeShare {
  int64_t b, kv_head;
  int split, group, row, rows, begin, end;
  int q_len, k_len, first, last;  // query i sees keys from i + first to i + last

  template <int kTile>
  static __device__ DecodeShare OfBlock(const DecodeProblem& d) {
    const AttentionProblem& p = d.p;
    DecodeShare s;
    s.group = int(p.heads / p.kv_heads);
    const int all_rows = int(p.seq_q) * s.group,
              row_tiles = (all_rows + d.row_tile - 1) / d.row_tile;
    // Neighbours read the same keys, or those beside them in memory.
    int64_t index = blockIdx.x;
    s.row = int(index % row_tiles) * d.row_tile;
    index /= row_tiles;
    s.kv_head = index % p.kv_heads;
    index /= p.kv_heads;
    s.split = int(index % d.parts.splits);
    s.b = index / d.parts.splits;
    s.rows = min(d.row_tile, all_rows - s.row);

    s.q_len = SeqLength(p.query_seq_lengths, s.b, p.seq_q);
    s.k_len = SeqLength(p.key_value_seq_lengths, s.b, p.seq_k);
    const int offset = p.bottom_right ? s.k_len - s.q_len : 0;
    s.first = p.window_left < 0 ? -(1 << 30) : offset - int(p.window_left);
    s.last = p.window_right < 0 ? 1 << 30 : offset + int(p.window_right);
    const int query = s.Query(0), query_end = min(s.Query(s.rows - 1) + 1, s.q_len);
    const int begin = max(0, query + s.first);
    const int end = query < query_end ? min(s.k_len, query_end + s.last) : 0;
    const int64_t tiles = end > begin ? (end - begin + kTile - 1) / kTile : 0;
    s.begin = begin + int(tiles * s.split / d.parts.splits) * kTile;
    s.end = min(end, begin + int(tiles * (s.split + 1) / d.parts.splits) * kTile);
    return s;
  }

  // The query and head of the share's row r.
  __device__ int Query(int r) const { return (row + r) / group; }
  __device__ int64_t Head(int r) const { return kv_head * group + (row + r) % group; }
  __device__ int64_t OutputRow(const AttentionProblem& p, int r) const {
    return (b * p.seq_q + Query(r)) * p.heads + Head(r);
  }
  __device__ bool Visible(int i, int j) const {
    return i < q_len && j < k_len && j >= i + first && j <= i + last;
  }
  // Whether a row does not see one of the keys [j, j + columns) below the key length.
  __device__ bool Hides(int j, int columns) const {
    const int query_end = Query(rows - 1);
    return query_end >= q_len || j < query_end + first ||
           min(j + columns, k_len) - 1 > Query(0) + last;
  }
};

// The output, and by the thread of column 0 lse, of a row whose exponentials relative to `max`
// add up to `total`, and to `sum` times the column of values.
template <typename T>
__device__ void StoreDecoded(const DecodeProblem& d, int64_t row, int column, float max,
                             float total, float sum) {
  const AttentionProblem& p = d.p;
  const int64_t h = row % p.heads;
  const bool empty = total == 0.0f;
  if (p.sink) {
    const float sink = p.sink[h] * kScoreUnit<T>, larger = fmaxf(max, sink);
    const float base = larger == -INFINITY ? 0.0f : larger, scale = ExpOfScore<T>(max - base);
    total = total * scale + ExpOfScore<T>(sink - base);
    sum *= scale;
    max = larger;
  }
  if (column < p.value_dim) {
    static_cast<T*>(d.output)[row * p.value_dim + column] = T(empty ? 0.0f : sum / total);
  }
  if (column == 0 && d.lse) {
    const float logarithm = std::is_same_v<T, float> ? logf(total) : log2f(total);
    const int64_t i = row / p.heads % p.seq_q, b = row / p.heads / p.seq_q;
    d.lse[(b * p.heads + h) * p.seq_q + i] =
        total == 0.0f ? -INFINITY : (max + logarithm) / kScoreUnit<T>;
  }
}

// Ends a block: adds up what its warps found, sums[warp], with kStride floats a row, and
// stats[warp][row], {max, total}, all in shared memory.
template <typename T, int kWarps, int kRows, int kStride>
__device__ void StoreShare(const DecodeProblem& d, const DecodeShare& share,
                           const float* const (&sums)[kWarps],
                           const float2 (&stats)[kWarps][kRows]) {
  const int columns = max(int(d.p.value_dim), 1);
  for (int n = threadIdx.x; n < share.rows * columns; n += kWarps * 32) {
    const int r = n / columns, column = n % columns;
    float max = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, stats[w][r].x);
    const float base = max == -INFINITY ? 0.0f : max;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float scale = ExpOfScore<T>(stats[w][r].x - base);
      total += scale * stats[w][r].y;
      sum += scale * sums[w][r * kStride + column];
    }
    const int64_t row = share.OutputRow(d.p, r);
    if (d.parts.splits == 1) {
      StoreDecoded<T>(d, row, column, max, total, sum);
    } else {
      const int64_t at = share.split * d.parts.rows + row;
      if (column < d.p.value_dim) d.parts.sums[at * d.parts.stride + column] = sum;
      if (column == 0) reinterpret_cast<float2*>(d.parts.stats)[at] = {max, total};
    }
  }
}

// The kernel of the 16-bit types for 16 rows of queries, which are in registers. A warp takes
// every kWarps-th chunk of 16 keys of the block, with a ring of copies, scores, softmax and outputs
// of its own: warps meet at the end only. kRing bytes of each warp on their way, two blocks on a
// multiprocessor, keep the memory busy.
template <int kDim>
struct DecodeTile {
  static constexpr int kKeys = 16;
  static constexpr int kWarps = kDim == 256 ? 2 : 4;
  static constexpr int kStages = kDim == 64 ? 6 : 3;
  static constexpr int kChunk = kKeys * kDim;  // elements of keys, or of values
  static constexpr int kRing = kStages * 2 * kChunk * 2;
  static constexpr int kShared = kWarps * (kRing + 16 * 8);  // 96 KB, and the warps' stats
  static constexpr int kStride = kDim + 8;  // of the warps' sums: rows in different banks
  static_assert(16 * kStride * 4 <= kRing);
};

// A chunk of keys and values to shared memory, by a warp: lane l < 16 has the row of key l, or -1.
// What is no key or beyond the dimensions reads as zero.
template <int kDim, typename T>
__device__ void LoadDecodeChunk(const DecodeProblem& d, int64_t kv_head, int64_t lane_row, T* keys,
                                T* values) {
  constexpr int kChunks = kDim / 8, kStep = 32 / kChunks;
  const AttentionProblem& p = d.p;
  const int lane = threadIdx.x % 32;
  const auto load = [&](const void* tensor, int dim, bool aligned, T* tile) {
    const T* const from = static_cast<const T*>(tensor) + kv_head * dim;
    const int64_t stride = p.kv_heads * dim;
    if (aligned) {
      const int chunk = lane % kChunks;
      const uint32_t to = SharedAddress(tile);
#pragma unroll
      for (int n = 0; n < 16 / kStep; ++n) {
        const int r = n * kStep + lane / kChunks;
        const int64_t row = __shfl_sync(0xffffffff, lane_row, r);
        const bool valid = row >= 0 && chunk * 8 < dim;
        CopyAsync<16>(to + Swizzled<kDim>(r, chunk) * 2,
                      valid ? from + row * stride + chunk * 8 : from, valid);
      }
      return;
    }
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int64_t row = __shfl_sync(0xffffffff, lane_row, r);
      for (int column = lane; column < kDim; column += 32) {
        tile[Swizzled<kDim>(r, column / 8) + column % 8] =
            row >= 0 && column < dim ? from[row * stride + column] : T(0.0f);
      }
    }
  };
  load(p.key, int(p.head_dim), d.key_aligned, keys);
  load(p.value, int(p.value_dim), d.value_aligned, values);
}

// 0 * NaN must not bring a value to a row that does not see it: takes Inf and NaN out of a chunk
// of values and adds their part to the rows visible(half, key). Rare, hence slow and small.
template <typename T, int kDim, typename Visible>
__device__ void TakeOutNonFinite(T* values, const float (&weights)[1][2][4],
                                 float (&o)[1][kDim / 8][4], const Visible& visible) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  bool found = false;
  for (int n = lane; n < 16 * kDim; n += 32) found |= !isfinite(float(values[n]));
  if (!__any_sync(0xffffffff, found)) return;
#pragma unroll 1
  for (int k = 0; k < 16; ++k) {
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float even = k < 8 ? weights[0][0][r * 2] : weights[0][1][r * 2];
      const float odd = k < 8 ? weights[0][0][r * 2 + 1] : weights[0][1][r * 2 + 1];
      weight[r] = __shfl_sync(0xffffffff, k % 2 ? odd : even, lane - t + k % 8 / 2);
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = float(values[Swizzled<kDim>(k, j) + t * 2 + e]);
        if (isfinite(value)) continue;
        if (visible(0, k)) o[0][j][e] += weight[0] * value;
        if (visible(1, k)) o[0][j][2 + e] += weight[1] * value;
      }
    }
  }
  __syncwarp();
  for (int n = lane; n < 16 * kDim; n += 32) {
    if (!isfinite(float(values[n]))) values[n] = T(0.0f);
  }
  __syncwarp();
}

template <typename T, int kDim, typename Keys>
__global__ void __launch_bounds__(DecodeTile<kDim>::kWarps * 32)
    DecodeKernel(const __grid_constant__ DecodeProblem d) {
  using Tile = DecodeTile<kDim>;
  constexpr int kStages = Tile::kStages, kWarps = Tile::kWarps;
  extern __shared__ __align__(1024) char shared[];
  auto& stats = *reinterpret_cast<float2(*)[kWarps][16]>(shared + kWarps * Tile::kRing);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // DecodeCombineKernel waits for the end.
#endif

  const AttentionProblem& p = d.p;
  const DecodeShare share = DecodeShare::OfBlock<16 * kWarps>(d);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  T* const ring = reinterpret_cast<T*>(shared + warp * Tile::kRing);

  const int first_key = share.begin + warp * 16;
  const int chunks =
      first_key < share.end ? (share.end - first_key + 16 * kWarps - 1) / (16 * kWarps) : 0;
  bool no_page = false;
  const auto lane_key = [&](int chunk) {
    const int j = first_key + chunk * 16 * kWarps + lane;
    return lane < 16 && j < share.end ? j : -1;
  };
  const auto lane_page = [&](int chunk) {
    const int j = lane_key(chunk);
    return j < 0 ? 0 : Keys::Page(d, share.b, j);
  };
  const auto load = [&](int chunk, int page) {
    const int j = lane_key(chunk);
    const int64_t row = j < 0 ? -1 : Keys::Row(d, share.b, page, j);
    no_page |= j >= 0 && row < 0;
    T* const keys = ring + chunk % kStages * 2 * Tile::kChunk;
    LoadDecodeChunk<kDim>(d, share.kv_head, row, keys, keys + Tile::kChunk);
  };
#pragma unroll
  for (int n = 0; n < kStages - 1; ++n) {
    if (n < chunks) load(n, lane_page(n));
    CommitCopies();
  }

  // Fragments of the queries; a lane has rows g and g + 8 of each 16.
  int query[2];
  uint32_t q[kDim / 16][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r * 8 + g;
    query[r] = share.Query(row);
    const bool valid = row < share.rows && query[r] < share.q_len;
    if (!valid) query[r] = 1 << 29;  // sees nothing
    const T* const from =
        static_cast<const T*>(p.query) + (valid ? share.OutputRow(p, row) : 0) * p.head_dim;
#pragma unroll
    for (int k = 0; k < kDim / 8; ++k) {
      const int column = k * 8 + t * 2;
      const float x = valid && column < p.head_dim ? float(from[column]) : 0.0f;
      const float y = valid && column + 1 < p.head_dim ? float(from[column + 1]) : 0.0f;
      q[k / 2][k % 2 * 2 + r] = Pack<T>(x, y);
    }
  }

  float o[1][kDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY},
        sum[2] = {};  // of a lane's rows; the sum of its own columns

  // The page of the next chunk is read a step before its copies need it.
  int next_page = lane_page(kStages - 1);
#pragma unroll 1
  for (int n = 0; n < chunks; ++n) {
    if (n + kStages - 1 < chunks) load(n + kStages - 1, next_page);
    CommitCopies();
    next_page = lane_page(n + kStages);
    WaitForCopyGroups<kStages - 1>();
    __syncwarp();
    T* const keys = ring + n % kStages * 2 * Tile::kChunk;
    T* const values = keys + Tile::kChunk;

    float s[1][2][4] = {};
    const uint32_t key_base =
        SharedAddress(keys + Swizzled<kDim>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t fragment[4];
      LoadMatrices(fragment, key_base ^ (k * 32));
      MultiplyAdd<T>(s[0][0], q[k], fragment[0], fragment[1]);
      MultiplyAdd<T>(s[0][1], q[k], fragment[2], fragment[3]);
    }

    const int j0 = first_key + n * 16 * kWarps;
    const bool hides = share.Hides(j0, 16), masked = hides || j0 + 16 > share.k_len;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = -INFINITY;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[0][e / 2][r * 2 + e % 2];
        const int j = j0 + e / 2 * 8 + t * 2 + e % 2;
        x = masked && !share.Visible(query[r], j) ? -INFINITY : DecodeScore<T>(d, x);
        row_max = fmaxf(row_max, x);
      }
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 2));
      const float new_max = fmaxf(max[r], row_max);
      // Nothing seen yet: not inf - inf.
      const float base = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = Exp2(max[r] - base);
      max[r] = new_max;
      sum[r] *= rescale;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[0][j][r * 2] *= rescale;
        o[0][j][r * 2 + 1] *= rescale;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[0][e / 2][r * 2 + e % 2];
        x = Exp2(x - base);
        sum[r] += x;
      }
    }
    if (hides) {
      TakeOutNonFinite<T, kDim>(values, s, o,
                                [&](int r, int k) { return share.Visible(query[r], j0 + k); });
    }
    uint32_t weights[1][1][4];
    PackFragments<T>(weights, s);
    MultiplyColumns<T, kDim>(o, weights, values, 0);
    __syncwarp();  // The chunk is used up, and may be overwritten.
  }

  WaitForCopyGroups<0>();
  no_page = __any_sync(0xffffffff, no_page);
  float* const sums = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r * 8 + g;
    sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 2);
    if (t == 0) stats[warp][row] = {max[r], no_page ? NAN : sum[r]};
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      *reinterpret_cast<float2*>(sums + row * Tile::kStride + j * 8 + t * 2) = {o[0][j][r * 2],
                                                                                o[0][j][r * 2 + 1]};
    }
  }
  __syncthreads();
  const float* all[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all[w] = reinterpret_cast<float*>(shared + w * Tile::kRing);
  StoreShare<T, kWarps, 16, Tile::kStride>(d, share, all, stats);
}

// float32, which tensor cores would round: a warp takes kBatch keys at a time, a lane every 32nd
// column of them and of kRows queries.
constexpr int kDecodeSimtWarps = 4;

template <int kDim, int kRows, typename Keys>
__global__ void __launch_bounds__(kDecodeSimtWarps * 32)
    DecodeSimtKernel(const __grid_constant__ DecodeProblem d) {
  constexpr int kWarps = kDecodeSimtWarps, kBatch = 4, kColumns = kDim / 32;
  __shared__ float sums[kWarps][kRows * kDim];
  __shared__ float2 stats[kWarps][kRows];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const AttentionProblem& p = d.p;
  const DecodeShare share = DecodeShare::OfBlock<kBatch * kWarps>(d);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const auto load = [&](const void* tensor, int64_t row, int64_t dim, float (&x)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      x[c] =
          row >= 0 && column < dim ? static_cast<const float*>(tensor)[row * dim + column] : 0.0f;
    }
  };
  float q[kRows][kColumns], o[kRows][kColumns] = {}, max[kRows], total[kRows] = {};
  int query[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    query[r] = share.Query(r);
    if (r >= share.rows || query[r] >= share.q_len) query[r] = 1 << 29;  // sees nothing
    load(p.query, query[r] < share.q_len ? share.OutputRow(p, r) : -1, p.head_dim, q[r]);
    max[r] = -INFINITY;
  }
  bool no_page = false;
  for (int j0 = share.begin + warp * kBatch; j0 < share.end; j0 += kBatch * kWarps) {
    float k[kBatch][kColumns], v[kBatch][kColumns];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      int64_t row = -1;
      if (j0 + n < share.end) {
        row = Keys::Row(d, share.b, Keys::Page(d, share.b, j0 + n), j0 + n);
        no_page |= row < 0;
      }
      if (row >= 0) row = row * p.kv_heads + share.kv_head;
      load(p.key, row, p.head_dim, k[n]);
      load(p.value, row, p.value_dim, v[n]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float s[kBatch], new_max = max[r];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        float product = 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) product = fmaf(q[r][c], k[n][c], product);
        product = WarpReduce(product, Sum{});
        s[n] = share.Visible(query[r], j0 + n) ? DecodeScore<float>(d, product) : -INFINITY;
        new_max = fmaxf(new_max, s[n]);
      }
      const float base = new_max == -INFINITY ? 0.0f : new_max, rescale = expf(max[r] - base);
      max[r] = new_max;
      total[r] *= rescale;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[r][c] *= rescale;
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (!share.Visible(query[r], j0 + n)) continue;  // not 0 * NaN
        const float weight = expf(s[n] - base);
        total[r] += weight;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[r][c] = fmaf(weight, v[n][c], o[r][c]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) stats[warp][r] = {max[r], no_page ? NAN : total[r]};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[warp][r * kDim + c * 32 + lane] = o[r][c];
  }
  __syncthreads();
  const float* const all[kWarps] = {sums[0], sums[1], sums[2], sums[3]};
  StoreShare<float, kWarps, kRows, kDim>(d, share, all, stats);
}

// A block to a row of the output; its warps take every fourth part of it.
template <typename T>
__global__ void __launch_bounds__(128)
    DecodeCombineKernel(const __grid_constant__ DecodeProblem d) {
  __shared__ float4 sums[4][kMaxHeadDim / 4];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int64_t row = blockIdx.x, rows = d.parts.rows, stride = d.parts.stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = d.parts.splits;
  const float2* const stats = reinterpret_cast<const float2*>(d.parts.stats) + row;
  float max = -INFINITY, total = 0.0f;
  for (int s = lane; s < splits; s += 32) max = fmaxf(max, stats[s * rows].x);
  max = WarpReduce(max, Max{});
  const float base = max == -INFINITY ? 0.0f : max;
  for (int s = lane; s < splits; s += 32) {
    total += ExpOfScore<T>(stats[s * rows].x - base) * stats[s * rows].y;
  }
  total = WarpReduce(total, Sum{});
  for (int64_t column = lane * 4; column < stride; column += 128) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int s = warp; s < splits; s += 4) {
      const float scale = ExpOfScore<T>(stats[s * rows].x - base);
      const float4 x =
          *reinterpret_cast<const float4*>(d.parts.sums + (s * rows + row) * stride + column);
      sum.x = fmaf(scale, x.x, sum.x);
      sum.y = fmaf(scale, x.y, sum.y);
      sum.z = fmaf(scale, x.z, sum.z);
      sum.w = fmaf(scale, x.w, sum.w);
    }
    sums[warp][column / 4] = sum;
  }
  __syncthreads();
  const float* const all = reinterpret_cast<const float*>(sums);
  const int columns = ::max(int(d.p.value_dim), 1);
  for (int column = threadIdx.x; column < columns; column += 128) {
    float sum = 0.0f;
    for (int w = 0; w < 4; ++w) sum += all[w * kMaxHeadDim + column];
    StoreDecoded<T>(d, row, column, max, total, sum);
  }
}

// Starts the combination while the parts are computed: it waits for them on the device. Not
// where a stream is captured: not every user of a graph knows such edges.
template <typename T>
Status LaunchDecodeCombine(Gpu gpu, const DecodeProblem& d) {
  if (d.parts.rows > INT32_MAX) {
    return InvalidArgument("dot_product_attention: the problem has more than 2^31 rows");
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(gpu.stream, &capture);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(d.parts.rows));
  config.blockDim = dim3(128);
  config.stream = gpu.stream;
  config.attrs = &attribute;
  config.numAttrs = CurrentDevice().major >= 9 && capture == cudaStreamCaptureStatusNone;
  cudaLaunchKernelEx(&config, DecodeCombineKernel<T>, d);
  return CudaStatus();
}

template <typename T>
Status DecodeAttention(Gpu gpu, const AttentionProblem& p, const KeyPages& pages, T* output,
                       float* lse, Workspace* workspace) {
  if (p.batch == 0 || p.seq_q == 0 || p.heads == 0) return Ok();
  DecodeProblem d = {p, pages,
                     DecodeParts(p, kDTypeOf<T>, DecodeSplits(p, kDTypeOf<T>, "GPU"), workspace)};
  if (p.seq_k > kMaxSeq || DecodeRows(p) > kMaxSeq) {
    return InvalidArgument("dot_product_attention: a sequence is longer than 2^29");
  }
  d.row_tile = DecodeRowTile(p, kDTypeOf<T>);
  d.inverse_cap = 1.0f / p.soft_cap;
  d.key_aligned = RowsAligned<T>(p.key, p.head_dim);
  d.value_aligned = RowsAligned<T>(p.value, p.value_dim);
  d.output = output;
  d.lse = lse;
  const int64_t row_tiles = (DecodeRows(p) + d.row_tile - 1) / d.row_tile;
  const int64_t blocks = p.batch * p.kv_heads * d.parts.splits * row_tiles;
  const auto launch = [&](auto padded_dim, auto keys) {
    constexpr int kDim = padded_dim;
    using Keys = decltype(keys);
    if constexpr (std::is_same_v<T, float>) {
      const auto kernel =
          d.row_tile == 1 ? DecodeSimtKernel<kDim, 1, Keys> : DecodeSimtKernel<kDim, 4, Keys>;
      return Launch(gpu, kernel, blocks, kDecodeSimtWarps * 32, 0, d);
    } else {
      using Tile = DecodeTile<kDim>;
      return Launch(gpu, DecodeKernel<T, kDim, Keys>, blocks, Tile::kWarps * 32, Tile::kShared, d);
    }
  };
  const auto with_keys = [&](auto keys) {
    const int64_t dim = std::max(p.head_dim, p.value_dim);
    if (dim <= 64) return launch(std::integral_constant<int, 64>{}, keys);
    if (dim <= 128) return launch(std::integral_constant<int, 128>{}, keys);
    return launch(std::integral_constant<int, 256>{}, keys);
  };
  const Status status = pages.table ? with_keys(PagedKeys{}) : with_keys(ContiguousKeys{});
  if (!status.ok() || d.parts.splits == 1) return status;
  return LaunchDecodeCombine<T>(gpu, d);
}

}  // namespace tf_ops
