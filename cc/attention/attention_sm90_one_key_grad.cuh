// SPDX-License-Identifier: Apache-2.0
// dK and dV of attention for sm_90a, head_dim above 128: one warpgroup owns dV of a tile's 64 keys,
// the other dK. The first computes S^T and gives the second P^T through shared memory, in 16 bits
// and as its threads hold it; the second computes dP^T. Two matrix products each.
//
// Both run the same code on other operands, so that the barriers at which they meet are the same
// instructions, which synccheck asks for. They meet once a step, between the two products.
#pragma once

#include "cc/attention/attention_sm90_key_grad.cuh"

namespace tf_ops {

constexpr int kProbabilitiesBarrier = kClearBarrier + 3;  // after one for each warpgroup

template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ConsumeOneKeyGrad(
    const Sm90BackwardArguments& a,
    typename Sm90KeyValueGrad<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90KeyValueGrad<kHeadDim>;
  const AttentionProblem& p = a.problem;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1;
  const bool of_value = consumer == 0;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  const int row_in_tile = 16 * warp + lane / 4;
  const int group_size = int(p.heads / p.kv_heads);
  const float scale_log2 = p.scale * kLog2E;
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  constexpr int kPanel = 64 * kPanelRowBytes;  // of keys, and of queries
  float d[kHeadDim / 2], s[Config::kQueries / 2];
  uint32_t operand[Config::kQueries / 16][4];

  // s = A B^T, of the tile's keys and a step's queries.
  const auto products_over_dim = [&](const T* keys, const T* queries) {
    const uint64_t key_rows = PanelDescriptor(keys), query_rows = PanelDescriptor(queries);
    Pin(s);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint64_t within = step / 4 * (kPanel / 16) + step % 4 * kStepKMajor;
      Wgmma<T, false>(s, key_rows + within, query_rows + within, step > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(s);
  };
  const auto add_over_queries = [&](const T* queries, bool accumulate) {
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
    int query = tile.first_query;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      T* const q = shared.q[at.stage];
      T* const d_o = shared.d_o[at.stage];
      auto& probabilities = shared.p[at.stage];
      BarrierWait(of_value ? &shared.full_q[at.stage] : &shared.full_do[at.stage], at.parity);
      products_over_dim(of_value ? shared.k : shared.v, of_value ? q : d_o);
      const bool hides_some = query < tile.seen_from || query + Config::kQueries > tile.seen_to;
      if (of_value) {
        const float* lse = shared.lse[at.stage] + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Config::kQueries / 2; ++i) {
          s[i] = Exp2(s[i] * scale_log2 - lse[i / 4 * 8 + i % 2]);
        }
        if (hides_some) {
          ClearUnseen<kPrefix>(s, tile, tile.first_row + row_in_tile, query, lane);
        }
        PackOperand<T>(s, operand);
#pragma unroll
        for (int i = 0; i < Config::kQueries / 16; ++i) {
          *reinterpret_cast<uint4*>(probabilities[i][thread]) =
              *reinterpret_cast<const uint4*>(operand[i]);
        }
      }
      NamedBarrierSync(kProbabilitiesBarrier, 256);
      BarrierWait(of_value ? &shared.full_do[at.stage] : &shared.full_q[at.stage], at.parity);
      bool cleared = false;
      if (hides_some) {  // Both have their scores: the operands of what follows are cleared.
        const int valid = tile.queries - query;
        const bool cleared_do =
            ClearNonFinite<Config::kQueries, kHeadDim, 256>(d_o, shared.not_finite_do, valid);
        const bool cleared_q =
            ClearNonFinite<Config::kQueries, kHeadDim, 256>(q, shared.not_finite_q, valid);
        cleared = of_value ? cleared_do : cleared_q;
      }
      if (!of_value) {
        const float* delta = shared.delta[at.stage] + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Config::kQueries / 16; ++i) {
          *reinterpret_cast<uint4*>(operand[i]) =
              *reinterpret_cast<const uint4*>(probabilities[i][thread]);
        }
#pragma unroll
        for (int i = 0; i < Config::kQueries / 4; ++i) {
          const float2 of = *reinterpret_cast<const float2*>(delta + i / 2 * 8);
          const float2 weights = Unpack<T>(operand[i / 4][i % 4]);
          s[2 * i] = weights.x * (s[2 * i] - of.x);
          s[2 * i + 1] = weights.y * (s[2 * i + 1] - of.y);
          if (hides_some) {  // not 0 times what may be NaN
            if (weights.x == 0.0f || SeesOneKey(of.x)) s[2 * i] = 0.0f;
            if (weights.y == 0.0f || SeesOneKey(of.y)) s[2 * i + 1] = 0.0f;
          }
        }
        PackOperand<T>(s, operand);
      }
      release(of_value ? &shared.empty_q[at.stage] : &shared.empty_do[at.stage]);
      add_over_queries(of_value ? d_o : q, step > 0);
      if (cleared) {
        SpreadNonFinite<Config::kQueries, kHeadDim, 128, T>(
            d, of_value ? shared.not_finite_do : shared.not_finite_q,
            of_value ? a.doutput : p.query, tile.batch, p.seq_q, p.heads,
            of_value ? p.value_dim : p.head_dim,
            tile.head * group_size + step / tile.steps_per_head, query,
            kClearBarrier + 1 + consumer, [&](int r, int row) {
              return tile.Sees<kPrefix>(query + row, tile.first_row + row_in_tile + 8 * r);
            });
      }
      release(of_value ? &shared.empty_do[at.stage] : &shared.empty_q[at.stage]);
      at.Advance<Config::kStages>();
      query += Config::kQueries;
      if (query >= tile.end_query) query = tile.first_query;  // of the next head
    }
    if (!of_value) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) d[i] *= p.scale;
    }
    T* const result = of_value ? shared.k : shared.v;
    WritePanels<T, kHeadDim>(d, reinterpret_cast<char*>(result) + row_in_tile * kPanelRowBytes,
                             kPanel, lane);
    release(&shared.full_out[consumer]);
  }
}

}  // namespace tf_ops
