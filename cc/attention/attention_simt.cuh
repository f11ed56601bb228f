// SPDX-License-Identifier: Apache-2.0
// Attention of float32 without tensor cores, which would round the operands. The plan is that of
// the 16-bit kernels; 16 x 16 threads own kR x kR of a tile's scores each, (row kR ty + r, column
// tx + 16 c), and of an accumulator kR rows of the float4s tx + 16 c.
#pragma once

#include "cc/attention/attention_pairs.cuh"

namespace tf_ops {

constexpr int kSimtThreads = 256;

// Queries and keys of a tile: what 99 KB of shared memory hold, the least that sm_80 and later
// grant a block.
template <int kDim>
struct SimtTile {
  static constexpr int kForward = kDim == 256 ? 32 : 64;
  static constexpr int kForwardBytes = (2 * kDim + kForward) * kForward * 4;
  static constexpr int kGrad = kDim == 256 ? 16 : kDim == 128 ? 32 : 64;
  static constexpr int kGradBytes = (4 * kDim + 2 * kGrad) * kGrad * 4;
};

// Where float4 `chunk` of a row is: permuted, so that one chunk of eight rows is in all banks.
template <int kDim>
__device__ int SimtAt(int row, int chunk) {
  return row * kDim + (chunk ^ (row & 7)) * 4;
}

template <int kRows, int kDim>
__device__ void LoadSimtTile(float* tile, const float* from, int64_t stride, int dim, int rows,
                             bool aligned) {
#pragma unroll 4
  for (int n = threadIdx.x; n < kRows * kDim / 4; n += kSimtThreads) {
    const int row = n / (kDim / 4), chunk = n % (kDim / 4);
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < rows) {
      const float* at = from + row * stride + chunk * 4;
      if (aligned) {
        if (chunk * 4 < dim) value = *reinterpret_cast<const float4*>(at);
      } else {
        if (chunk * 4 + 0 < dim) value.x = at[0];
        if (chunk * 4 + 1 < dim) value.y = at[1];
        if (chunk * 4 + 2 < dim) value.z = at[2];
        if (chunk * 4 + 3 < dim) value.w = at[3];
      }
    }
    *reinterpret_cast<float4*>(tile + SimtAt<kDim>(row, chunk)) = value;
  }
}

// s = a b^T.
template <int kDim, int kR>
__device__ void SimtProducts(float (&s)[kR][kR], const float* a, const float* b) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < kR; ++r) {
#pragma unroll
    for (int c = 0; c < kR; ++c) s[r][c] = 0.0f;
  }
#pragma unroll 8
  for (int k = 0; k < kDim / 4; ++k) {
    float4 va[kR], vb[kR];
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      va[r] = *reinterpret_cast<const float4*>(a + SimtAt<kDim>(ty * kR + r, k));
      vb[r] = *reinterpret_cast<const float4*>(b + SimtAt<kDim>(tx + r * 16, k));
    }
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int c = 0; c < kR; ++c) {
        s[r][c] = fmaf(va[r].x, vb[c].x, s[r][c]);
        s[r][c] = fmaf(va[r].y, vb[c].y, s[r][c]);
        s[r][c] = fmaf(va[r].z, vb[c].z, s[r][c]);
        s[r][c] = fmaf(va[r].w, vb[c].w, s[r][c]);
      }
    }
  }
}

// acc += w b: w [kTile][kTile] holds the weights of row and k, or of k and row if kTransposed.
// With `poisoned` only where visible(row, k): 0 * NaN must not bring k to a row that does not
// see it.
template <int kDim, int kTile, bool kTransposed, int kR, typename Visible>
__device__ void SimtAccumulate(float (&acc)[kR][kDim / 64][4], const float* w, const float* b,
                               bool poisoned, const Visible& visible) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  constexpr int kStep = kTransposed ? 1 : 4;
#pragma unroll 2
  for (int k0 = 0; k0 < kTile; k0 += kStep) {
    float weights[kR][kStep];
    if constexpr (kTransposed) {
      struct alignas(4 * kR) Vector {
        float x[kR];
      };
      const Vector v = *reinterpret_cast<const Vector*>(w + k0 * kTile + ty * kR);
#pragma unroll
      for (int r = 0; r < kR; ++r) weights[r][0] = v.x[r];
    } else {
#pragma unroll
      for (int r = 0; r < kR; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(w + (ty * kR + r) * kTile + k0);
        weights[r][0] = v.x;
        weights[r][1] = v.y;
        weights[r][2] = v.z;
        weights[r][3] = v.w;
      }
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      bool sees[kR];
#pragma unroll
      for (int r = 0; r < kR; ++r) sees[r] = !poisoned || visible(ty * kR + r, k0 + k);
#pragma unroll
      for (int c = 0; c < kDim / 64; ++c) {
        const float4 v = *reinterpret_cast<const float4*>(b + SimtAt<kDim>(k0 + k, tx + c * 16));
#pragma unroll
        for (int r = 0; r < kR; ++r) {
          if (!sees[r]) continue;
          acc[r][c][0] = fmaf(weights[r][k], v.x, acc[r][c][0]);
          acc[r][c][1] = fmaf(weights[r][k], v.y, acc[r][c][1]);
          acc[r][c][2] = fmaf(weights[r][k], v.z, acc[r][c][2]);
          acc[r][c][3] = fmaf(weights[r][k], v.w, acc[r][c][3]);
        }
      }
    }
  }
}

template <int kTile, int kDim>
__device__ bool SimtHasNonFinite(const float* tile) {
  bool found = false;
  for (int n = threadIdx.x; n < kTile * kDim; n += kSimtThreads) found |= !isfinite(tile[n]);
  return found;
}

// scale[r] acc[r], or 0 where scale[r] is 0, to rows below `rows`.
template <int kDim, int kR>
__device__ void SimtStore(const float (&acc)[kR][kDim / 64][4], const float (&scale)[kR], float* to,
                          int64_t stride, int dim, int rows) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | dim * 4) % 16 == 0;
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    if (ty * kR + r >= rows) continue;
#pragma unroll
    for (int c = 0; c < kDim / 64; ++c) {
      const int column = (tx + c * 16) * 4;
      float* at = to + (ty * kR + r) * stride + column;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = scale[r] == 0.0f ? 0.0f : acc[r][c][e] * scale[r];
      if (aligned) {
        if (column < dim) *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < dim) at[e] = x[e];
        }
      }
    }
  }
}

// The tiles of rows [row, row + kTile) of a [batch, seq, heads, dim] tensor.
struct SimtRows {
  const float* data;
  int64_t seq, heads, dim;
  bool aligned;

  template <int kTile, int kDim>
  __device__ void Load(float* tile, int64_t b, int64_t h, int row, int length) const {
    LoadSimtTile<kTile, kDim>(tile, data + ((b * seq + row) * heads + h) * dim, heads * dim,
                              int(dim), length - row, aligned);
  }
};
struct SimtTensors {
  SimtRows query, key, value, doutput;
};

// Of a thread's scores in the tile from query i0 and key j0 on, which the dropout keeps. Four
// threads have the keys of one draw side by side; each draws for every fourth score of all four.
template <int kR, bool kDropout>
class SimtKept {
 public:
  __device__ SimtKept(const PairDropout<kDropout>& dropout, int i0, int j0) {
    if constexpr (!kDropout) return;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    uint32_t own = 0;
#pragma unroll
    for (int n = 0; n < (kScores + 3) / 4; ++n) {
      const int k = min(n * 4 + tx % 4, kScores - 1);
      own |= dropout.KeptOfFour(i0 + ty * kR + k / kR, j0 + tx / 4 * 4 + k % kR * 16) << (n * 4);
    }
#pragma unroll
    for (int n = 0; n < kDraws; ++n) {
      bits_[n] = __shfl_sync(0xffffffff, own, (threadIdx.x % 32 & ~3) | n) >> (tx % 4);
    }
  }
  __device__ bool operator()(int r, int c) const {
    if constexpr (!kDropout) return true;
    const int k = r * kR + c;
    return bits_[k % 4] >> (k / 4 * 4) & 1;
  }

 private:
  static constexpr int kScores = kR * kR, kDraws = kScores < 4 ? kScores : 4;
  uint32_t bits_[kDraws];
};

// A block per tile of queries; keys and values take turns in one buffer.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(kSimtThreads)
    Float32AttentionKernel(const __grid_constant__ AttentionProblem p,
                           const __grid_constant__ SimtTensors tensors, float* output, float* lse) {
  constexpr int kTile = SimtTile<kDim>::kForward, kR = kTile / 16;
  extern __shared__ __align__(1024) char shared[];
  float* const queries = reinterpret_cast<float*>(shared);
  float* const streamed = queries + kTile * kDim;
  float* const weights = streamed + kTile * kDim;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

  const int64_t bh = blockIdx.x % (p.batch * p.heads), b = bh / p.heads, h = bh % p.heads;
  const int64_t tiles = (p.seq_q + kTile - 1) / kTile;
  const int64_t kv_h = h / (p.heads / p.kv_heads);
  const int i0 = int(tiles - 1 - blockIdx.x / (p.batch * p.heads)) * kTile;
  const AttentionPairs<float> pairs(p, b, h);
  const PairDropout<kDropout> dropout(p, b, h);

  float o[kR][kDim / 64][4] = {}, max[kR], sum[kR];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    max[r] = p.sink ? p.sink[h] : -INFINITY;
    sum[r] = p.sink && tx == 0 ? 1.0f : 0.0f;
  }
  const int key_end = pairs.KeyEnd(i0, kTile);
  if (key_end > 0) tensors.query.Load<kTile, kDim>(queries, b, h, i0, pairs.q_len);
  for (int j0 = pairs.KeyBegin(i0) / kTile * kTile; j0 < key_end; j0 += kTile) {
    __syncthreads();
    tensors.key.Load<kTile, kDim>(streamed, b, kv_h, j0, pairs.k_len);
    __syncthreads();
    float s[kR][kR];
    SimtProducts<kDim>(s, queries, streamed);
    __syncthreads();
    tensors.value.Load<kTile, kDim>(streamed, b, kv_h, j0, pairs.k_len);

    const bool hides = pairs.HidesSome(i0, kTile, j0, kTile);
    const SimtKept<kR, kDropout> kept(dropout, i0, j0);
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      float row_max = -INFINITY;
#pragma unroll
      for (int c = 0; c < kR; ++c) {
        const int i = i0 + ty * kR + r, j = j0 + tx + c * 16;
        float slope;
        if (hides && !pairs.Visible(i, j)) {
          s[r][c] = -INFINITY;
        } else {
          s[r][c] = pairs.Score(s[r][c], i, j, &slope);
        }
        row_max = fmaxf(row_max, s[r][c]);
      }
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, step));
      }
      const float new_max = fmaxf(max[r], row_max);
      // Nothing seen yet: not inf - inf.
      const float base = new_max == -INFINITY ? 0.0f : new_max;
      const float rescale = expf(max[r] - base);
      max[r] = new_max;
      sum[r] *= rescale;
#pragma unroll
      for (int c = 0; c < kDim / 64; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[r][c][e] *= rescale;
      }
#pragma unroll
      for (int c = 0; c < kR; ++c) {
        const float weight = expf(s[r][c] - base);
        sum[r] += weight;
        weights[(ty * kR + r) * kTile + tx + c * 16] = kept(r, c) ? weight : 0.0f;
      }
    }
    __syncthreads();
    const bool poisoned = pairs.HidesValid(i0, kTile, j0, kTile) &&
                          __syncthreads_or(SimtHasNonFinite<kTile, kDim>(streamed));
    SimtAccumulate<kDim, kTile, false>(o, weights, streamed, poisoned, [&](int row, int k) {
      return pairs.Visible(i0 + row, j0 + k);
    });
  }

#pragma unroll
  for (int r = 0; r < kR; ++r) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], step);
    const int i = i0 + ty * kR + r;
    const bool empty = sum[r] == 0.0f;
    if (tx == 0 && i < p.seq_q) {
      lse[(b * p.heads + h) * p.seq_q + i] = empty ? -INFINITY : max[r] + logf(sum[r]);
    }
    // Padded queries may have met NaN in products of zeros.
    sum[r] = empty || i >= pairs.q_len ? 0.0f : p.keep_scale / sum[r];
  }
  SimtStore<kDim>(o, sum, output + ((b * p.seq_q + i0) * p.heads + h) * p.value_dim,
                  p.heads * p.value_dim, int(p.value_dim), int(p.seq_q) - i0);
}

// Of a tile whose operands are in shared memory: weights p, 0 where they are dropped, and
// gradients ds. A query whose keys are all in this tile has its delta from here.
template <int kDim, int kR, bool kDropout>
__device__ void SimtPairGrads(float (&s)[kR][kR], float (&ds)[kR][kR],
                              const AttentionPairs<float>& pairs,
                              const PairDropout<kDropout>& dropout, const AttentionRow* rows,
                              const float* queries, const float* keys, const float* upstream,
                              const float* values, int64_t h, int i0, int j0, bool before_cap) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const float sink = pairs.p.sink ? pairs.p.sink[h] : -INFINITY;
  SimtProducts<kDim>(s, queries, keys);
  SimtProducts<kDim>(ds, upstream, values);
  const SimtKept<kR, kDropout> kept(dropout, i0, j0);
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    const int i = i0 + ty * kR + r;
    const AttentionRow row = i < pairs.q_len ? rows[i] : AttentionRow{INFINITY, 0.0f};
    float slope[kR], sum = 0.0f, mean = 0.0f;
    bool visible[kR];
#pragma unroll
    for (int c = 0; c < kR; ++c) {
      const int j = j0 + tx + c * 16;
      visible[c] = pairs.Visible(i, j);
      if (!visible[c]) {
        s[r][c] = ds[r][c] = 0.0f;
        continue;
      }
      s[r][c] = expf(pairs.Score(s[r][c], i, j, &slope[c]) - row.lse);
      ds[r][c] = !kept(r, c) ? 0.0f : kDropout ? ds[r][c] * pairs.p.keep_scale : ds[r][c];
      sum += s[r][c];
      mean += s[r][c] * ds[r][c];
      if (!before_cap) slope[c] = 1.0f;
    }
    float delta = row.delta;
    if (pairs.KeysInOneTile(i, kR * 16)) {
      const unsigned lanes = 0xffffu << (threadIdx.x % 32 / 16 * 16);
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {
        sum += __shfl_xor_sync(lanes, sum, step);
        mean += __shfl_xor_sync(lanes, mean, step);
      }
      // Weights of large scores do not add up to 1: all have the error of their lse.
      sum += expf(sink - row.lse);
      delta += sum > 0.0f ? mean / sum : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kR; ++c) {
      // What is hidden stays 0 whatever the query's delta is.
      const bool none = !visible[c] || SeesOneKey(row.delta);
      ds[r][c] = none ? 0.0f : s[r][c] * (ds[r][c] - delta) * slope[c];
      if (!kept(r, c)) s[r][c] = 0.0f;
    }
  }
}

template <int kTile, int kR>
__device__ void SimtStoreWeights(float* to, const float (&w)[kR][kR]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < kR; ++r) {
#pragma unroll
    for (int c = 0; c < kR; ++c) to[(ty * kR + r) * kTile + tx + c * 16] = w[r][c];
  }
}

// dkey and dvalue of one tile of keys, from the queries of all heads that share them.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(kSimtThreads)
    Float32KeyGradKernel(const __grid_constant__ AttentionProblem p,
                         const __grid_constant__ SimtTensors tensors, const AttentionRow* rows,
                         float* dkey, float* dvalue) {
  constexpr int kTile = SimtTile<kDim>::kGrad, kR = kTile / 16;
  extern __shared__ __align__(1024) char shared[];
  float* const keys = reinterpret_cast<float*>(shared);
  float* const values = keys + kTile * kDim;
  float* const queries = values + kTile * kDim;
  float* const upstream = queries + kTile * kDim;
  float* const weights = upstream + kTile * kDim;
  float* const dweights = weights + kTile * kTile;

  const int64_t bh = blockIdx.x % (p.batch * p.kv_heads), b = bh / p.kv_heads;
  const int64_t kv_h = bh % p.kv_heads, group = p.heads / p.kv_heads;
  const int j0 = int(blockIdx.x / (p.batch * p.kv_heads)) * kTile;
  float dk[kR][kDim / 64][4] = {}, dv[kR][kDim / 64][4] = {};
  const AttentionPairs<float> any_head(p, b, 0);
  const int k_len = any_head.k_len;
  const int first = any_head.QueryBegin(j0) / kTile * kTile;
  const int query_end = any_head.QueryEnd(j0, kTile);
  if (j0 < k_len) {
    tensors.key.Load<kTile, kDim>(keys, b, kv_h, j0, k_len);
    tensors.value.Load<kTile, kDim>(values, b, kv_h, j0, k_len);
  }
  for (int64_t h = kv_h * group; h < (kv_h + 1) * group && j0 < k_len; ++h) {
    const AttentionPairs<float> pairs(p, b, h);
    const PairDropout<kDropout> dropout(p, b, h);
    for (int i0 = first; i0 < query_end; i0 += kTile) {
      __syncthreads();
      tensors.query.Load<kTile, kDim>(queries, b, h, i0, pairs.q_len);
      tensors.doutput.Load<kTile, kDim>(upstream, b, h, i0, pairs.q_len);
      __syncthreads();
      float s[kR][kR], ds[kR][kR];
      SimtPairGrads<kDim>(s, ds, pairs, dropout, rows + (b * p.heads + h) * p.seq_q, queries, keys,
                          upstream, values, h, i0, j0, true);
      SimtStoreWeights<kTile>(weights, s);
      SimtStoreWeights<kTile>(dweights, ds);
      __syncthreads();
      const bool poisoned = pairs.HidesValid(i0, kTile, j0, kTile) &&
                            __syncthreads_or(SimtHasNonFinite<kTile, kDim>(queries) |
                                             SimtHasNonFinite<kTile, kDim>(upstream));
      const auto visible = [&](int row, int k) { return pairs.Visible(i0 + k, j0 + row); };
      SimtAccumulate<kDim, kTile, true>(dv, weights, upstream, poisoned, visible);
      SimtAccumulate<kDim, kTile, true>(dk, dweights, queries, poisoned, visible);
    }
  }
  float dk_scale[kR], dv_scale[kR];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    // Padding may have met NaN in products of zeros.
    const bool valid = j0 + int(threadIdx.x / 16) * kR + r < k_len;
    dk_scale[r] = valid ? p.scale : 0.0f;
    dv_scale[r] = valid ? p.keep_scale : 0.0f;
  }
  const int64_t row = (b * p.seq_k + j0) * p.kv_heads + kv_h;
  SimtStore<kDim>(dk, dk_scale, dkey + row * p.head_dim, p.kv_heads * p.head_dim, int(p.head_dim),
                  int(p.seq_k) - j0);
  SimtStore<kDim>(dv, dv_scale, dvalue + row * p.value_dim, p.kv_heads * p.value_dim,
                  int(p.value_dim), int(p.seq_k) - j0);
}

// dquery of one tile of queries.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(kSimtThreads)
    Float32QueryGradKernel(const __grid_constant__ AttentionProblem p,
                           const __grid_constant__ SimtTensors tensors, const AttentionRow* rows,
                           float* dquery) {
  constexpr int kTile = SimtTile<kDim>::kGrad, kR = kTile / 16;
  extern __shared__ __align__(1024) char shared[];
  float* const keys = reinterpret_cast<float*>(shared);
  float* const values = keys + kTile * kDim;
  float* const queries = values + kTile * kDim;
  float* const upstream = queries + kTile * kDim;
  float* const dweights = upstream + kTile * kDim;

  const int64_t bh = blockIdx.x % (p.batch * p.heads), b = bh / p.heads, h = bh % p.heads;
  const int64_t tiles = (p.seq_q + kTile - 1) / kTile;
  const int64_t kv_h = h / (p.heads / p.kv_heads);
  const int i0 = int(tiles - 1 - blockIdx.x / (p.batch * p.heads)) * kTile;
  const AttentionPairs<float> pairs(p, b, h);
  const PairDropout<kDropout> dropout(p, b, h);
  float dq[kR][kDim / 64][4] = {};
  const int key_end = pairs.KeyEnd(i0, kTile);
  if (key_end > 0) {
    tensors.query.Load<kTile, kDim>(queries, b, h, i0, pairs.q_len);
    tensors.doutput.Load<kTile, kDim>(upstream, b, h, i0, pairs.q_len);
  }
  for (int j0 = pairs.KeyBegin(i0) / kTile * kTile; j0 < key_end; j0 += kTile) {
    __syncthreads();
    tensors.key.Load<kTile, kDim>(keys, b, kv_h, j0, pairs.k_len);
    tensors.value.Load<kTile, kDim>(values, b, kv_h, j0, pairs.k_len);
    __syncthreads();
    float s[kR][kR], ds[kR][kR];
    SimtPairGrads<kDim>(s, ds, pairs, dropout, rows + (b * p.heads + h) * p.seq_q, queries, keys,
                        upstream, values, h, i0, j0, true);
    SimtStoreWeights<kTile>(dweights, ds);
    __syncthreads();
    const bool poisoned = pairs.HidesValid(i0, kTile, j0, kTile) &&
                          __syncthreads_or(SimtHasNonFinite<kTile, kDim>(keys));
    SimtAccumulate<kDim, kTile, false>(dq, dweights, keys, poisoned, [&](int row, int k) {
      return pairs.Visible(i0 + row, j0 + k);
    });
  }
  float scale[kR];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    scale[r] = i0 + int(threadIdx.x / 16) * kR + r < pairs.q_len ? p.scale : 0.0f;
  }
  SimtStore<kDim>(dq, scale, dquery + ((b * p.seq_q + i0) * p.heads + h) * p.head_dim,
                  p.heads * p.head_dim, int(p.head_dim), int(p.seq_q) - i0);
}

// The gradient of one tile of the bias: the block goes through its share of what repeats it.
template <int kDim, bool kDropout>
__global__ void __launch_bounds__(kSimtThreads)
    Float32BiasGradKernel(const __grid_constant__ AttentionProblem p,
                          const __grid_constant__ SimtTensors tensors,
                          const __grid_constant__ AttentionGradients g) {
  constexpr int kTile = SimtTile<kDim>::kGrad, kR = kTile / 16;
  extern __shared__ __align__(1024) char shared[];
  float* const keys = reinterpret_cast<float*>(shared);
  float* const values = keys + kTile * kDim;
  float* const queries = values + kTile * kDim;
  float* const upstream = queries + kTile * kDim;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

  const BiasGradTile tile(p, g, kTile, kTile);
  float sum[kR][kR] = {};
  for (int64_t step = tile.begin; step < tile.end; ++step) {
    int64_t b, h;
    int i0, j0;
    tile.At(step, kTile, kTile, &b, &h, &i0, &j0);
    const AttentionPairs<float> pairs(p, b, h);
    if (j0 >= pairs.KeyEnd(i0, kTile) || j0 + kTile <= pairs.KeyBegin(i0)) continue;
    const PairDropout<kDropout> dropout(p, b, h);
    const int64_t kv_h = h / (p.heads / p.kv_heads);
    __syncthreads();
    tensors.query.Load<kTile, kDim>(queries, b, h, i0, pairs.q_len);
    tensors.key.Load<kTile, kDim>(keys, b, kv_h, j0, pairs.k_len);
    tensors.doutput.Load<kTile, kDim>(upstream, b, h, i0, pairs.q_len);
    tensors.value.Load<kTile, kDim>(values, b, kv_h, j0, pairs.k_len);
    __syncthreads();
    float s[kR][kR], ds[kR][kR];
    SimtPairGrads<kDim>(s, ds, pairs, dropout, g.rows + (b * p.heads + h) * p.seq_q, queries, keys,
                        upstream, values, h, i0, j0, false);
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int c = 0; c < kR; ++c) sum[r][c] += ds[r][c];
    }
  }
  __syncthreads();
  float* const result = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < kR; ++r) {
#pragma unroll
    for (int c = 0; c < kR; ++c) {
      result[(ty * kR + r) * (kTile + 1) + tx + c * 16] = sum[r][c];
    }
  }
  __syncthreads();
  tile.template Write<kTile, kTile, float>(result, p, g);
}

inline SimtTensors DescribeSimt(const AttentionProblem& p, const void* doutput) {
  const auto rows = [](const void* data, int64_t seq, int64_t heads, int64_t dim) {
    return SimtRows{static_cast<const float*>(data), seq, heads, dim,
                    RowsAligned<float>(data, dim)};
  };
  return {rows(p.query, p.seq_q, p.heads, p.head_dim), rows(p.key, p.seq_k, p.kv_heads, p.head_dim),
          rows(p.value, p.seq_k, p.kv_heads, p.value_dim),
          rows(doutput, p.seq_q, p.heads, p.value_dim)};
}

template <int kDim>
Status Float32Attention<kDim>::Forward(Gpu gpu, const AttentionProblem& p, void* output,
                                       float* lse) {
  constexpr int kTile = SimtTile<kDim>::kForward;
  return Launch(gpu,
                p.dropout_threshold ? Float32AttentionKernel<kDim, true>
                                    : Float32AttentionKernel<kDim, false>,
                (p.seq_q + kTile - 1) / kTile * p.batch * p.heads, kSimtThreads,
                SimtTile<kDim>::kForwardBytes, p, DescribeSimt(p, nullptr),
                static_cast<float*>(output), lse);
}

template <int kDim>
Status Float32Attention<kDim>::Grad(Gpu gpu, const AttentionProblem& p,
                                    const AttentionGradients& g) {
  constexpr int kTile = SimtTile<kDim>::kGrad, kBytes = SimtTile<kDim>::kGradBytes;
  const SimtTensors tensors = DescribeSimt(p, g.doutput);
  if (Status s = LaunchRows<float>(gpu, p, g, kTile); !s.ok()) return s;
  if (Status s = LaunchSinkGrad(gpu, p, g); !s.ok()) return s;
  const Status s = Launch(
      gpu,
      p.dropout_threshold ? Float32KeyGradKernel<kDim, true> : Float32KeyGradKernel<kDim, false>,
      (p.seq_k + kTile - 1) / kTile * p.batch * p.kv_heads, kSimtThreads, kBytes, p, tensors,
      g.rows, static_cast<float*>(g.dkey), static_cast<float*>(g.dvalue));
  if (!s.ok()) return s;
  return Launch(gpu,
                p.dropout_threshold ? Float32QueryGradKernel<kDim, true>
                                    : Float32QueryGradKernel<kDim, false>,
                (p.seq_q + kTile - 1) / kTile * p.batch * p.heads, kSimtThreads, kBytes, p, tensors,
                g.rows, static_cast<float*>(g.dquery));
}

template <int kDim>
Status Float32Attention<kDim>::BiasGrad(Gpu gpu, const AttentionProblem& p,
                                        const AttentionGradients& g) {
  constexpr int kTile = SimtTile<kDim>::kGrad, kBytes = SimtTile<kDim>::kGradBytes;
  if (Status s = LaunchRows<float>(gpu, p, g, kTile); !s.ok()) return s;
  const Status s = Launch(
      gpu,
      p.dropout_threshold ? Float32BiasGradKernel<kDim, true> : Float32BiasGradKernel<kDim, false>,
      BiasGradBlocks(p, g, kTile, kTile), kSimtThreads, kBytes, p, DescribeSimt(p, g.doutput), g);
  return s.ok() ? LaunchBiasGradSum<float>(gpu, g) : s;
}

}  // namespace tf_ops
