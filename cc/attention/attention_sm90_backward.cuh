// SPDX-License-Identifier: Apache-2.0
// Gradients of attention for sm_90a, without atomics: one kernel gives dK and dV, another dQ. Each
// computes the scores anew: seven matrix products in all where an atomic dQ needs five, but every
// sum has a fixed order and dQ needs no float32 copy in memory.
//
// Both are built like the forward kernel: a producer thread streams tiles by TMA, two consumer
// warpgroups own 64 rows of the result each, a storer thread sends finished tiles out.
//
//   KeyValueGrad: a tile is 128 keys of one key head. Per 64 queries of each of its heads, a
//   consumer computes S^T = K Q^T and dP^T = V dO^T, and with P^T and dS^T, which stay in registers
//   as operands, dV += P^T dO and dK += dS^T Q.
//   QueryGrad: a tile is 128 queries of one head. Per key block S = Q K^T, dP = dO V^T,
//   dQ += dS K.
//
// A kernel before them writes lse, in units of log2, and delta, padded to whole tiles; +inf
// stands where a query sees nothing or does not exist, which makes its probabilities 0.
#pragma once

#include "cc/attention/attention_sm90_key_grad.cuh"
#include "cc/attention/attention_sm90_one_key_grad.cuh"
#include "cc/attention/attention_sm90_query_grad.cuh"

namespace tf_ops {

template <typename T, int kHeadDim, bool kPrefix>
__global__ void __launch_bounds__(kSm90BackwardThreads, 1)
    KeyValueGradSm90Kernel(const __grid_constant__ Sm90BackwardArguments a,
                           const __grid_constant__ CUtensorMap query_map,
                           const __grid_constant__ CUtensorMap key_map,
                           const __grid_constant__ CUtensorMap value_map,
                           const __grid_constant__ CUtensorMap doutput_map,
                           const __grid_constant__ CUtensorMap row_terms_map,
                           const __grid_constant__ CUtensorMap dkey_map,
                           const __grid_constant__ CUtensorMap dvalue_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Config = Sm90KeyValueGrad<kHeadDim>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Config::template Shared<T>*>(memory);
  ForgetRows(shared.not_finite_q);
  ForgetRows(shared.not_finite_do);
  if (threadIdx.x == 0) {
    BarrierInit(&shared.full_kv, 1);
    BarrierInit(&shared.empty_kv, 1);
    for (int i = 0; i < 2; ++i) BarrierInit(&shared.full_out[i], 4);
    for (int i = 0; i < Config::kStages; ++i) {
      BarrierInit(&shared.full_q[i], 1);
      BarrierInit(&shared.full_do[i], 1);
      BarrierInit(&shared.empty_q[i], 8);
      BarrierInit(&shared.empty_do[i], 8);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    RegistersDown<kHeadDim == 128 ? 24 : 40>();
    if (threadIdx.x == 0) {
      ProduceKeyValueGrad<T, kHeadDim, kPrefix>(a, query_map, key_map, value_map, doutput_map,
                                                row_terms_map, shared);
    } else if (threadIdx.x == 32) {
      StoreKeyValueGrad<T, kHeadDim, kPrefix>(a, dkey_map, dvalue_map, shared);
    } else if (threadIdx.x >= 64) {
      ZeroKeyValueGrad<T, kHeadDim, kPrefix>(a);
    }
  } else {
    RegistersUp<kHeadDim == 128 ? 240 : 232>();
    if constexpr (!Config::kOneEach) {
      ConsumeKeyValueGrad<T, kHeadDim, kPrefix>(a, shared);
    } else {
      ConsumeOneKeyGrad<T, kHeadDim, kPrefix>(a, shared);
    }
  }
#endif
}

// One warp per query of one head; rows that are padding or see nothing get lse = +inf.
template <typename T>
__global__ void __launch_bounds__(256)
    RowTermsSm90Kernel(AttentionProblem p, Sm90KeyMasks key_masks, AttentionGradients g,
                       int padded_queries, float* lse_log2, float* delta) {
  const int64_t index = (blockIdx.x * int64_t{256} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t head = index % p.heads, row = index / p.heads % padded_queries;
  const int64_t batch = index / p.heads / padded_queries;
  if (batch >= p.batch) return;
  float sum = 0.0f, shift = INFINITY;
  if (row < p.seq_q) {
    const int64_t at = ((batch * p.seq_q + row) * p.heads + head) * p.value_dim;
    const T *output = static_cast<const T*>(g.output), *doutput = static_cast<const T*>(g.doutput);
    for (int i = lane; i < p.value_dim; i += 32) {
      sum += float(output[at + i]) * float(doutput[at + i]);
    }
    sum = WarpReduce(sum, Sum{});
    const int64_t of_row = (batch * p.heads + head) * p.seq_q + row;
    const float of_lse = g.dlse ? g.dlse[of_row] : 0.0f, lse = g.lse[of_row];
    const Sm90Visibility visibility(p, key_masks, int(batch));
    if (p.sink && lane == 0) {
      // A query that is none has an output of 0, whatever its upstream gradient.
      const float weight = lse == -INFINITY ? 0.0f : expf(p.sink[head] - lse);
      g.sink_terms[of_row] = row >= visibility.queries ? of_lse : -weight * (sum - of_lse);
    }
    sum -= of_lse;
    if (of_lse == 0.0f && !p.sink && visibility.SeesOneKey(int(row))) {
      sum = __uint_as_float(kOneKeyDelta);
    }
    if (lse != -INFINITY) shift = lse * kLog2E;
  }
  if (lane == 0) {
    const int64_t to = (batch * p.heads + head) * padded_queries + row;
    lse_log2[to] = shift;
    delta[to] = shift == INFINITY ? 0.0f : sum;
  }
}

template <typename T, int kHeadDim>
Status AttentionBackwardSm90(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g) {
  using KeyValueConfig = Sm90KeyValueGrad<kHeadDim>;
  using QueryConfig = Sm90QueryGrad<kHeadDim>;
  static_assert(sizeof(typename KeyValueConfig::template Shared<T>) <= 227 * 1024);
  static_assert(sizeof(typename QueryConfig::template Shared<T>) <= 227 * 1024);
  Sm90KeyMasks key_masks;
  if (Status s = MakeKeyMasks(gpu, p, g.key_masks, &key_masks); !s.ok()) return s;
  const int64_t padded_queries = Sm90PaddedQueries(p);
  float* const row_terms = reinterpret_cast<float*>(g.rows);
  float* const delta = row_terms + p.batch * p.heads * padded_queries;
  const int64_t warps = p.batch * p.heads * padded_queries;
  RowTermsSm90Kernel<T><<<unsigned((warps + 7) / 8), 256, 0, gpu.stream>>>(
      p, key_masks, g, int(padded_queries), row_terms, delta);
  if (Status s = CudaStatus(); !s.ok()) return s;

  CUtensorMap query_64, query_128, key_rows, value_rows, key_n, value_n, doutput_64, doutput_128;
  CUtensorMap dquery_64, dkey_64, dvalue_64, row_terms_map;
  const bool mapped =
      MakeRowMap(row_terms, 2 * p.batch * p.heads, padded_queries, KeyValueConfig::kQueries,
                 &row_terms_map) &&
      MakeTensorMap<T>(p.query, p.head_dim, p.heads, p.seq_q, p.batch, 64, &query_64) &&
      MakeTensorMap<T>(p.query, p.head_dim, p.heads, p.seq_q, p.batch, 128, &query_128) &&
      MakeTensorMap<T>(p.key, p.head_dim, p.kv_heads, p.seq_k, p.batch, KeyValueConfig::kKeys,
                       &key_rows) &&
      MakeTensorMap<T>(p.value, p.value_dim, p.kv_heads, p.seq_k, p.batch, KeyValueConfig::kKeys,
                       &value_rows) &&
      MakeTensorMap<T>(p.key, p.head_dim, p.kv_heads, p.seq_k, p.batch, QueryConfig::kKeys,
                       &key_n) &&
      MakeTensorMap<T>(p.value, p.value_dim, p.kv_heads, p.seq_k, p.batch, QueryConfig::kKeys,
                       &value_n) &&
      MakeTensorMap<T>(g.doutput, p.value_dim, p.heads, p.seq_q, p.batch, 64, &doutput_64) &&
      MakeTensorMap<T>(g.doutput, p.value_dim, p.heads, p.seq_q, p.batch, 128, &doutput_128) &&
      MakeTensorMap<T>(g.dquery, p.head_dim, p.heads, p.seq_q, p.batch, 64, &dquery_64) &&
      MakeTensorMap<T>(g.dkey, p.head_dim, p.kv_heads, p.seq_k, p.batch, 64, &dkey_64) &&
      MakeTensorMap<T>(g.dvalue, p.value_dim, p.kv_heads, p.seq_k, p.batch, 64, &dvalue_64);
  if (!mapped) return Internal("dot_product_attention: cuTensorMapEncodeTiled failed");

  Sm90BackwardArguments a{p, key_masks, row_terms, delta, g.doutput, g.dquery, g.dkey, g.dvalue};
  a.padded_queries = int(padded_queries);
  const int64_t row_bytes = (p.head_dim + p.value_dim) * int64_t{sizeof(T)};
  const auto launch = [&](auto* kernel, int shared_bytes, int64_t heads, int64_t rows,
                          int rows_per_tile, int64_t bytes_per_head, auto... maps) {
    a.row_blocks = int((rows + rows_per_tile - 1) / rows_per_tile);
    a.tiles = int(p.batch * heads) * a.row_blocks;
    a.heads_per_group = HeadsPerGroup(bytes_per_head, p.batch * heads);
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        error != cudaSuccess) {
      return Internal(cudaGetErrorString(error));
    }
    kernel<<<std::min(CurrentDevice().multiprocessors, a.tiles), kSm90BackwardThreads, shared_bytes,
             gpu.stream>>>(a, maps...);
    return CudaStatus();
  };
  const int64_t group_size = p.heads / p.kv_heads;
  const bool prefix = SeesPrefixes(p);
  if (Status s = launch(prefix ? KeyValueGradSm90Kernel<T, kHeadDim, true>
                               : KeyValueGradSm90Kernel<T, kHeadDim, false>,
                        sizeof(typename KeyValueConfig::template Shared<T>), p.kv_heads, p.seq_k,
                        KeyValueConfig::kKeys, p.seq_q * row_bytes * group_size, query_64, key_rows,
                        value_rows, doutput_64, row_terms_map, dkey_64, dvalue_64);
      !s.ok()) {
    return s;
  }
  return launch(
      prefix ? QueryGradSm90Kernel<T, kHeadDim, true> : QueryGradSm90Kernel<T, kHeadDim, false>,
      sizeof(typename QueryConfig::template Shared<T>), p.heads, p.seq_q, QueryConfig::kQueries,
      p.seq_k * row_bytes / group_size, query_128, key_n, value_n, doutput_128, dquery_64);
}

}  // namespace tf_ops
