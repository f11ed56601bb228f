// SPDX-License-Identifier: Apache-2.0
// dQ of attention for sm_90a; see attention_sm90_backward.cuh.
#pragma once

#include "cc/attention/attention_sm90_grad.cuh"

namespace tf_ops {

template <int kHeadDim>
struct Sm90QueryGrad;

struct Sm90QueryTile : Sm90HeadRows, Sm90Visibility {
  int first_block, end_block;  // key blocks that some query sees; end_block is 0 if there are none

  template <int kHeadDim, bool kPrefix>
  static __device__ Sm90QueryTile At(const Sm90BackwardArguments& a, int index) {
    using Config = Sm90QueryGrad<kHeadDim>;
    const Sm90HeadRows rows(a, index, int(a.problem.heads), Config::kQueries, true);
    Sm90QueryTile tile{rows, Sm90Visibility(a.problem, a.key_masks, rows.batch)};
    const int last_row = min(tile.first_row + Config::kQueries, tile.queries) - 1;
    const int begin = tile.KeyBegin<kPrefix>(tile.first_row), end = tile.KeyEnd(last_row);
    tile.first_block = begin / Config::kKeys;
    tile.end_block =
        last_row < tile.first_row || end <= begin ? 0 : (end + Config::kKeys - 1) / Config::kKeys;
    return tile;
  }
};

template <int kHeadDim>
struct Sm90QueryGrad {
  static constexpr int kQueries = 128, kStages = 2;
  static constexpr int kKeys = kHeadDim <= 64    ? 128
                               : kHeadDim <= 128 ? 96   // registers
                                                 : 48;  // shared memory
  template <typename T>
  struct Shared {
    T q[kQueries * kHeadDim], d_o[kQueries * kHeadDim];
    T k[kStages][kKeys * kHeadDim], v[kStages][kKeys * kHeadDim];
    uint64_t full_q, empty_q, full_out[2];
    uint64_t full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
    RowBits<kKeys> not_finite;
    Sm90QueryTile tile[8];  // of each consumer warp
  };
};

template <typename T, int kHeadDim, bool kPrefix>
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
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim, kPrefix>(a, index);
    if (tile.end_block == 0) continue;
    const int kv_head = tile.head / group_size;
    BarrierWait(&shared.empty_q, tile_parity ^ 1);
    tile_parity ^= 1;
    BarrierExpectBytes(&shared.full_q, sizeof shared.q + sizeof shared.d_o);
    LoadPanels<kHeadDim>(shared.q, Config::kQueries, query_map, &shared.full_q, tile.head,
                         tile.first_row, tile.batch);
    LoadPanels<kHeadDim>(shared.d_o, Config::kQueries, doutput_map, &shared.full_q, tile.head,
                         tile.first_row, tile.batch);
    for (int j = tile.end_block - 1; j >= tile.first_block; --j) {
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

template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void StoreQueryGrad(
    const Sm90BackwardArguments& a, const CUtensorMap& dquery_map,
    typename Sm90QueryGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90QueryGrad<kHeadDim>;
  uint32_t parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim, kPrefix>(a, index);
    if (tile.end_block == 0) continue;
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

// Zeroes the tiles in which no query sees a key, by the 64 threads of two warps.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ZeroQueryGrad(const Sm90BackwardArguments& a) {
  const AttentionProblem& p = a.problem;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90QueryTile tile = Sm90QueryTile::At<kHeadDim, kPrefix>(a, index);
    if (tile.end_block > 0) continue;
    ZeroRows<T>(a.dquery, tile.batch, p.seq_q, p.heads, p.head_dim, tile.head, tile.first_row,
                Sm90QueryGrad<kHeadDim>::kQueries);
  }
}

template <typename T, int kHeadDim, bool kPrefix>
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
    const Sm90QueryTile next = Sm90QueryTile::At<kHeadDim, kPrefix>(a, index);
    const int first_block = next.first_block, end_block = next.end_block;
    if (end_block == 0) continue;
    const Sm90QueryTile& tile = KeepTile(shared.tile[threadIdx.x / 32 - 4], next);
    BarrierWait(&shared.full_q, tile_parity);
    tile_parity ^= 1;
    const int64_t batch_head = int64_t{tile.batch} * p.heads + tile.head;
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first_row + row_in_tile + 8 * r;
      lse[r] = a.lse_log2[batch_head * a.padded_queries + row];
      delta[r] = a.delta[batch_head * a.padded_queries + row];
    }
    // The keys that all queries see. In registers: `tile` is for the blocks beyond.
    const int last_row = tile.first_row + Config::kQueries - 1;
    const int seen_from = tile.AllSeeFrom<kPrefix>(last_row);
    const int seen_to = tile.AllSeeTo<kPrefix>(tile.first_row, last_row);

#pragma unroll 1
    for (int j = end_block - 1; j >= first_block; --j) {
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
      const bool hides_some = (j + 1) * Config::kKeys > seen_to || j * Config::kKeys < seen_from;
      // Not from the other consumer alone: one that does more falls behind, and then computes while
      // the other multiplies.
      const int first_row = tile.first_row + 64 * consumer;
      const bool masked =
          hides_some &&
          ((j + 1) * Config::kKeys > tile.AllSeeTo<kPrefix>(first_row, first_row + 63) ||
           j * Config::kKeys < tile.AllSeeFrom<kPrefix>(first_row + 63));
      if (masked) {
        const int row = tile.first_row + row_in_tile;
        const int begins[2] = {tile.KeyBegin<kPrefix>(row), tile.KeyBegin<kPrefix>(row + 8)};
        const int ends[2] = {row < tile.queries ? tile.KeyEnd(row) : 0,
                             row + 8 < tile.queries ? tile.KeyEnd(row + 8) : 0};
#pragma unroll
        for (int i = 0; i < Config::kKeys / 2; ++i) {
          const int column = j * Config::kKeys + i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (column < begins[i / 2 % 2] || column >= ends[i / 2 % 2]) s[i] = 0.0f;
          if (!kPrefix && tile.bits && !tile.HasBit(column)) s[i] = 0.0f;
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
      if (hides_some) {
        NamedBarrierSync(kClearBarrier, 256);  // both consumers have their scores
        cleared = ClearNonFinite<Config::kKeys, kHeadDim, 256>(
            shared.k[at.stage], shared.not_finite, tile.keys - j * Config::kKeys);
      }
      Pin(dq);
      WgmmaFence();
      const uint64_t key_rows = PanelDescriptor(shared.k[at.stage], kKeyPanel);
#pragma unroll
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        Wgmma<T, true>(dq, ds_operand[step], key_rows + step * kStepMnMajor,
                       j < end_block - 1 || step > 0);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      Pin(dq);
      if (cleared) {
        SpreadNonFinite<Config::kKeys, kHeadDim, 256, T>(
            dq, shared.not_finite, p.key, tile.batch, p.seq_k, p.kv_heads, p.head_dim,
            tile.head / int(p.heads / p.kv_heads), j * Config::kKeys, kClearBarrier,
            [&](int r, int key_row) {
              return tile.Sees<kPrefix>(tile.first_row + row_in_tile + 8 * r,
                                        j * Config::kKeys + key_row);
            });
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

template <typename T, int kHeadDim, bool kPrefix>
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
  ForgetRows(shared.not_finite);
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
      ProduceQueryGrad<T, kHeadDim, kPrefix>(a, query_map, key_map, value_map, doutput_map, shared);
    } else if (threadIdx.x == 32) {
      StoreQueryGrad<T, kHeadDim, kPrefix>(a, dquery_map, shared);
    } else if (threadIdx.x >= 64) {
      ZeroQueryGrad<T, kHeadDim, kPrefix>(a);
    }
  } else {
    RegistersUp<232>();
    ConsumeQueryGrad<T, kHeadDim, kPrefix>(a, shared);
  }
#endif
}

}  // namespace tf_ops
