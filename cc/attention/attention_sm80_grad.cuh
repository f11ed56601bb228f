// SPDX-License-Identifier: Apache-2.0
// Gradients of attention of 16-bit types on tensor cores, without atomics. Scores are computed
// in each of three kernels: a block owns keys and goes through the queries for dkey and dvalue,
// or owns queries and goes through the keys for dquery, or owns a tile of the bias.
#pragma once

#include "cc/attention/attention_sm80.cuh"

namespace tf_ops {

// The keys of a block, 16 kM of them a warp; queries are loaded kQueries at a time and worked
// on kStep at a time. Accumulators of both gradients and two products fill the registers; at
// 256 elements only one gradient fits, and two kernels run.
template <int kDim>
struct KeyGradTile {
  static constexpr int kM = kDim == 64 ? 2 : 1, kWarps = kDim == 128 ? 8 : 4;
  static constexpr int kKeys = kWarps * kM * 16, kThreads = kWarps * 32;
  static constexpr int kQueries = kDim == 256 ? 32 : 64, kStep = kDim == 128 ? 64 : 32;
  static int SharedBytes(bool dkey, int stages) {
    return ((dkey ? 2 : 1) * kKeys + stages * 2 * kQueries) * kDim * 2 +
           stages * kQueries * int(sizeof(AttentionRow));
  }
};

template <int kDim>
struct QueryGradTile {
  static constexpr int kM = kDim == 256 ? 1 : 2, kThreads = 128;
  static constexpr int kRows = 4 * kM * 16, kKeys = kDim == 64 ? 64 : 32;
  static int SharedBytes(int stages) { return (kRows + stages * kKeys) * 2 * kDim * 2; }
};

template <int kDim>
struct BiasGradShape {
  static constexpr int kM = kDim == 256 ? 1 : 2, kThreads = 128;
  static constexpr int kRows = 4 * kM * 16, kKeys = kDim == 256 ? 32 : 64;
  static constexpr int kSharedBytes = (kRows + kKeys) * 2 * kDim * 2;
};

// From a product s and dp = do . v of query i and key j: p in place of s, and in place of dp the
// gradient of the product over scale, or of the score.
template <typename T, bool kPlain, bool kDropout>
struct PairGrad {
  const AttentionPairs<T, kPlain>& pairs;
  const float factor;  // scores in base 2 are so many times a product, or of Score()

  __device__ explicit PairGrad(const AttentionPairs<T, kPlain>& pairs)
      : pairs(pairs), factor(kPlain ? pairs.p.scale * kLog2e : 1.0f) {}

  __device__ void FromScore(float& s, float& dp, const AttentionRow& row) const {
    s = Exp2(fmaf(s, factor, -row.lse));
    dp = s * (dp - row.delta);
  }
  // With a dropout s, of what is dropped, is 0, and of the others without keep_scale.
  __device__ void operator()(float& s, float& dp, const AttentionRow& row, int i, int j, bool kept,
                             bool of_score) const {
    float slope = 1.0f;
    if (!pairs.Visible(i, j)) {
      s = dp = 0.0f;
      return;
    }
    if constexpr (!kPlain) s = pairs.Score(s, i, j, &slope);
    if constexpr (kDropout) dp = kept ? dp * pairs.p.keep_scale : 0.0f;
    FromScore(s, dp, row);
    if (SeesOneKey(row.delta)) dp = 0.0f;
    if (!of_score) dp *= slope;
    if (!kept) s = 0.0f;
  }
};

// dkey, dvalue or both of one tile of keys. The transposed scores are computed, keys by
// queries, for then the weights and their gradients are the left operands of the next products
// as they are, in registers. Keys and values stay in shared memory, queries and upstream
// gradients of all heads that share the keys are streamed.
template <typename T, int kDim, bool kPlain, bool kDropout, bool kDKey, bool kDValue>
__global__ void __launch_bounds__(KeyGradTile<kDim>::kThreads)
    KeyGradKernel(const __grid_constant__ AttentionProblem p, const T* doutput,
                  const AttentionRow* rows, int stages, bool key_aligned, bool value_aligned,
                  T* dkey, T* dvalue) {
  using Tile = KeyGradTile<kDim>;
  constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kThreads = Tile::kThreads;
  constexpr int kQueries = Tile::kQueries, kStep = Tile::kStep, kN = kStep / 8;
  extern __shared__ __align__(1024) char shared[];
  T* const keys = reinterpret_cast<T*>(shared);
  T* const values = keys + kKeys * kDim;  // for dkey only
  T* const streamed = keys + (kDKey ? 2 : 1) * kKeys * kDim;
  AttentionRow* const streamed_rows =
      reinterpret_cast<AttentionRow*>(streamed + stages * 2 * kQueries * kDim);

  const BlockIndex block((p.seq_k + kKeys - 1) / kKeys, p.batch * p.kv_heads, p.is_causal, false);
  const int64_t b = block.head / p.kv_heads, kv_h = block.head % p.kv_heads;
  const int group = int(p.heads / p.kv_heads);
  const int j0 = int(block.tile) * kKeys;
  const int warp_row = threadIdx.x / 32 * kM * 16, lane = threadIdx.x % 32;
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);

  float dk[kDKey ? kM : 1][kDim / 8][4] = {};
  float dv[kDValue ? kM : 1][kDim / 8][4] = {};

  AttentionPairs<T, kPlain> pairs(p, b, 0);
  const PairGrad<T, kPlain, kDropout> pair_grad(pairs);
  PairDropout<kDropout> dropout(p, b, 0);
  const int k_len = pairs.k_len, q_len = pairs.q_len;
  const int first = pairs.QueryBegin(j0) / kQueries * kQueries;
  const int query_end = pairs.QueryEnd(j0, kKeys);
  const int per_head = j0 < k_len ? max(0, (query_end - first + kQueries - 1) / kQueries) : 0;
  const int count = per_head * group;

  const auto load = [&](int n) {
    const int64_t h = kv_h * group + n / per_head;
    const int i0 = first + n % per_head * kQueries, stage = n % stages;
    T* const to = streamed + stage * 2 * kQueries * kDim;
    LoadTile<kQueries, kDim, kThreads>(
        to, RowOf(static_cast<const T*>(p.query), b, p.seq_q, i0, p.heads, h, p.head_dim),
        p.heads * p.head_dim, head_dim, q_len - i0, key_aligned);
    LoadTile<kQueries, kDim, kThreads>(to + kQueries * kDim,
                                       RowOf(doutput, b, p.seq_q, i0, p.heads, h, p.value_dim),
                                       p.heads * p.value_dim, value_dim, q_len - i0, value_aligned);
    const AttentionRow* const from = rows + (b * p.heads + h) * p.seq_q + i0;
    if (threadIdx.x < kQueries) {
      const bool valid = int(threadIdx.x) < q_len - i0;
      CopyAsync<8>(SharedAddress(streamed_rows + stage * kQueries + threadIdx.x),
                   valid ? from + threadIdx.x : from, valid);
    }
  };

  if (count > 0) {
    LoadTile<kKeys, kDim, kThreads>(
        keys, RowOf(static_cast<const T*>(p.key), b, p.seq_k, j0, p.kv_heads, kv_h, p.head_dim),
        p.kv_heads * p.head_dim, head_dim, k_len - j0, key_aligned);
    if constexpr (kDKey) {
      LoadTile<kKeys, kDim, kThreads>(
          values,
          RowOf(static_cast<const T*>(p.value), b, p.seq_k, j0, p.kv_heads, kv_h, p.value_dim),
          p.kv_heads * p.value_dim, value_dim, k_len - j0, value_aligned);
    }
    load(0);
  }
  for (int n = 0; n < count; ++n) {
    WaitForCopies();
    __syncthreads();  // Tile n is there, the one before it no longer used.
    if (stages == 2 && n + 1 < count) load(n + 1);
    const int64_t h = kv_h * group + n / per_head;
    const int i0 = first + n % per_head * kQueries;
    pairs.SetHead(b, h);
    dropout.SetHead(p, b, h);
    const bool hides = pairs.HidesSome(i0, kQueries, j0, kKeys);
    T* const tile_q = streamed + n % stages * 2 * kQueries * kDim;
    T* const tile_do = tile_q + kQueries * kDim;
    const AttentionRow* const tile_rows = streamed_rows + n % stages * kQueries;

#pragma unroll 1
    for (int step = 0; step < kQueries; step += kStep) {
      float s[kM][kN][4] = {}, ds[kM][kN][4] = {};
      MultiplyRows<T, kDim>(s, keys, warp_row, tile_q, step);
      if constexpr (kDKey) MultiplyRows<T, kDim>(ds, values, warp_row, tile_do, step);
      const auto row_of = [&](int c, int e) {
        return tile_rows[step + c * 8 + lane % 4 * 2 + e % 2];
      };
      if (kPlain && !hides) {
        ForEachElement<kM, kN>([&](int m, int c, int e) {
          pair_grad.FromScore(s[m][c][e], ds[m][c][e], row_of(c, e));
        });
      } else {
        const int i = i0 + step + lane % 4 * 2, j = j0 + warp_row + lane / 4;
        const KeptPairs<kM, kN, true, kDropout> kept(dropout, j0 + warp_row, i0 + step);
        ForEachElement<kM, kN>([&](int m, int c, int e) {
          pair_grad(s[m][c][e], ds[m][c][e], row_of(c, e), Opaque(i) + c * 8 + e % 2,
                    j + m * 16 + e / 2 * 8, kept(m, c, e), false);
        });
      }

      // 0 * NaN must not bring a query to a key that it does not see.
      bool poisoned = false;
      if (pairs.HidesValid(i0, kQueries, j0, kKeys)) {
        __syncthreads();  // The tile was read for the scores.
        bool found = false;
        if constexpr (kDKey) found |= ClearNonFinite<kStep, kDim, kThreads>(tile_q + step * kDim);
        if constexpr (kDValue)
          found |= ClearNonFinite<kStep, kDim, kThreads>(tile_do + step * kDim);
        poisoned = __syncthreads_or(found);
      }
      const auto visible = [&](int row, int k) {
        return pairs.Visible(Opaque(i0 + step) + k, j0 + warp_row + row);
      };
      if constexpr (kDValue) {
        uint32_t weights[kM][kN / 2][4];
        PackFragments<T>(weights, s);
        if (poisoned) {
          AddNonFinite<T, kDim>(dv, weights,
                                RowOf(doutput, b, p.seq_q, i0 + step, p.heads, h, p.value_dim),
                                p.heads * p.value_dim, value_dim, q_len - i0 - step, visible);
        }
        MultiplyColumns<T, kDim>(dv, weights, tile_do, step);
      }
      if constexpr (kDKey) {
        uint32_t weights[kM][kN / 2][4];
        PackFragments<T>(weights, ds);
        if (poisoned) {
          AddNonFinite<T, kDim>(
              dk, weights,
              RowOf(static_cast<const T*>(p.query), b, p.seq_q, i0 + step, p.heads, h, p.head_dim),
              p.heads * p.head_dim, head_dim, q_len - i0 - step, visible);
        }
        MultiplyColumns<T, kDim>(dk, weights, tile_q, step);
      }
    }
    if (stages == 1 && n + 1 < count) {
      __syncthreads();
      load(n + 1);
    }
  }

  const int row0 = j0 + warp_row;
  float dk_scale[kM][2], dv_scale[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Padding may have met NaN in products of zeros.
      const bool valid = row0 + m * 16 + r * 8 + lane / 4 < k_len;
      dk_scale[m][r] = valid ? p.scale : 0.0f;
      dv_scale[m][r] = valid ? p.keep_scale : 0.0f;
    }
  }
  if constexpr (kDKey) {
    StoreRows<T>(dk, dk_scale, RowOf(dkey, b, p.seq_k, row0, p.kv_heads, kv_h, p.head_dim),
                 p.kv_heads * p.head_dim, head_dim, int(p.seq_k) - row0);
  }
  if constexpr (kDValue) {
    StoreRows<T>(dv, dv_scale, RowOf(dvalue, b, p.seq_k, row0, p.kv_heads, kv_h, p.value_dim),
                 p.kv_heads * p.value_dim, value_dim, int(p.seq_k) - row0);
  }
}

// dquery of one tile of queries. Queries and upstream gradients stay in shared memory, keys and
// values are streamed.
template <typename T, int kDim, bool kPlain, bool kDropout>
__global__ void __launch_bounds__(QueryGradTile<kDim>::kThreads)
    QueryGradKernel(const __grid_constant__ AttentionProblem p, const T* doutput,
                    const AttentionRow* rows, int stages, bool key_aligned, bool value_aligned,
                    T* dquery) {
  using Tile = QueryGradTile<kDim>;
  constexpr int kM = Tile::kM, kRows = Tile::kRows, kKeys = Tile::kKeys;
  constexpr int kThreads = Tile::kThreads;
  extern __shared__ __align__(1024) char shared[];
  T* const queries = reinterpret_cast<T*>(shared);
  T* const upstream = queries + kRows * kDim;
  T* const streamed = upstream + kRows * kDim;

  const BlockIndex block((p.seq_q + kRows - 1) / kRows, p.batch * p.heads, p.is_causal, true);
  const int64_t b = block.head / p.heads, h = block.head % p.heads;
  const int64_t kv_h = h / (p.heads / p.kv_heads);
  const int i0 = int(block.tile) * kRows;
  const int warp_row = threadIdx.x / 32 * kM * 16, lane = threadIdx.x % 32;
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);
  const int64_t key_stride = p.kv_heads * p.head_dim, value_stride = p.kv_heads * p.value_dim;
  const T* const key =
      RowOf(static_cast<const T*>(p.key), b, p.seq_k, 0, p.kv_heads, kv_h, p.head_dim);
  const T* const value =
      RowOf(static_cast<const T*>(p.value), b, p.seq_k, 0, p.kv_heads, kv_h, p.value_dim);
  const AttentionPairs<T, kPlain> pairs(p, b, h);
  const PairGrad<T, kPlain, kDropout> pair_grad(pairs);
  const PairDropout<kDropout> dropout(p, b, h);

  float dq[kM][kDim / 8][4] = {};
  AttentionRow lane_rows[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = i0 + warp_row + m * 16 + r * 8 + lane / 4;
      lane_rows[m][r] =
          i < p.seq_q ? rows[(b * p.heads + h) * p.seq_q + i] : AttentionRow{INFINITY, 0.0f};
    }
  }

  const int key_begin = pairs.KeyBegin(i0) / kKeys * kKeys;
  const int count = (pairs.KeyEnd(i0, kRows) - key_begin + kKeys - 1) / kKeys;
  const auto load = [&](int n) {
    T* const to = streamed + n % stages * 2 * kKeys * kDim;
    const int j0 = key_begin + n * kKeys;
    LoadTile<kKeys, kDim, kThreads>(to, key + j0 * key_stride, key_stride, head_dim,
                                    pairs.k_len - j0, key_aligned);
    LoadTile<kKeys, kDim, kThreads>(to + kKeys * kDim, value + j0 * value_stride, value_stride,
                                    value_dim, pairs.k_len - j0, value_aligned);
  };
  if (count > 0) {
    LoadTile<kRows, kDim, kThreads>(
        queries, RowOf(static_cast<const T*>(p.query), b, p.seq_q, i0, p.heads, h, p.head_dim),
        p.heads * p.head_dim, head_dim, pairs.q_len - i0, key_aligned);
    LoadTile<kRows, kDim, kThreads>(
        upstream, RowOf(doutput, b, p.seq_q, i0, p.heads, h, p.value_dim), p.heads * p.value_dim,
        value_dim, pairs.q_len - i0, value_aligned);
    load(0);
  }
  for (int n = 0; n < count; ++n) {
    WaitForCopies();
    __syncthreads();  // Tile n is there, the one before it no longer used.
    if (stages == 2 && n + 1 < count) load(n + 1);
    const int j0 = key_begin + n * kKeys;
    T* const tile_k = streamed + n % stages * 2 * kKeys * kDim;
    float s[kM][kKeys / 8][4] = {}, ds[kM][kKeys / 8][4] = {};
    MultiplyRows<T, kDim>(s, queries, warp_row, tile_k, 0);
    MultiplyRows<T, kDim>(ds, upstream, warp_row, tile_k + kKeys * kDim, 0);
    if (kPlain && !pairs.HidesSome(i0, kRows, j0, kKeys)) {
      ForEachElement<kM, kKeys / 8>([&](int m, int c, int e) {
        pair_grad.FromScore(s[m][c][e], ds[m][c][e], lane_rows[m][e / 2]);
      });
    } else {
      const int i = i0 + warp_row + lane / 4, j = j0 + lane % 4 * 2;
      const KeptPairs<kM, kKeys / 8, false, kDropout> kept(dropout, i0 + warp_row, j0);
      ForEachElement<kM, kKeys / 8>([&](int m, int c, int e) {
        pair_grad(s[m][c][e], ds[m][c][e], lane_rows[m][e / 2], Opaque(i) + m * 16 + e / 2 * 8,
                  j + c * 8 + e % 2, kept(m, c, e), false);
      });
    }
    uint32_t weights[kM][kKeys / 16][4];
    PackFragments<T>(weights, ds);

    // 0 * NaN must not bring a key to a query that does not see it.
    bool poisoned = false;
    if (pairs.HidesValid(i0, kRows, j0, kKeys)) {
      __syncthreads();  // The tile was read for the scores.
      poisoned = __syncthreads_or(ClearNonFinite<kKeys, kDim, kThreads>(tile_k));
    }
    if (poisoned) {
      const int i = Opaque(i0 + warp_row);
      AddNonFinite<T, kDim>(dq, weights, key + j0 * key_stride, key_stride, head_dim,
                            pairs.k_len - j0,
                            [&](int row, int k) { return pairs.Visible(i + row, j0 + k); });
    }
    MultiplyColumns<T, kDim>(dq, weights, tile_k, 0);
    if (stages == 1 && n + 1 < count) {
      __syncthreads();
      load(n + 1);
    }
  }

  const int row0 = i0 + warp_row;
  float scale[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[m][r] = row0 + m * 16 + r * 8 + lane / 4 < pairs.q_len ? p.scale : 0.0f;
    }
  }
  StoreRows<T>(dq, scale, RowOf(dquery, b, p.seq_q, row0, p.heads, h, p.head_dim),
               p.heads * p.head_dim, head_dim, int(p.seq_q) - row0);
}

// The gradient of one tile of the bias: the block goes through all that repeats the tile, or
// its share of that, and sums in registers.
template <typename T, int kDim, bool kDropout>
__global__ void __launch_bounds__(BiasGradShape<kDim>::kThreads)
    BiasGradKernel(const __grid_constant__ AttentionProblem p,
                   const __grid_constant__ AttentionGradients g, bool key_aligned,
                   bool value_aligned) {
  using Tile = BiasGradShape<kDim>;
  constexpr int kM = Tile::kM, kRows = Tile::kRows, kKeys = Tile::kKeys;
  constexpr int kThreads = Tile::kThreads;
  extern __shared__ __align__(1024) char shared[];
  T* const queries = reinterpret_cast<T*>(shared);
  T* const upstream = queries + kRows * kDim;
  T* const keys = upstream + kRows * kDim;
  T* const values = keys + kKeys * kDim;
  const int warp_row = threadIdx.x / 32 * kM * 16, lane = threadIdx.x % 32;
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);

  const BiasGradTile tile(p, g, kRows, kKeys);
  float sum[kM][kKeys / 8][4] = {};
#pragma unroll 1
  for (int64_t step = tile.begin; step < tile.end; ++step) {
    int64_t b, h;
    int i0, j0;
    tile.At(step, kRows, kKeys, &b, &h, &i0, &j0);
    const AttentionPairs<T> pairs(p, b, h);
    if (j0 >= pairs.KeyEnd(i0, kRows) || j0 + kKeys <= pairs.KeyBegin(i0)) continue;
    const PairDropout<kDropout> dropout(p, b, h);
    const int64_t kv_h = h / (p.heads / p.kv_heads);
    __syncthreads();  // The tiles of the step before are no longer used.
    LoadTile<kRows, kDim, kThreads>(
        queries, RowOf(static_cast<const T*>(p.query), b, p.seq_q, i0, p.heads, h, p.head_dim),
        p.heads * p.head_dim, head_dim, pairs.q_len - i0, key_aligned);
    LoadTile<kKeys, kDim, kThreads>(
        keys, RowOf(static_cast<const T*>(p.key), b, p.seq_k, j0, p.kv_heads, kv_h, p.head_dim),
        p.kv_heads * p.head_dim, head_dim, pairs.k_len - j0, key_aligned);
    LoadTile<kRows, kDim, kThreads>(
        upstream, RowOf(static_cast<const T*>(g.doutput), b, p.seq_q, i0, p.heads, h, p.value_dim),
        p.heads * p.value_dim, value_dim, pairs.q_len - i0, value_aligned);
    LoadTile<kKeys, kDim, kThreads>(
        values,
        RowOf(static_cast<const T*>(p.value), b, p.seq_k, j0, p.kv_heads, kv_h, p.value_dim),
        p.kv_heads * p.value_dim, value_dim, pairs.k_len - j0, value_aligned);
    AttentionRow lane_rows[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = i0 + warp_row + m * 16 + r * 8 + lane / 4;
        lane_rows[m][r] =
            i < p.seq_q ? g.rows[(b * p.heads + h) * p.seq_q + i] : AttentionRow{INFINITY, 0.0f};
      }
    }
    WaitForCopies();
    __syncthreads();
    float s[kM][kKeys / 8][4] = {}, ds[kM][kKeys / 8][4] = {};
    MultiplyRows<T, kDim>(s, queries, warp_row, keys, 0);
    MultiplyRows<T, kDim>(ds, upstream, warp_row, values, 0);
    const PairGrad<T, false, kDropout> pair_grad(pairs);
    const KeptPairs<kM, kKeys / 8, false, kDropout> kept(dropout, i0 + warp_row, j0);
    const int i = i0 + warp_row + lane / 4, j = j0 + lane % 4 * 2;
    ForEachElement<kM, kKeys / 8>([&](int m, int c, int e) {
      pair_grad(s[m][c][e], ds[m][c][e], lane_rows[m][e / 2], Opaque(i) + m * 16 + e / 2 * 8,
                j + c * 8 + e % 2, kept(m, c, e), true);
      sum[m][c][e] += ds[m][c][e];
    });
  }

  float* const result = reinterpret_cast<float*>(shared);
  static_assert(kRows * (kKeys + 1) * sizeof(float) <= Tile::kSharedBytes);
  __syncthreads();
  ForEachElement<kM, kKeys / 8>([&](int m, int c, int e) {
    const int row = warp_row + m * 16 + lane / 4 + e / 2 * 8, column = c * 8 + lane % 4 * 2 + e % 2;
    result[row * (kKeys + 1) + column] = sum[m][c][e];
  });
  __syncthreads();
  tile.template Write<kRows, kKeys, T>(result, p, g);
}

template <typename T, int kDim, bool kPlain, bool kDropout>
Status LaunchGrad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g) {
  if (Status s = LaunchRows<T>(gpu, p, g); !s.ok()) return s;
  if (Status s = LaunchSinkGrad(gpu, p, g); !s.ok()) return s;
  int limit = 0;
  if (Status s = SharedMemoryLimit(&limit); !s.ok()) return s;
  const bool key_aligned = RowsAligned<T>(p.query, p.head_dim) && RowsAligned<T>(p.key, p.head_dim);
  const bool value_aligned =
      RowsAligned<T>(p.value, p.value_dim) && RowsAligned<T>(g.doutput, p.value_dim);
  const T* const doutput = static_cast<const T*>(g.doutput);

  using KeyTile = KeyGradTile<kDim>;
  const int64_t key_blocks = (p.seq_k + KeyTile::kKeys - 1) / KeyTile::kKeys * p.batch * p.kv_heads;
  const auto launch_key_grad = [&](auto kernel, bool dkey) {
    const int stages = KeyTile::SharedBytes(dkey, 2) <= limit ? 2 : 1;
    return Launch(gpu, kernel, key_blocks, KeyTile::kThreads, KeyTile::SharedBytes(dkey, stages), p,
                  doutput, g.rows, stages, key_aligned, value_aligned, static_cast<T*>(g.dkey),
                  static_cast<T*>(g.dvalue));
  };
  Status s;
  if constexpr (kDim == 256) {
    s = launch_key_grad(KeyGradKernel<T, kDim, kPlain, kDropout, true, false>, true);
    if (s.ok()) s = launch_key_grad(KeyGradKernel<T, kDim, kPlain, kDropout, false, true>, false);
  } else {
    s = launch_key_grad(KeyGradKernel<T, kDim, kPlain, kDropout, true, true>, true);
  }
  if (!s.ok()) return s;

  using QueryTile = QueryGradTile<kDim>;
  const int stages = QueryTile::SharedBytes(2) <= limit ? 2 : 1;
  return Launch(gpu, QueryGradKernel<T, kDim, kPlain, kDropout>,
                (p.seq_q + QueryTile::kRows - 1) / QueryTile::kRows * p.batch * p.heads,
                QueryTile::kThreads, QueryTile::SharedBytes(stages), p, doutput, g.rows, stages,
                key_aligned, value_aligned, static_cast<T*>(g.dquery));
}

template <typename T, int kDim>
Status TensorCoreAttention<T, kDim>::Grad(Gpu gpu, const AttentionProblem& p,
                                          const AttentionGradients& g) {
  if (p.dropout_threshold) return LaunchGrad<T, kDim, false, true>(gpu, p, g);
  return IsPlain(p) ? LaunchGrad<T, kDim, true, false>(gpu, p, g)
                    : LaunchGrad<T, kDim, false, false>(gpu, p, g);
}

template <typename T, int kDim>
Status TensorCoreAttention<T, kDim>::BiasGrad(Gpu gpu, const AttentionProblem& p,
                                              const AttentionGradients& g) {
  using Tile = BiasGradShape<kDim>;
  if (Status s = LaunchRows<T>(gpu, p, g); !s.ok()) return s;
  const Status s = Launch(
      gpu, p.dropout_threshold ? BiasGradKernel<T, kDim, true> : BiasGradKernel<T, kDim, false>,
      BiasGradBlocks(p, g, Tile::kRows, Tile::kKeys), Tile::kThreads, Tile::kSharedBytes, p, g,
      RowsAligned<T>(p.query, p.head_dim) && RowsAligned<T>(p.key, p.head_dim),
      RowsAligned<T>(p.value, p.value_dim) && RowsAligned<T>(g.doutput, p.value_dim));
  return s.ok() ? LaunchBiasGradSum<T>(gpu, g) : s;
}

}  // namespace tf_ops
