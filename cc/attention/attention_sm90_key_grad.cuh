// SPDX-License-Identifier: Apache-2.0
// dK and dV of attention for sm_90a; see attention_sm90_backward.cuh.
#pragma once

#include "cc/attention/attention_sm90_grad.cuh"

namespace tf_ops {

template <int kHeadDim>
struct Sm90KeyValueGrad;

// The work of one KeyValueGrad tile: keys of one key head, and the queries of each of its heads
// that see some of them.
struct Sm90KeyTile : Sm90HeadRows, Sm90Visibility {
  int first_query, end_query;  // the first is a multiple of kQueries
  int steps_per_head;          // 0 if no query sees a key
  int seen_from, seen_to;      // the queries that see all keys

  template <int kHeadDim, bool kPrefix>
  static __device__ Sm90KeyTile At(const Sm90BackwardArguments& a, int index) {
    using Config = Sm90KeyValueGrad<kHeadDim>;
    const Sm90HeadRows rows(a, index, int(a.problem.kv_heads), Config::kKeys, false);
    Sm90KeyTile tile{rows, Sm90Visibility(a.problem, a.key_masks, rows.batch)};
    const int last_row = tile.first_row + Config::kKeys - 1;
    const int begin = tile.QueryBegin(tile.first_row);
    tile.first_query = begin / Config::kQueries * Config::kQueries;
    tile.end_query = tile.QueryEnd<kPrefix>(min(last_row, tile.keys - 1));
    const bool shown = tile.first_row < tile.keys && (kPrefix || last_row >= tile.from);
    const int queries = shown && begin < tile.end_query ? tile.end_query - tile.first_query : 0;
    tile.steps_per_head = (queries + Config::kQueries - 1) / Config::kQueries;
    tile.seen_from = tile.AllSeenFrom<kPrefix>(tile.first_row, last_row);
    tile.seen_to = tile.QueryEnd<kPrefix>(tile.first_row);
    return tile;
  }
};

template <int kHeadDim>
struct Sm90KeyValueGrad {
  // The accumulators of 64 keys are two of 64 x kHeadDim: above 128, a warpgroup has room for one.
  static constexpr bool kOneEach = kHeadDim > 128;
  static constexpr int kKeys = kOneEach ? 64 : 128, kQueries = 64, kStages = 2;
  template <typename T>
  struct Shared {
    T k[kKeys * kHeadDim], v[kKeys * kHeadDim];
    T q[kStages][kQueries * kHeadDim], d_o[kStages][kQueries * kHeadDim];
    float lse[kStages][kQueries], delta[kStages][kQueries];
    uint64_t full_kv, empty_kv, full_out[2];
    uint64_t full_q[kStages], full_do[kStages], empty_q[kStages];  // kOneEach: of q alone
    // For kOneEach: probabilities.
    alignas(16) uint32_t p[kOneEach ? kStages : 1][kQueries / 16][128][4];
    uint64_t empty_do[kStages];
    RowBits<kQueries> not_finite_q, not_finite_do;
    Sm90KeyTile tile[8];  // of each consumer warp
  };
};

template <typename T, int kHeadDim, bool kPrefix>
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
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim, kPrefix>(a, index);
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
        const auto load_doutput = [&] {
          BarrierExpectBytes(&shared.full_do[at.stage],
                             sizeof shared.d_o[0] + sizeof shared.delta[0]);
          LoadPanels<kHeadDim>(shared.d_o[at.stage], Config::kQueries, doutput_map,
                               &shared.full_do[at.stage], head, query, tile.batch);
          TmaLoad(shared.delta[at.stage], row_terms_map, &shared.full_do[at.stage], query,
                  int(a.problem.batch * a.problem.heads) + row);
        };
        if constexpr (Config::kOneEach) {
          BarrierWait(&shared.empty_do[at.stage], at.parity ^ 1);
          load_doutput();
        }
        BarrierWait(&shared.empty_q[at.stage], at.parity ^ 1);
        BarrierExpectBytes(&shared.full_q[at.stage], sizeof shared.q[0] + sizeof shared.lse[0]);
        LoadPanels<kHeadDim>(shared.q[at.stage], Config::kQueries, query_map,
                             &shared.full_q[at.stage], head, query, tile.batch);
        TmaLoad(shared.lse[at.stage], row_terms_map, &shared.full_q[at.stage], query, row);
        if constexpr (!Config::kOneEach) load_doutput();
        at.Advance<Config::kStages>();
      }
    }
  }
}

template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void StoreKeyValueGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& dkey_map, const CUtensorMap& dvalue_map,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  uint32_t parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim, kPrefix>(a, index);
    if (tile.steps_per_head == 0) continue;
#pragma unroll 1
    for (int consumer = 0; consumer < 2; ++consumer) {
      BarrierWait(&shared.full_out[consumer], parity);
      if constexpr (Config::kOneEach) {  // Each result is where the other warpgroup's operand was.
        StorePanels<kHeadDim>(consumer == 0 ? dvalue_map : dkey_map,
                              consumer == 0 ? shared.k : shared.v, Config::kKeys, tile.head,
                              tile.first_row, tile.batch);
        continue;
      }
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

// Zeroes the tiles whose keys no query sees, by the 64 threads of two warps.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ZeroKeyValueGrad(const Sm90BackwardArguments& a) {
  constexpr int kKeys = Sm90KeyValueGrad<kHeadDim>::kKeys;
  const AttentionProblem& p = a.problem;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90KeyTile tile = Sm90KeyTile::At<kHeadDim, kPrefix>(a, index);
    if (tile.steps_per_head > 0) continue;
    ZeroRows<T>(a.dkey, tile.batch, p.seq_k, p.kv_heads, p.head_dim, tile.head, tile.first_row,
                kKeys);
    ZeroRows<T>(a.dvalue, tile.batch, p.seq_k, p.kv_heads, p.value_dim, tile.head, tile.first_row,
                kKeys);
  }
}

// Zeroes what a lane holds of S^T where a query does not see a key. The keys are this one and the
// eighth after it, the queries begin with the step's.
template <bool kPrefix, int kCount>
__device__ __forceinline__ void ClearUnseen(float (&s)[kCount], const Sm90KeyTile& tile, int key,
                                            int query, int lane) {
  const int begins[2] = {tile.AllSeenFrom<kPrefix>(key, key),
                         tile.AllSeenFrom<kPrefix>(key + 8, key + 8)};
  const int ends[2] = {tile.QueryEnd<kPrefix>(key), tile.QueryEnd<kPrefix>(key + 8)};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (column < begins[i / 2 % 2] || column >= ends[i / 2 % 2]) s[i] = 0.0f;
  }
}

template <typename T, int kHeadDim, bool kPrefix>
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
    const Sm90KeyTile next = Sm90KeyTile::At<kHeadDim, kPrefix>(a, index);
    const int steps = next.steps_per_head * group_size;
    if (steps == 0) continue;
    const Sm90KeyTile& tile = KeepTile(shared.tile[threadIdx.x / 32 - 4], next);
    BarrierWait(&shared.full_kv, tile_parity);
    tile_parity ^= 1;
    // In registers: `tile` is for steps in which some query does not see some key.
    const int seen_from = tile.seen_from, seen_to = tile.seen_to, end_query = tile.end_query;
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
      const bool hides_some = query < seen_from || query + Config::kQueries > seen_to;
      // Not from the other consumer alone: one that does more falls behind, and then computes while
      // the other multiplies.
      const int first_key = tile.first_row + 64 * consumer;
      const bool masked =
          hides_some && (query < tile.AllSeenFrom<kPrefix>(first_key, first_key + 63) ||
                         query + Config::kQueries > tile.QueryEnd<kPrefix>(first_key));
      if (masked) {
        ClearUnseen<kPrefix>(s, tile, tile.first_row + row_in_tile, query, lane);
      }
      PackOperand<T>(s, p_operand);
      // Where some key is not seen by all queries, both operands of the next products are cleared
      // of NaN and Inf, once both consumers have read them.
      bool cleared_do = false, cleared_q = false;
      if (hides_some) {
        WgmmaWait<0>();
        NamedBarrierSync(kClearBarrier, 256);
        cleared_do = ClearNonFinite<Config::kQueries, kHeadDim, 256>(
            shared.d_o[at.stage], shared.not_finite_do, tile.queries - query);
        cleared_q = ClearNonFinite<Config::kQueries, kHeadDim, 256>(
            shared.q[at.stage], shared.not_finite_q, tile.queries - query);
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
      const auto spread = [&](auto& d, auto& rows, const void* tensor, int64_t dim) {
        SpreadNonFinite<Config::kQueries, kHeadDim, 256, T>(
            d, rows, tensor, tile.batch, p.seq_q, p.heads, dim,
            tile.head * group_size + step / tile.steps_per_head, query, kClearBarrier,
            [&](int r, int row) {
              return tile.Sees<kPrefix>(query + row, tile.first_row + row_in_tile + 8 * r);
            });
      };
      if (cleared_do) spread(dv, shared.not_finite_do, a.doutput, p.value_dim);
      if (cleared_q) spread(dk, shared.not_finite_q, p.query, p.head_dim);
      release(&shared.empty_q[at.stage]);
      at.Advance<Config::kStages>();
      query += Config::kQueries;
      if (query >= end_query) query = tile.first_query;  // of the next head
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

}  // namespace tf_ops
