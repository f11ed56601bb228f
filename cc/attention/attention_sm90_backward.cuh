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

#include "cc/attention/attention_sm90.cuh"

namespace tf_ops {

struct Sm90BackwardArguments {
  AttentionProblem problem;
  const float *lse_log2, *delta;  // [batch, heads, padded_queries], the second after the first
  void *dquery, *dkey, *dvalue;
  int padded_queries;
  int row_blocks, tiles, heads_per_group;
};

template <int kHeadDim>
struct Sm90KeyValueGrad {
  static constexpr int kKeys = 128, kQueries = 64, kStages = 2;
  template <typename T>
  struct Shared {
    T k[kKeys * kHeadDim], v[kKeys * kHeadDim];
    T q[kStages][kQueries * kHeadDim], d_o[kStages][kQueries * kHeadDim];
    float lse[kStages][kQueries], delta[kStages][kQueries];
    uint64_t full_kv, empty_kv, full_out[2];
    uint64_t full_q[kStages], full_do[kStages], empty[kStages];
    int nearest_q[2][kHeadDim], nearest_do[2][kHeadDim];
  };
};

template <int kHeadDim>
struct Sm90QueryGrad {
  static constexpr int kQueries = 128, kStages = 2;
  static constexpr int kKeys = kHeadDim <= 64 ? 128 : 96;  // registers
  template <typename T>
  struct Shared {
    T q[kQueries * kHeadDim], d_o[kQueries * kHeadDim];
    T k[kStages][kKeys * kHeadDim], v[kStages][kKeys * kHeadDim];
    uint64_t full_q, empty_q, full_out[2];
    uint64_t full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
    int nearest[2][kHeadDim];
  };
};

constexpr int kSm90BackwardThreads = 384;

// Which tile an index is: rows of one head, heads within a group whose data fits in L2.
struct Sm90HeadRows {
  int batch, head, first_row;
  __device__ Sm90HeadRows(const Sm90BackwardArguments& a, int index, int heads, int rows_per_tile,
                          bool backwards) {
    const int batch_heads = int(a.problem.batch) * heads;
    const int group = index / (a.heads_per_group * a.row_blocks);
    const int in_group = min(a.heads_per_group, batch_heads - group * a.heads_per_group);
    const int within = index - group * a.heads_per_group * a.row_blocks;
    const int batch_head = group * a.heads_per_group + within % in_group;
    const int block = within / in_group;
    batch = batch_head / heads;
    head = batch_head % heads;
    first_row = (backwards ? a.row_blocks - 1 - block : block) * rows_per_tile;
  }
};

// The work of one KeyValueGrad tile: its queries start at first_query, a multiple of 64.
struct Sm90KeyTile : Sm90HeadRows, Sm90Visibility {
  int first_query, steps_per_head;
  template <int kHeadDim>
  static __device__ Sm90KeyTile At(const Sm90BackwardArguments& a, int index) {
    using Config = Sm90KeyValueGrad<kHeadDim>;
    const Sm90HeadRows rows(a, index, int(a.problem.kv_heads), Config::kKeys, false);
    Sm90KeyTile tile{rows, Sm90Visibility(a.problem, rows.batch)};
    // Under causality the first key of the tile is seen from query key - diagonal + 1 on.
    const int first = max(tile.first_row - tile.diagonal + 1, 0);
    tile.first_query = first / Config::kQueries * Config::kQueries;
    const int queries = tile.first_row < tile.keys ? tile.queries - tile.first_query : 0;
    tile.steps_per_head = max(queries + Config::kQueries - 1, 0) / Config::kQueries;
    return tile;
  }
};

struct Sm90QueryTile : Sm90HeadRows, Sm90Visibility {
  int blocks;
  template <int kHeadDim>
  static __device__ Sm90QueryTile At(const Sm90BackwardArguments& a, int index) {
    using Config = Sm90QueryGrad<kHeadDim>;
    const Sm90HeadRows rows(a, index, int(a.problem.heads), Config::kQueries, true);
    Sm90QueryTile tile{rows, Sm90Visibility(a.problem, rows.batch)};
    const int last_row = min(tile.first_row + Config::kQueries, tile.queries) - 1;
    const int seen = last_row < tile.first_row ? 0 : max(tile.Limit(last_row), 0);
    tile.blocks = (seen + Config::kKeys - 1) / Config::kKeys;
    return tile;
  }
};

// ---- dK and dV

template <typename T, int kHeadDim>
__device__ __forceinline__ void ProduceKeyValueGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& query_map, const CUtensorMap& key_map,
    const CUtensorMap& value_map, const CUtensorMap& doutput_map, const CUtensorMap& row_terms_map,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  const int group_size = int(a.problem.heads / a.problem.kv_heads);
  RingPosition at;
  uint32_t tile_parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim>(a, index);
    if (tile.steps_per_head == 0) continue;
    BarrierWait(&shared.empty_kv, tile_parity ^ 1);
    tile_parity ^= 1;
    BarrierExpectBytes(&shared.full_kv, sizeof shared.k + sizeof shared.v);
    LoadPanels<kHeadDim>(shared.k, Config::kKeys, key_map, &shared.full_kv, tile.head,
                         tile.first_row, tile.batch);
    LoadPanels<kHeadDim>(shared.v, Config::kKeys, value_map, &shared.full_kv, tile.head,
                         tile.first_row, tile.batch);
    for (int head = tile.head * group_size; head < (tile.head + 1) * group_size; ++head) {
      const int row = tile.batch * int(a.problem.heads) + head;
      for (int step = 0; step < tile.steps_per_head; ++step) {
        const int query = tile.first_query + step * Config::kQueries;
        BarrierWait(&shared.empty[at.stage], at.parity ^ 1);
        BarrierExpectBytes(&shared.full_q[at.stage], sizeof shared.q[0] + sizeof shared.lse[0]);
        LoadPanels<kHeadDim>(shared.q[at.stage], Config::kQueries, query_map,
                             &shared.full_q[at.stage], head, query, tile.batch);
        TmaLoad(shared.lse[at.stage], row_terms_map, &shared.full_q[at.stage], query, row);
        BarrierExpectBytes(&shared.full_do[at.stage],
                           sizeof shared.d_o[0] + sizeof shared.delta[0]);
        LoadPanels<kHeadDim>(shared.d_o[at.stage], Config::kQueries, doutput_map,
                             &shared.full_do[at.stage], head, query, tile.batch);
        TmaLoad(shared.delta[at.stage], row_terms_map, &shared.full_do[at.stage], query,
                int(a.problem.batch * a.problem.heads) + row);
        at.Advance<Config::kStages>();
      }
    }
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void StoreKeyValueGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& dkey_map, const CUtensorMap& dvalue_map,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  uint32_t parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim>(a, index);
    if (tile.steps_per_head == 0) continue;
#pragma unroll 1
    for (int consumer = 0; consumer < 2; ++consumer) {
      BarrierWait(&shared.full_out[consumer], parity);
      StorePanels<kHeadDim>(dkey_map, shared.k + consumer * 64 * kPanelCols, Config::kKeys,
                            tile.head, tile.first_row + consumer * 64, tile.batch);
      StorePanels<kHeadDim>(dvalue_map, shared.v + consumer * 64 * kPanelCols, Config::kKeys,
                            tile.head, tile.first_row + consumer * 64, tile.batch);
    }
    TmaStoreWaitRead();
    BarrierArrive(&shared.empty_kv);
    parity ^= 1;
  }
  TmaStoreWait();
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void ConsumeKeyValueGrad(
    const Sm90BackwardArguments& a,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  const AttentionProblem& p = a.problem;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row_in_tile = 64 * consumer + 16 * warp + lane / 4;
  const int group_size = int(p.heads / p.kv_heads);
  const float scale_log2 = p.scale * kLog2E;
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  constexpr int kKeyPanel = Config::kKeys * kPanelRowBytes;
  constexpr int kQueryPanel = Config::kQueries * kPanelRowBytes;
  float dk[kHeadDim / 2], dv[kHeadDim / 2], s[Config::kQueries / 2], dp[Config::kQueries / 2];
  uint32_t p_operand[Config::kQueries / 16][4], ds_operand[Config::kQueries / 16][4];

  // d = A B^T for 64 of the tile's keys and a step's queries.
  const auto products_over_dim = [&](float (&d)[Config::kQueries / 2], const T* keys,
                                     const T* queries) {
    const uint64_t key_rows = PanelDescriptor(keys + consumer * 64 * kPanelCols);
    const uint64_t query_rows = PanelDescriptor(queries);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint64_t within = step % 4 * kStepKMajor;
      Wgmma<T, false>(d, key_rows + step / 4 * (kKeyPanel / 16) + within,
                      query_rows + step / 4 * (kQueryPanel / 16) + within, step > 0);
    }
    WgmmaCommit();
  };
  const auto add_over_queries = [&](float (&d)[kHeadDim / 2],
                                    const uint32_t (&operand)[Config::kQueries / 16][4],
                                    const T* queries, bool accumulate) {
    const uint64_t rows = PanelDescriptor(queries, kQueryPanel);
#pragma unroll
    for (int step = 0; step < Config::kQueries / 16; ++step) {
      Wgmma<T, true>(d, operand[step], rows + step * kStepMnMajor, accumulate || step > 0);
    }
    WgmmaCommit();
  };

  RingPosition at;
  uint32_t tile_parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim>(a, index);
    if (tile.steps_per_head == 0) {
      const int row = tile.first_row + 64 * consumer;
      ZeroRows<T>(a.dkey, tile.batch, p.seq_k, p.kv_heads, p.head_dim, tile.head, row);
      ZeroRows<T>(a.dvalue, tile.batch, p.seq_k, p.kv_heads, p.value_dim, tile.head, row);
      continue;
    }
    // A thread's two keys are seen by the queries from first_visible on.
    int first_visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = tile.first_row + row_in_tile + 8 * r;
      first_visible[r] = key < tile.keys ? key - tile.diagonal + 1 : tile.queries;
    }
    // From this query on, all keys of a range are seen: the consumer's 64, the tile's 128.
    const auto all_visible_from = [&](int last_key) {
      return last_key < tile.keys ? last_key - tile.diagonal + 1 : tile.queries;
    };
    const int all_visible = all_visible_from(tile.first_row + 64 * consumer + 63);
    const int tile_all_visible = all_visible_from(tile.first_row + Config::kKeys - 1);

    BarrierWait(&shared.full_kv, tile_parity);
    tile_parity ^= 1;
    const int steps = tile.steps_per_head * group_size;
    int query = tile.first_query;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      BarrierWait(&shared.full_q[at.stage], at.parity);
      BarrierWait(&shared.full_do[at.stage], at.parity);
      Pin(s);
      Pin(dp);
      WgmmaFence();
      products_over_dim(s, shared.k, shared.q[at.stage]);
      products_over_dim(dp, shared.v, shared.d_o[at.stage]);
      WgmmaWait<1>();
      Pin(s);
      const float* lse = shared.lse[at.stage] + lane % 4 * 2;
      const float* delta = shared.delta[at.stage] + lane % 4 * 2;
#pragma unroll
      for (int g = 0; g < Config::kQueries / 8; ++g) {
        const float2 shift = *reinterpret_cast<const float2*>(lse + 8 * g);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          s[4 * g + 2 * r] = Exp2(s[4 * g + 2 * r] * scale_log2 - shift.x);
          s[4 * g + 2 * r + 1] = Exp2(s[4 * g + 2 * r + 1] * scale_log2 - shift.y);
        }
      }
      const bool masked = query < all_visible || query + Config::kQueries > tile.queries;
      if (masked) {
#pragma unroll
        for (int i = 0; i < Config::kQueries / 2; ++i) {
          const int column = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (column < first_visible[i / 2 % 2] || column >= tile.queries) s[i] = 0.0f;
        }
      }
      PackOperand<T>(s, p_operand);
      // Where some key is not seen by all queries, both operands of the next products are cleared
      // of NaN and Inf, once both consumers have read them.
      bool cleared_do = false, cleared_q = false;
      if (query < tile_all_visible || query + Config::kQueries > tile.queries) {
        WgmmaWait<0>();
        NamedBarrierSync(8, 256);
        cleared_do = ClearNonFinite<Config::kQueries, kHeadDim, 256, false>(
            shared.d_o[at.stage], shared.nearest_do, tile.queries - query);
        cleared_q = ClearNonFinite<Config::kQueries, kHeadDim, 256, false>(
            shared.q[at.stage], shared.nearest_q, tile.queries - query);
      }
      Pin(dv);
      WgmmaFence();
      add_over_queries(dv, p_operand, shared.d_o[at.stage], step > 0);
      WgmmaWait<1>();  // for dP; dV goes on
      Pin(dp);
#pragma unroll
      for (int g = 0; g < Config::kQueries / 8; ++g) {
        const float2 d = *reinterpret_cast<const float2*>(delta + 8 * g);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          dp[4 * g + 2 * r] = s[4 * g + 2 * r] * (dp[4 * g + 2 * r] - d.x);
          dp[4 * g + 2 * r + 1] = s[4 * g + 2 * r + 1] * (dp[4 * g + 2 * r + 1] - d.y);
        }
      }
      if (masked) {
#pragma unroll
        for (int i = 0; i < Config::kQueries / 2; ++i) {
          // Not 0 times what may be NaN.
          if (s[i] == 0.0f || SeesOneKey(delta[i / 4 * 8 + i % 2])) dp[i] = 0.0f;
        }
      }
      PackOperand<T>(dp, ds_operand);
      Pin(dk);
      WgmmaFence();
      add_over_queries(dk, ds_operand, shared.q[at.stage], step > 0);
      WgmmaWait<0>();
      Pin(dk);
      Pin(dv);
      const auto sees = [&](int r, int row) { return query + row >= first_visible[r]; };
      if (cleared_do) SpreadNonFinite<kHeadDim, 256, false>(dv, shared.nearest_do, sees);
      if (cleared_q) SpreadNonFinite<kHeadDim, 256, false>(dk, shared.nearest_q, sees);
      release(&shared.empty[at.stage]);
      at.Advance<Config::kStages>();
      query += Config::kQueries;
      if (query >= tile.first_query + tile.steps_per_head * Config::kQueries) {
        query = tile.first_query;  // of the next head
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] *= p.scale;
    WritePanels<T, kHeadDim>(dk, reinterpret_cast<char*>(shared.k) + row_in_tile * kPanelRowBytes,
                             kKeyPanel, lane);
    WritePanels<T, kHeadDim>(dv, reinterpret_cast<char*>(shared.v) + row_in_tile * kPanelRowBytes,
                             kKeyPanel, lane);
    release(&shared.full_out[consumer]);
  }
}

template <typename T, int kHeadDim>
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
  ForgetNonFinite<false>(shared.nearest_q);
  ForgetNonFinite<false>(shared.nearest_do);
  if (threadIdx.x == 0) {
    BarrierInit(&shared.full_kv, 1);
    BarrierInit(&shared.empty_kv, 1);
    for (int i = 0; i < 2; ++i) BarrierInit(&shared.full_out[i], 4);
    for (int i = 0; i < Config::kStages; ++i) {
      BarrierInit(&shared.full_q[i], 1);
      BarrierInit(&shared.full_do[i], 1);
      BarrierInit(&shared.empty[i], 8);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    RegistersDown<kHeadDim <= 64 ? 40 : 24>();
    if (threadIdx.x == 0) {
      ProduceKeyValueGrad<T, kHeadDim>(a, query_map, key_map, value_map, doutput_map, row_terms_map,
                                       shared);
    } else if (threadIdx.x == 32) {
      StoreKeyValueGrad<T, kHeadDim>(a, dkey_map, dvalue_map, shared);
    }
  } else {
    RegistersUp<kHeadDim <= 64 ? 232 : 240>();
    ConsumeKeyValueGrad<T, kHeadDim>(a, shared);
  }
#endif
}

// ---- dQ

template <typename T, int kHeadDim>
__device__ __forceinline__ void ProduceQueryGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& query_map, const CUtensorMap& key_map,
    const CUtensorMap& value_map, const CUtensorMap& doutput_map,
    typename Sm90QueryGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90QueryGrad<kHeadDim>;
  const int group_size = int(a.problem.heads / a.problem.kv_heads);
  RingPosition at;
  uint32_t tile_parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim>(a, index);
    if (tile.blocks == 0) continue;
    const int kv_head = tile.head / group_size;
    BarrierWait(&shared.empty_q, tile_parity ^ 1);
    tile_parity ^= 1;
    BarrierExpectBytes(&shared.full_q, sizeof shared.q + sizeof shared.d_o);
    LoadPanels<kHeadDim>(shared.q, Config::kQueries, query_map, &shared.full_q, tile.head,
                         tile.first_row, tile.batch);
    LoadPanels<kHeadDim>(shared.d_o, Config::kQueries, doutput_map, &shared.full_q, tile.head,
                         tile.first_row, tile.batch);
    for (int j = tile.blocks - 1; j >= 0; --j) {
      BarrierWait(&shared.empty_k[at.stage], at.parity ^ 1);
      BarrierExpectBytes(&shared.full_k[at.stage], sizeof shared.k[0]);
      LoadPanels<kHeadDim>(shared.k[at.stage], Config::kKeys, key_map, &shared.full_k[at.stage],
                           kv_head, j * Config::kKeys, tile.batch);
      BarrierWait(&shared.empty_v[at.stage], at.parity ^ 1);
      BarrierExpectBytes(&shared.full_v[at.stage], sizeof shared.v[0]);
      LoadPanels<kHeadDim>(shared.v[at.stage], Config::kKeys, value_map, &shared.full_v[at.stage],
                           kv_head, j * Config::kKeys, tile.batch);
      at.Advance<Config::kStages>();
    }
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void StoreQueryGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& dquery_map,
    typename Sm90QueryGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90QueryGrad<kHeadDim>;
  uint32_t parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim>(a, index);
    if (tile.blocks == 0) continue;
#pragma unroll 1
    for (int consumer = 0; consumer < 2; ++consumer) {
      BarrierWait(&shared.full_out[consumer], parity);
      StorePanels<kHeadDim>(dquery_map, shared.q + consumer * 64 * kPanelCols, Config::kQueries,
                            tile.head, tile.first_row + consumer * 64, tile.batch);
    }
    TmaStoreWaitRead();
    BarrierArrive(&shared.empty_q);
    parity ^= 1;
  }
  TmaStoreWait();
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void ConsumeQueryGrad(
    const Sm90BackwardArguments& a, typename Sm90QueryGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90QueryGrad<kHeadDim>;
  const AttentionProblem& p = a.problem;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row_in_tile = 64 * consumer + 16 * warp + lane / 4;
  const float scale_log2 = p.scale * kLog2E;
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  constexpr int kKeyPanel = Config::kKeys * kPanelRowBytes;
  constexpr int kQueryPanel = Config::kQueries * kPanelRowBytes;
  float dq[kHeadDim / 2], s[Config::kKeys / 2], dp[Config::kKeys / 2];
  uint32_t ds_operand[Config::kKeys / 16][4];

  const auto products_over_dim = [&](float (&d)[Config::kKeys / 2], const T* queries,
                                     const T* keys) {
    const uint64_t query_rows = PanelDescriptor(queries + consumer * 64 * kPanelCols);
    const uint64_t key_rows = PanelDescriptor(keys);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint64_t within = step % 4 * kStepKMajor;
      Wgmma<T, false>(d, query_rows + step / 4 * (kQueryPanel / 16) + within,
                      key_rows + step / 4 * (kKeyPanel / 16) + within, step > 0);
    }
    WgmmaCommit();
  };

  RingPosition at;
  uint32_t tile_parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim>(a, index);
    const int64_t batch_head = int64_t{tile.batch} * p.heads + tile.head;
    if (tile.blocks == 0) {
      const int row = tile.first_row + 64 * consumer;
      ZeroRows<T>(a.dquery, tile.batch, p.seq_q, p.heads, p.head_dim, tile.head, row);
      continue;
    }
    float lse[2], delta[2];
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first_row + row_in_tile + 8 * r;
      lse[r] = a.lse_log2[batch_head * a.padded_queries + row];
      delta[r] = a.delta[batch_head * a.padded_queries + row];
      limit[r] = row < tile.queries ? tile.Limit(row) : 0;
    }
    // Key blocks that all of a range of rows see: the consumer's 64, the tile's 128.
    const auto seen_by_all = [&](int first, int last) {
      return last < tile.queries ? max(tile.Limit(first), 0) / Config::kKeys : 0;
    };
    const int first_row = tile.first_row + 64 * consumer;
    const int full_blocks = seen_by_all(first_row, first_row + 63);
    const int tile_full_blocks = seen_by_all(tile.first_row, tile.first_row + 127);

    BarrierWait(&shared.full_q, tile_parity);
    tile_parity ^= 1;
#pragma unroll 1
    for (int j = tile.blocks - 1; j >= 0; --j) {
      BarrierWait(&shared.full_k[at.stage], at.parity);
      BarrierWait(&shared.full_v[at.stage], at.parity);
      Pin(s);
      Pin(dp);
      WgmmaFence();
      products_over_dim(s, shared.q, shared.k[at.stage]);
      products_over_dim(dp, shared.d_o, shared.v[at.stage]);
      WgmmaWait<1>();
      Pin(s);
#pragma unroll
      for (int i = 0; i < Config::kKeys / 2; ++i) {
        s[i] = Exp2(s[i] * scale_log2 - lse[i / 2 % 2]);
      }
      const bool masked = j >= full_blocks;
      if (masked) {
#pragma unroll
        for (int i = 0; i < Config::kKeys / 2; ++i) {
          const int column = j * Config::kKeys + i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (column >= limit[i / 2 % 2]) s[i] = 0.0f;
        }
      }
      WgmmaWait<0>();
      Pin(dp);
      release(&shared.empty_v[at.stage]);
#pragma unroll
      for (int i = 0; i < Config::kKeys / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
      if (masked) {
#pragma unroll
        for (int i = 0; i < Config::kKeys / 2; ++i) {
          // Not 0 times what may be NaN.
          if (s[i] == 0.0f || SeesOneKey(delta[i / 2 % 2])) dp[i] = 0.0f;
        }
      }
      PackOperand<T>(dp, ds_operand);
      bool cleared = false;
      if (j >= tile_full_blocks) {
        NamedBarrierSync(8, 256);  // both consumers have their scores
        cleared = ClearNonFinite<Config::kKeys, kHeadDim, 256, true>(shared.k[at.stage],
                                                                     shared.nearest, Config::kKeys);
      }
      Pin(dq);
      WgmmaFence();
      const uint64_t key_rows = PanelDescriptor(shared.k[at.stage], kKeyPanel);
#pragma unroll
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        Wgmma<T, true>(dq, ds_operand[step], key_rows + step * kStepMnMajor,
                       j < tile.blocks - 1 || step > 0);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      Pin(dq);
      if (cleared) {
        SpreadNonFinite<kHeadDim, 256, true>(
            dq, shared.nearest, [&](int r, int key) { return j * Config::kKeys + key < limit[r]; });
      }
      release(&shared.empty_k[at.stage]);
      at.Advance<Config::kStages>();
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dq[i] *= p.scale;
    WritePanels<T, kHeadDim>(dq, reinterpret_cast<char*>(shared.q) + row_in_tile * kPanelRowBytes,
                             kQueryPanel, lane);
    release(&shared.full_out[consumer]);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kSm90BackwardThreads, 1)
    QueryGradSm90Kernel(const __grid_constant__ Sm90BackwardArguments a,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap key_map,
                        const __grid_constant__ CUtensorMap value_map,
                        const __grid_constant__ CUtensorMap doutput_map,
                        const __grid_constant__ CUtensorMap dquery_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Config = Sm90QueryGrad<kHeadDim>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Config::template Shared<T>*>(memory);
  ForgetNonFinite<true>(shared.nearest);
  if (threadIdx.x == 0) {
    BarrierInit(&shared.full_q, 1);
    BarrierInit(&shared.empty_q, 1);
    for (int i = 0; i < 2; ++i) BarrierInit(&shared.full_out[i], 4);
    for (int i = 0; i < Config::kStages; ++i) {
      BarrierInit(&shared.full_k[i], 1);
      BarrierInit(&shared.full_v[i], 1);
      BarrierInit(&shared.empty_k[i], 8);
      BarrierInit(&shared.empty_v[i], 8);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    RegistersDown<40>();
    if (threadIdx.x == 0) {
      ProduceQueryGrad<T, kHeadDim>(a, query_map, key_map, value_map, doutput_map, shared);
    } else if (threadIdx.x == 32) {
      StoreQueryGrad<T, kHeadDim>(a, dquery_map, shared);
    }
  } else {
    RegistersUp<232>();
    ConsumeQueryGrad<T, kHeadDim>(a, shared);
  }
#endif
}

// ---- lse and delta

// One warp per query of one head; rows that are padding or see nothing get lse = +inf.
template <typename T>
__global__ void __launch_bounds__(256)
    RowTermsSm90Kernel(AttentionProblem p, const T* output, const T* doutput, const float* lse,
                       const float* dlse, int padded_queries, float* lse_log2, float* delta) {
  const int64_t index = (blockIdx.x * int64_t{256} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t head = index % p.heads, row = index / p.heads % padded_queries;
  const int64_t batch = index / p.heads / padded_queries;
  if (batch >= p.batch) return;
  float sum = 0.0f, shift = INFINITY;
  if (row < p.seq_q) {
    const int64_t at = ((batch * p.seq_q + row) * p.heads + head) * p.value_dim;
    for (int i = lane; i < p.value_dim; i += 32) {
      sum += float(output[at + i]) * float(doutput[at + i]);
    }
    sum = WarpReduce(sum, Sum{});
    const int64_t of_row = (batch * p.heads + head) * p.seq_q + row;
    const float of_lse = dlse ? dlse[of_row] : 0.0f;
    sum -= of_lse;
    if (of_lse == 0.0f && Sm90Visibility(p, int(batch)).Limit(int(row)) == 1) {
      sum = __uint_as_float(kOneKeyDelta);
    }
    if (lse[of_row] != -INFINITY) shift = lse[of_row] * kLog2E;
  }
  if (lane == 0) {
    const int64_t to = (batch * p.heads + head) * padded_queries + row;
    lse_log2[to] = shift;
    delta[to] = shift == INFINITY ? 0.0f : sum;
  }
}

template <typename T, int kHeadDim>
Status AttentionBackwardSm90(Gpu gpu, const AttentionProblem& p, const T* output, const T* doutput,
                             const float* lse, const float* dlse, T* dquery, T* dkey, T* dvalue,
                             float* row_terms) {
  using KeyValueConfig = Sm90KeyValueGrad<kHeadDim>;
  using QueryConfig = Sm90QueryGrad<kHeadDim>;
  const int64_t padded_queries = Sm90PaddedQueries(p);
  float* delta = row_terms + p.batch * p.heads * padded_queries;
  const int64_t warps = p.batch * p.heads * padded_queries;
  RowTermsSm90Kernel<T><<<unsigned((warps + 7) / 8), 256, 0, gpu.stream>>>(
      p, output, doutput, lse, dlse, int(padded_queries), row_terms, delta);
  if (Status s = CudaStatus(); !s.ok()) return s;

  CUtensorMap query_64, query_128, key_128, value_128, key_n, value_n, doutput_64, doutput_128;
  CUtensorMap dquery_64, dkey_64, dvalue_64, row_terms_map;
  const bool mapped =
      MakeRowMap(row_terms, 2 * p.batch * p.heads, padded_queries, KeyValueConfig::kQueries,
                 &row_terms_map) &&
      MakeTensorMap<T>(p.query, p.head_dim, p.heads, p.seq_q, p.batch, 64, &query_64) &&
      MakeTensorMap<T>(p.query, p.head_dim, p.heads, p.seq_q, p.batch, 128, &query_128) &&
      MakeTensorMap<T>(p.key, p.head_dim, p.kv_heads, p.seq_k, p.batch, 128, &key_128) &&
      MakeTensorMap<T>(p.value, p.value_dim, p.kv_heads, p.seq_k, p.batch, 128, &value_128) &&
      MakeTensorMap<T>(p.key, p.head_dim, p.kv_heads, p.seq_k, p.batch, QueryConfig::kKeys,
                       &key_n) &&
      MakeTensorMap<T>(p.value, p.value_dim, p.kv_heads, p.seq_k, p.batch, QueryConfig::kKeys,
                       &value_n) &&
      MakeTensorMap<T>(doutput, p.value_dim, p.heads, p.seq_q, p.batch, 64, &doutput_64) &&
      MakeTensorMap<T>(doutput, p.value_dim, p.heads, p.seq_q, p.batch, 128, &doutput_128) &&
      MakeTensorMap<T>(dquery, p.head_dim, p.heads, p.seq_q, p.batch, 64, &dquery_64) &&
      MakeTensorMap<T>(dkey, p.head_dim, p.kv_heads, p.seq_k, p.batch, 64, &dkey_64) &&
      MakeTensorMap<T>(dvalue, p.value_dim, p.kv_heads, p.seq_k, p.batch, 64, &dvalue_64);
  if (!mapped) return Internal("dot_product_attention: cuTensorMapEncodeTiled failed");

  Sm90BackwardArguments a{p, row_terms, delta, dquery, dkey, dvalue};
  a.padded_queries = int(padded_queries);
  const int64_t row_bytes = (p.head_dim + p.value_dim) * int64_t{sizeof(T)};
  const auto launch = [&](auto* kernel, int shared_bytes, int64_t heads, int64_t rows,
                          int64_t bytes_per_head, auto... maps) {
    a.row_blocks = int((rows + 127) / 128);
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
  if (Status s = launch(KeyValueGradSm90Kernel<T, kHeadDim>,
                        sizeof(typename KeyValueConfig::template Shared<T>), p.kv_heads, p.seq_k,
                        p.seq_q * row_bytes * group_size, query_64, key_128, value_128, doutput_64,
                        row_terms_map, dkey_64, dvalue_64);
      !s.ok()) {
    return s;
  }
  return launch(QueryGradSm90Kernel<T, kHeadDim>, sizeof(typename QueryConfig::template Shared<T>),
                p.heads, p.seq_q, p.seq_k * row_bytes / group_size, query_128, key_n, value_n,
                doutput_128, dquery_64);
}

}  // namespace tf_ops
