// SPDX-License-Identifier: Apache-2.0
// dK and dV of attention for sm_90a, head_dim above 128: one warpgroup owns dV of a tile's 64 keys,
// the other dK. The first computes S^T and gives the second P^T through shared memory, in 16 bits
// and as its threads hold it; the second computes dP^T. Two matrix products each.
#pragma once

#include "cc/attention/attention_sm90_key_grad.cuh"

namespace tf_ops {

// Named barriers, one for each stage: the probabilities are there; they have been read.
constexpr int kFullProbabilities = kClearBarrier + 3, kEmptyProbabilities = kClearBarrier + 5;

// What both warpgroups do alike.
template <typename T, int kHeadDim, bool kPrefix>
struct Sm90OneGrad {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  using Shared = typename Config::template Shared<T>;
  static constexpr int kPanel = 64 * kPanelRowBytes;  // of keys, and of queries
  using Scores = float[Config::kQueries / 2];
  using Result = float[kHeadDim / 2];
  using Operand = uint32_t[Config::kQueries / 16][4];

  // d = A B^T, of the tile's keys and a step's queries.
  static __device__ __forceinline__ void ProductsOverDim(Scores& d, const T* keys,
                                                         const T* queries) {
    const uint64_t key_rows = PanelDescriptor(keys), query_rows = PanelDescriptor(queries);
    Pin(d);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint64_t within = step / 4 * (kPanel / 16) + step % 4 * kStepKMajor;
      Wgmma<T, false>(d, key_rows + within, query_rows + within, step > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(d);
  }
  static __device__ __forceinline__ void AddOverQueries(Result& d, const Operand& operand,
                                                        const T* queries, bool accumulate) {
    const uint64_t rows = PanelDescriptor(queries, kPanel);
    Pin(d);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < Config::kQueries / 16; ++step) {
      Wgmma<T, true>(d, operand[step], rows + step * kStepMnMajor, accumulate || step > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(d);
  }
  static __device__ __forceinline__ bool HidesSome(const Sm90KeyTile& tile, int query) {
    return query < tile.seen_from || query + Config::kQueries > tile.seen_to;
  }
  // Once both warpgroups have their scores: clears both operands of the products that follow.
  // Returns whether anything was cleared in d_o, in q.
  static __device__ __forceinline__ void Clear(Shared& shared, int stage, int valid, bool* of_do,
                                               bool* of_q) {
    NamedBarrierSync(kClearBarrier, 256);
    *of_do = ClearNonFinite<Config::kQueries, kHeadDim, 256>(shared.d_o[stage],
                                                             shared.not_finite_do, valid);
    *of_q = ClearNonFinite<Config::kQueries, kHeadDim, 256>(shared.q[stage], shared.not_finite_q,
                                                            valid);
  }
  static __device__ __forceinline__ void Spread(Result& d, RowBits<Config::kQueries>& rows,
                                                const void* tensor, int64_t dim,
                                                const AttentionProblem& p, const Sm90KeyTile& tile,
                                                int head, int query, int first_key, int barrier) {
    SpreadNonFinite<Config::kQueries, kHeadDim, 128, T>(
        d, rows, tensor, tile.batch, p.seq_q, p.heads, dim, head, query, barrier,
        [&](int r, int row) { return tile.Sees<kPrefix>(query + row, first_key + 8 * r); });
  }
};

// P and dV.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ConsumeValueGrad(
    const Sm90BackwardArguments& a,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  using Grad = Sm90OneGrad<T, kHeadDim, kPrefix>;
  const AttentionProblem& p = a.problem;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row_in_tile = 16 * warp + lane / 4;
  const int group_size = int(p.heads / p.kv_heads);
  const float scale_log2 = p.scale * kLog2E;
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  float dv[kHeadDim / 2], s[Config::kQueries / 2];
  uint32_t operand[Config::kQueries / 16][4];
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
    int query = tile.first_query;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      BarrierWait(&shared.full_q[at.stage], at.parity);
      Grad::ProductsOverDim(s, shared.k, shared.q[at.stage]);
      const float* lse = shared.lse[at.stage] + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < Config::kQueries / 2; ++i) {
        s[i] = Exp2(s[i] * scale_log2 - lse[i / 4 * 8 + i % 2]);
      }
      const bool hides_some = Grad::HidesSome(tile, query);
      if (hides_some) {
        ClearUnseen<kPrefix>(s, tile, tile.first_row + row_in_tile, query, lane);
      }
      PackOperand<T>(s, operand);
      NamedBarrierSync(kEmptyProbabilities + at.stage, 256);
#pragma unroll
      for (int i = 0; i < Config::kQueries / 4; ++i) {
        shared.p[at.stage][i][threadIdx.x % 128] = operand[i / 4][i % 4];
      }
      NamedBarrierArrive(kFullProbabilities + at.stage, 256);
      bool cleared = false, cleared_q = false;
      BarrierWait(&shared.full_do[at.stage], at.parity);
      if (hides_some) {
        Grad::Clear(shared, at.stage, tile.queries - query, &cleared, &cleared_q);
      }
      release(&shared.empty_q[at.stage]);
      Grad::AddOverQueries(dv, operand, shared.d_o[at.stage], step > 0);
      if (cleared) {
        Grad::Spread(dv, shared.not_finite_do, a.doutput, p.value_dim, p, tile,
                     tile.head * group_size + step / tile.steps_per_head, query,
                     tile.first_row + row_in_tile, kClearBarrier + 1);
      }
      release(&shared.empty_do[at.stage]);
      at.Advance<Config::kStages>();
      query += Config::kQueries;
      if (query >= tile.end_query) query = tile.first_query;  // of the next head
    }
    WritePanels<T, kHeadDim>(dv, reinterpret_cast<char*>(shared.k) + row_in_tile * kPanelRowBytes,
                             Grad::kPanel, lane);
    release(&shared.full_out[0]);
  }
}

// dS and dK.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ConsumeKeyGrad(
    const Sm90BackwardArguments& a,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  using Grad = Sm90OneGrad<T, kHeadDim, kPrefix>;
  const AttentionProblem& p = a.problem;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row_in_tile = 16 * warp + lane / 4;
  const int group_size = int(p.heads / p.kv_heads);
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  for (int i = 0; i < Config::kStages; ++i) NamedBarrierArrive(kEmptyProbabilities + i, 256);
  float dk[kHeadDim / 2], dp[Config::kQueries / 2];
  uint32_t operand[Config::kQueries / 16][4];
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
    int query = tile.first_query;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      BarrierWait(&shared.full_do[at.stage], at.parity);
      Grad::ProductsOverDim(dp, shared.v, shared.d_o[at.stage]);
      const bool hides_some = Grad::HidesSome(tile, query);
      bool cleared_do = false, cleared = false;
      BarrierWait(&shared.full_q[at.stage], at.parity);
      NamedBarrierSync(kFullProbabilities + at.stage, 256);
      if (hides_some) {
        Grad::Clear(shared, at.stage, tile.queries - query, &cleared_do, &cleared);
      }
      const float* delta = shared.delta[at.stage] + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < Config::kQueries / 4; ++i) {
        const float2 of = *reinterpret_cast<const float2*>(delta + i / 2 * 8);
        const float2 weights = Unpack<T>(shared.p[at.stage][i][threadIdx.x % 128]);
        dp[2 * i] = weights.x * (dp[2 * i] - of.x);
        dp[2 * i + 1] = weights.y * (dp[2 * i + 1] - of.y);
        if (hides_some) {  // not 0 times what may be NaN
          if (weights.x == 0.0f || SeesOneKey(of.x)) dp[2 * i] = 0.0f;
          if (weights.y == 0.0f || SeesOneKey(of.y)) dp[2 * i + 1] = 0.0f;
        }
      }
      NamedBarrierArrive(kEmptyProbabilities + at.stage, 256);
      release(&shared.empty_do[at.stage]);
      PackOperand<T>(dp, operand);
      Grad::AddOverQueries(dk, operand, shared.q[at.stage], step > 0);
      if (cleared) {
        Grad::Spread(dk, shared.not_finite_q, p.query, p.head_dim, p, tile,
                     tile.head * group_size + step / tile.steps_per_head, query,
                     tile.first_row + row_in_tile, kClearBarrier + 2);
      }
      release(&shared.empty_q[at.stage]);
      at.Advance<Config::kStages>();
      query += Config::kQueries;
      if (query >= tile.end_query) query = tile.first_query;  // of the next head
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] *= p.scale;
    WritePanels<T, kHeadDim>(dk, reinterpret_cast<char*>(shared.v) + row_in_tile * kPanelRowBytes,
                             Grad::kPanel, lane);
    release(&shared.full_out[1]);
  }
}

}  // namespace tf_ops
