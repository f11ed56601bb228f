// SPDX-License-Identifier: Apache-2.0
// Attention of 16-bit types on tensor cores: the forward pass. Its gradients follow the same
// plan and are in attention_sm80_grad.cuh.
#pragma once

#include "cc/attention/attention_pairs.cuh"
#include "cc/common/tile.cuh"

namespace tf_ops {

// A block's queries, the keys of one step, and warps. 32 queries a warp use each loaded key
// twice; at 256 elements they would not fit into registers, nor 128 keys beside a dropout.
template <int kDim, bool kDropout>
struct ForwardTile {
  static constexpr int kRows = kDim == 256 ? 64 : 128;
  static constexpr int kKeys = kDim == 64 && !kDropout ? 128 : 64;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kM = kRows / kWarps / 16;
};

// The element of tensor [batch, seq, heads, dim] where row `i` begins.
template <typename T>
__device__ T* RowOf(T* tensor, int64_t b, int64_t seq, int64_t i, int64_t heads, int64_t h,
                    int64_t dim) {
  return tensor + ((b * seq + i) * heads + h) * dim;
}

// The block's tile among `tiles` of each of `heads` heads. Under is_causal `descending` tells
// whether the last tile is the longest: the longest of all heads come first.
struct BlockIndex {
  int64_t tile, head;
  __device__ BlockIndex(int64_t tiles, int64_t heads, bool is_causal, bool descending) {
    if (is_causal) {
      tile = blockIdx.x / heads;
      head = blockIdx.x % heads;
      if (descending) tile = tiles - 1 - tile;
    } else {
      tile = blockIdx.x % tiles;
      head = blockIdx.x / tiles;
    }
  }
};

// Which of kM x kN fragments of scores the dropout keeps; the first has its corner at (row,
// column), which are query and key, or key and query if kTransposed. A draw of Philox is for four
// keys, which two lanes have side by side for two rows of queries, or four lanes one above the
// other for two keys and two queries. They share the draws, so that there are no more of them
// than a fourth of the scores.
template <int kM, int kN, bool kTransposed, bool kDropout>
class KeptPairs {
 public:
  __device__ KeptPairs(const PairDropout<kDropout>& dropout, int row, int column) {
    if constexpr (!kDropout) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n0 = 0; n0 < kN; n0 += 8) {
        uint32_t own = 0;  // four bits of each fragment
#pragma unroll
        for (int n = n0; n < kN && n < n0 + 8; ++n) {
          const int i = row + m * 16, j = column + n * 8;
          own |= (kTransposed ? dropout.KeptOfFour(j + t * 2 + g % 2, i + g / 2 % 2 * 8 + (g & 4))
                              : dropout.KeptOfFour(i + t % 2 * 8 + g, j + (t & 2) * 2))
                 << (n - n0) * 4;
        }
#pragma unroll
        for (int k = 0; k < kDraws; ++k) {
          bits_[m][n0 / 8][k] = kTransposed
                                    ? __shfl_sync(0xffffffff, own, (lane & ~12) | k << 2) >> g % 4
                                    : __shfl_sync(0xffffffff, own, (lane & ~1) | k) >> t % 2 * 2;
        }
      }
    }
  }
  __device__ bool operator()(int m, int n, int e) const {
    if constexpr (!kDropout) return true;
    const uint32_t bits = bits_[m][n / 8][kTransposed ? e : e / 2];
    return bits >> (n % 8 * 4 + (kTransposed ? 0 : e % 2)) & 1;
  }

 private:
  static constexpr int kDraws = kTransposed ? 4 : 2;
  uint32_t bits_[kM][(kN + 7) / 8][kDraws];
};

// One block per tile of queries, which stay in shared memory; keys and values are streamed, one
// tile of each, the next keys arriving while values are used and the other way about. A warp
// owns its queries' scores, softmax and outputs, all in registers.
template <typename T, int kDim, bool kPlain, bool kDropout>
__global__ void __launch_bounds__(ForwardTile<kDim, kDropout>::kThreads)
    AttentionKernel(const __grid_constant__ AttentionProblem p, bool key_aligned,
                    bool value_aligned, T* output, float* lse) {
  using Tile = ForwardTile<kDim, kDropout>;
  constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kM = Tile::kM;
  constexpr int kThreads = Tile::kThreads;
  extern __shared__ __align__(1024) char shared[];
  T* const queries = reinterpret_cast<T*>(shared);
  T* const keys = queries + kRows * kDim;
  T* const values = keys + kKeys * kDim;

  const BlockIndex block((p.seq_q + kRows - 1) / kRows, p.batch * p.heads, p.is_causal, true);
  const int64_t b = block.head / p.heads, h = block.head % p.heads;
  const int64_t kv_h = h / (p.heads / p.kv_heads);
  const int q0 = int(block.tile) * kRows;
  const int warp_row = threadIdx.x / 32 * kM * 16, lane = threadIdx.x % 32;
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);
  const int64_t key_stride = p.kv_heads * p.head_dim, value_stride = p.kv_heads * p.value_dim;
  const T* const key =
      RowOf(static_cast<const T*>(p.key), b, p.seq_k, 0, p.kv_heads, kv_h, p.head_dim);
  const T* const value =
      RowOf(static_cast<const T*>(p.value), b, p.seq_k, 0, p.kv_heads, kv_h, p.value_dim);
  const AttentionPairs<T, kPlain> pairs(p, b, h);
  const PairDropout<kDropout> dropout(p, b, h);
  // Scores in base 2 are `factor` times a product, or of Score().
  const float factor = kPlain ? p.scale * kLog2e : 1.0f;

  float o[kM][kDim / 8][4] = {};
  float max[kM][2], sum[kM][2];  // of a lane's rows; the sum of its own columns
  const float sink = p.sink ? p.sink[h] * kLog2e : -INFINITY;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    max[m][0] = max[m][1] = sink;
    sum[m][0] = sum[m][1] = p.sink && lane % 4 == 0 ? 1.0f : 0.0f;
  }

  const int key_begin = pairs.KeyBegin(q0) / kKeys * kKeys, key_end = pairs.KeyEnd(q0, kRows);
  const auto load_keys = [&](int k0) {
    LoadTile<kKeys, kDim, kThreads>(keys, key + k0 * key_stride, key_stride, head_dim,
                                    pairs.k_len - k0, key_aligned);
  };
  if (key_begin < key_end) {
    LoadTile<kRows, kDim, kThreads>(
        queries, RowOf(static_cast<const T*>(p.query), b, p.seq_q, q0, p.heads, h, p.head_dim),
        p.heads * p.head_dim, head_dim, pairs.q_len - q0, key_aligned);
    load_keys(key_begin);
  }
  for (int k0 = key_begin; k0 < key_end; k0 += kKeys) {
    WaitForCopies();
    __syncthreads();  // The keys are there, the values no longer used.
    LoadTile<kKeys, kDim, kThreads>(values, value + k0 * value_stride, value_stride, value_dim,
                                    pairs.k_len - k0, value_aligned);
    float s[kM][kKeys / 8][4] = {};
    MultiplyRows<T, kDim>(s, queries, warp_row, keys, 0);
    WaitForCopies();
    __syncthreads();  // The values are there, the keys no longer used.
    if (k0 + kKeys < key_end) load_keys(k0 + kKeys);

    const bool hides = pairs.HidesSome(q0, kRows, k0, kKeys);
    if (!kPlain || hides) {
      const int i0 = q0 + warp_row + lane / 4, j0 = k0 + lane % 4 * 2;
      ForEachElement<kM, kKeys / 8>([&](int m, int n, int e) {
        const int i = Opaque(i0) + m * 16 + e / 2 * 8, j = j0 + n * 8 + e % 2;
        float& x = s[m][n][e];
        [[maybe_unused]] float slope;
        if (hides && !pairs.Visible(i, j)) {
          x = -INFINITY;
        } else if constexpr (!kPlain) {
          x = pairs.Score(x, i, j, &slope);
        }
      });
    }

#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float row_max = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          row_max = fmaxf(row_max, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 2));
        const float new_max = fmaxf(max[m][r], row_max * factor);
        // Nothing seen yet: not inf - inf.
        const float base = new_max == -INFINITY ? 0.0f : new_max;
        const float rescale = Exp2(max[m][r] - base);
        max[m][r] = new_max;
        sum[m][r] *= rescale;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          o[m][d][r * 2] *= rescale;
          o[m][d][r * 2 + 1] *= rescale;
        }
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = r * 2; e < r * 2 + 2; ++e) {
            s[m][n][e] = Exp2(fmaf(s[m][n][e], factor, -base));
            sum[m][r] += s[m][n][e];
          }
        }
      }
    }
    if constexpr (kDropout) {
      const KeptPairs<kM, kKeys / 8, false, kDropout> kept(dropout, q0 + warp_row, k0);
      ForEachElement<kM, kKeys / 8>([&](int m, int n, int e) {
        if (!kept(m, n, e)) s[m][n][e] = 0.0f;
      });
    }
    uint32_t weights[kM][kKeys / 16][4];
    PackFragments<T>(weights, s);

    // 0 * NaN must not bring a value to a row that does not see it.
    bool poisoned = false;
    if (pairs.HidesValid(q0, kRows, k0, kKeys)) {
      poisoned = __syncthreads_or(ClearNonFinite<kKeys, kDim, kThreads>(values));
    }
    if (poisoned) {
      const int i0 = Opaque(q0 + warp_row);
      AddNonFinite<T, kDim>(o, weights, value + k0 * value_stride, value_stride, value_dim,
                            pairs.k_len - k0,
                            [&](int row, int k) { return pairs.Visible(i0 + row, k0 + k); });
    }
    MultiplyColumns<T, kDim>(o, weights, values, 0);
  }

  const int i0 = q0 + warp_row;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[m][r] += __shfl_xor_sync(0xffffffff, sum[m][r], 1);
      sum[m][r] += __shfl_xor_sync(0xffffffff, sum[m][r], 2);
      const int row = m * 16 + r * 8 + lane / 4;
      const bool empty = sum[m][r] == 0.0f;
      if (lane % 4 == 0 && i0 + row < p.seq_q) {
        const bool is_sink = p.sink && sum[m][r] == 1.0f && max[m][r] == sink;
        lse[(b * p.heads + h) * p.seq_q + i0 + row] = empty ? -INFINITY
                                                      : is_sink
                                                          ? p.sink[h]
                                                          : (max[m][r] + log2f(sum[m][r])) * kLn2;
      }
      // Padded queries may have met NaN in products of zeros.
      sum[m][r] = empty || i0 + row >= pairs.q_len ? 0.0f : p.keep_scale / sum[m][r];
    }
  }
  StoreRows<T>(o, sum, RowOf(output, b, p.seq_q, i0, p.heads, h, p.value_dim),
               p.heads * p.value_dim, value_dim, int(p.seq_q) - i0);
}

template <typename T, int kDim, bool kPlain, bool kDropout>
Status LaunchForward(Gpu gpu, const AttentionProblem& p, void* output, float* lse) {
  using Tile = ForwardTile<kDim, kDropout>;
  const int64_t tiles = (p.seq_q + Tile::kRows - 1) / Tile::kRows;
  return Launch(gpu, AttentionKernel<T, kDim, kPlain, kDropout>, tiles * p.batch * p.heads,
                Tile::kThreads, (Tile::kRows + 2 * Tile::kKeys) * kDim * int(sizeof(T)), p,
                RowsAligned<T>(p.query, p.head_dim) && RowsAligned<T>(p.key, p.head_dim),
                RowsAligned<T>(p.value, p.value_dim), static_cast<T*>(output), lse);
}

template <typename T, int kDim>
Status TensorCoreAttention<T, kDim>::Forward(Gpu gpu, const AttentionProblem& p, void* output,
                                             float* lse) {
  if (p.dropout_threshold) return LaunchForward<T, kDim, false, true>(gpu, p, output, lse);
  return IsPlain(p) ? LaunchForward<T, kDim, true, false>(gpu, p, output, lse)
                    : LaunchForward<T, kDim, false, false>(gpu, p, output, lse);
}

}  // namespace tf_ops
