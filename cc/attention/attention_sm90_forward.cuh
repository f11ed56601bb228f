// SPDX-License-Identifier: Apache-2.0
// Forward attention for sm_90a.
//
// A block is one producer warpgroup and two or three consumer warpgroups, and stays on its
// multiprocessor for many tiles. A tile is kBlockM queries of one head; a consumer owns 64 of
// them: their output and running maximum and sum stay in its registers. One thread of the
// producer streams K and V through a ring of kStages buffers by TMA, in 128-byte swizzled panels
// of 64 columns, the next tile's while the last one is still being finished. Tiles in which no
// query sees a key are zeroed by two warps that have nothing else to do.
//
// Per key block j, a consumer issues S_j = Q K_j and then O += P_{j-1} V_{j-1}; the softmax of
// S_j runs while the second product does. Two named barriers make the consumers take turns at
// issuing, so that one's softmax hides behind the other's products as well.
//
// Key blocks go from the last that some query sees to the first that some query sees; only those
// at the ends, where some query does not see all, are masked. Tiles go heads within a group whose
// K and V fit in L2, then queries from the last, which under causality see the most keys, to the
// first.
#pragma once

#include "cc/attention/attention_sm90.cuh"

namespace tf_ops {

// The work of one tile: which rows, and how far they see.
struct Sm90Tile : Sm90Visibility {
  int batch, head, first_row;
  int first_block, end_block;  // key blocks that some row sees; end_block is 0 if there are none
};

template <int kHeadDim>
struct Sm90Forward {
  static constexpr int kConsumers = kHeadDim <= 64 ? 3 : 2;  // registers: 64 x kHeadDim floats each
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kHeadDim <= 128 ? 128 : 80;  // shared memory at 256
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = kHeadDim <= 128 ? 2 : 1;  // shared memory at 256
  static constexpr int kPanels = kHeadDim / kPanelCols;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  template <typename T>
  struct Shared {
    T q[kQueryStages][kBlockM * kHeadDim];
    T k[kStages][kBlockN * kHeadDim];
    T v[kStages][kBlockN * kHeadDim];
    Sm90Tile tile[4 * kConsumers];  // of each consumer warp
    uint64_t full_q[kQueryStages], empty_q[kQueryStages], full_o[kConsumers];
    uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    RowBits<kBlockN> not_finite;
  };
};

struct Sm90ForwardArguments {
  AttentionProblem problem;
  Sm90KeyMasks key_masks;
  void* output;
  float* lse;
  int query_blocks, tiles, heads_per_group;
};

template <int kHeadDim, bool kPrefix>
__device__ __forceinline__ Sm90Tile TileAt(const Sm90ForwardArguments& a, int index) {
  constexpr int kBlockM = Sm90Forward<kHeadDim>::kBlockM, kBlockN = Sm90Forward<kHeadDim>::kBlockN;
  const AttentionProblem& p = a.problem;
  const int batch_heads = int(p.batch * p.heads);
  const int group = index / (a.heads_per_group * a.query_blocks);
  const int heads = min(a.heads_per_group, batch_heads - group * a.heads_per_group);
  const int within = index - group * a.heads_per_group * a.query_blocks;
  const int batch_head = group * a.heads_per_group + within % heads;
  const int batch = batch_head / int(p.heads);

  Sm90Tile tile{Sm90Visibility(p, a.key_masks, batch)};
  tile.batch = batch;
  tile.head = batch_head % int(p.heads);
  tile.first_row = (a.query_blocks - 1 - within / heads) * kBlockM;
  const int last_row = min(tile.first_row + kBlockM, tile.queries) - 1;
  const int begin = tile.KeyBegin<kPrefix>(tile.first_row), end = tile.KeyEnd(last_row);
  tile.first_block = begin / kBlockN;
  tile.end_block = last_row < tile.first_row || end <= begin ? 0 : (end + kBlockN - 1) / kBlockN;
  return tile;
}

// Running softmax of the two rows of a thread.
struct OnlineSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns

  // Turns scores into unnormalised probabilities; `rescale` is for what was added up before.
  template <int kSize>
  __device__ __forceinline__ void Step(float (&s)[kSize], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = maximum[r];
#pragma unroll
      for (int i = 0; i < kSize; i += 4) m = fmaxf(m, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
      const float shift = m == -INFINITY ? 0.0f : m * scale_log2;  // a row that sees nothing yet
      rescale[r] = Exp2(maximum[r] * scale_log2 - shift);
      maximum[r] = m;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        s[i + 2 * r] = Exp2(s[i + 2 * r] * scale_log2 - shift);
        s[i + 2 * r + 1] = Exp2(s[i + 2 * r + 1] * scale_log2 - shift);
        total += s[i + 2 * r] + s[i + 2 * r + 1];
      }
      sum[r] = sum[r] * rescale[r] + total;
    }
  }
};

template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ProduceForward(
    const Sm90ForwardArguments& a, const CUtensorMap& query_map, const CUtensorMap& key_map,
    const CUtensorMap& value_map, typename Sm90Forward<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90Forward<kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int group_size = int(a.problem.heads / a.problem.kv_heads);
  RingPosition at, query_at;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90Tile tile = TileAt<kHeadDim, kPrefix>(a, index);
    if (tile.end_block == 0) continue;
    const int kv_head = tile.head / group_size;
    BarrierWait(&shared.empty_q[query_at.stage], query_at.parity ^ 1);
    BarrierExpectBytes(&shared.full_q[query_at.stage], sizeof shared.q[0]);
    LoadPanels<kHeadDim>(shared.q[query_at.stage], kBlockM, query_map,
                         &shared.full_q[query_at.stage], tile.head, tile.first_row, tile.batch);
    query_at.Advance<Config::kQueryStages>();
    for (int j = tile.end_block - 1; j >= tile.first_block; --j) {
      BarrierWait(&shared.empty_k[at.stage], at.parity ^ 1);
      BarrierExpectBytes(&shared.full_k[at.stage], sizeof shared.k[0]);
      LoadPanels<kHeadDim>(shared.k[at.stage], kBlockN, key_map, &shared.full_k[at.stage], kv_head,
                           j * kBlockN, tile.batch);
      BarrierWait(&shared.empty_v[at.stage], at.parity ^ 1);
      BarrierExpectBytes(&shared.full_v[at.stage], sizeof shared.v[0]);
      LoadPanels<kHeadDim>(shared.v[at.stage], kBlockN, value_map, &shared.full_v[at.stage],
                           kv_head, j * kBlockN, tile.batch);
      at.Advance<Config::kStages>();
    }
  }
}

// Copies each finished tile from where its queries were to the output.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void StoreForward(
    const Sm90ForwardArguments& a, const CUtensorMap& output_map,
    typename Sm90Forward<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90Forward<kHeadDim>;
  RingPosition query_at;
  uint32_t parity = 0;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90Tile tile = TileAt<kHeadDim, kPrefix>(a, index);
    if (tile.end_block == 0) continue;
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      BarrierWait(&shared.full_o[consumer], parity);
      StorePanels<kHeadDim>(output_map, shared.q[query_at.stage] + consumer * 64 * kPanelCols,
                            Config::kBlockM, tile.head, tile.first_row + consumer * 64, tile.batch);
    }
    TmaStoreWaitRead();
    BarrierArrive(&shared.empty_q[query_at.stage]);
    query_at.Advance<Config::kQueryStages>();
    parity ^= 1;
  }
  TmaStoreWait();
}

// Zeroes the tiles in which no query sees a key, by the 64 threads of two warps.
template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ZeroForward(const Sm90ForwardArguments& a) {
  using Config = Sm90Forward<kHeadDim>;
  const AttentionProblem& p = a.problem;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90Tile tile = TileAt<kHeadDim, kPrefix>(a, index);
    if (tile.end_block > 0) continue;
    ZeroRows<T>(a.output, tile.batch, p.seq_q, p.heads, p.value_dim, tile.head, tile.first_row,
                Config::kBlockM);
    const int64_t batch_head = int64_t{tile.batch} * p.heads + tile.head;
    const int last_row = min(tile.first_row + Config::kBlockM, int(p.seq_q));
    for (int row = tile.first_row + threadIdx.x % 64; row < last_row; row += 64) {
      a.lse[batch_head * p.seq_q + row] = p.sink ? p.sink[tile.head] : -INFINITY;
    }
  }
}

// Divides by the softmax's sum; rows that saw nothing become zero.
template <typename T, int kHeadDim>
__device__ __forceinline__ void FinishForward(const Sm90ForwardArguments& a, const Sm90Tile& tile,
                                              int row_in_tile, int lane,
                                              const OnlineSoftmax& softmax,
                                              float (&o)[kHeadDim / 2]) {
  const AttentionProblem& p = a.problem;
  const int64_t batch_head = int64_t{tile.batch} * p.heads + tile.head;
  const float sink = p.sink ? p.sink[tile.head] : -INFINITY;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = softmax.sum[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const int row = tile.first_row + row_in_tile + 8 * r;
    const bool empty = total == 0.0f || row >= tile.queries;
    float inverse = 1.0f / total, lse = softmax.maximum[r] * p.scale + logf(total);
    if (p.sink) {
      inverse /= 1.0f + expf(sink - lse);
      lse = fmaxf(lse, sink) + log1pf(expf(-fabsf(lse - sink)));
    }
    if (lane % 4 == 0 && row < p.seq_q) {
      a.lse[batch_head * p.seq_q + row] = empty ? sink : lse;
    }
#pragma unroll
    for (int i = 2 * r; i < kHeadDim / 2; i += 4) {
      o[i] = empty ? 0.0f : o[i] * inverse;
      o[i + 1] = empty ? 0.0f : o[i + 1] * inverse;
    }
  }
}

template <typename T, int kHeadDim, bool kPrefix>
__device__ __forceinline__ void ConsumeForward(
    const Sm90ForwardArguments& a, typename Sm90Forward<kHeadDim>::template Shared<T>& shared) {
  using Config = Sm90Forward<kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const AttentionProblem& p = a.problem;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const float scale_log2 = p.scale * kLog2E;

  // The consumers take turns: barrier 1 + c is consumer c's permission to issue.
  const int successor = consumer + 1 == Config::kConsumers ? 0 : consumer + 1;
  const auto wait_turn = [&] { NamedBarrierSync(1 + consumer, 256); };
  const auto pass_turn = [&] { NamedBarrierArrive(1 + successor, 256); };
  if (consumer == Config::kConsumers - 1) pass_turn();

  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) BarrierArrive(barrier);
  };
  float o[kHeadDim / 2], s[kBlockN / 2];
  uint32_t probabilities[kBlockN / 16][4];
  const auto scores = [&](int query_stage, int stage) {  // S = Q K
    const uint64_t q = PanelDescriptor(shared.q[query_stage] + consumer * 64 * kPanelCols);
    const uint64_t k = PanelDescriptor(shared.k[stage]);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int panel = step / 4;
      const uint64_t within = step % 4 * kStepKMajor;
      Wgmma<T, false>(s, q + panel * (kBlockM * kPanelRowBytes / 16) + within,
                      k + panel * (kBlockN * kPanelRowBytes / 16) + within, step > 0);
    }
    WgmmaCommit();
  };
  const auto add_values = [&](int stage, bool accumulate) {  // O += P V
    const uint64_t v = PanelDescriptor(shared.v[stage], kBlockN * kPanelRowBytes);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      Wgmma<T, true>(o, probabilities[step], v + step * kStepMnMajor, accumulate || step > 0);
    }
    WgmmaCommit();
  };
  const int row_in_tile = 64 * consumer + 16 * warp + lane / 4;
  // Puts the output where the queries were, for StoreForward.
  const auto hand_over = [&](int query_stage) {
    WritePanels<T, kHeadDim>(
        o, reinterpret_cast<char*>(shared.q[query_stage]) + row_in_tile * kPanelRowBytes,
        kBlockM * kPanelRowBytes, lane);
    release(&shared.full_o[consumer]);
  };

  constexpr int kConsumerThreads = 128 * Config::kConsumers;

  RingPosition at, query_at;
  TileSchedule schedule;
  for (int index; (index = schedule.Next()) < a.tiles;) {
    const Sm90Tile next = TileAt<kHeadDim, kPrefix>(a, index);
    const int first_block = next.first_block, end_block = next.end_block;
    if (end_block == 0) continue;
    const Sm90Tile& tile = KeepTile(shared.tile[threadIdx.x / 32 - 4], next);
    BarrierWait(&shared.full_q[query_at.stage], query_at.parity);
    // The keys that all rows of the tile see. In registers: `tile` is for the blocks beyond.
    const int seen_from = tile.AllSeeFrom<kPrefix>(tile.first_row + kBlockM - 1);
    const int seen_to = tile.AllSeeTo<kPrefix>(tile.first_row, tile.first_row);
    const auto hides_some = [&](int j) {
      return (j + 1) * kBlockN > seen_to || j * kBlockN < seen_from;
    };
    const auto mask = [&](int j) {
      if (!hides_some(j)) return;
      const int column = j * kBlockN + lane % 4 * 2;
      const int row = tile.first_row + row_in_tile;
      if ((j + 1) * kBlockN > tile.KeyEnd(tile.first_row + 64 * consumer)) {
        const int ends[2] = {tile.KeyEnd(row), tile.KeyEnd(row + 8)};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
          if (column + i / 4 * 8 + i % 2 >= ends[i / 2 % 2]) s[i] = -INFINITY;
        }
      }
      if constexpr (kPrefix) return;
      if (j * kBlockN < tile.AllSeeFrom<kPrefix>(tile.first_row + 64 * consumer + 63)) {
        const int begins[2] = {tile.KeyBegin<kPrefix>(row), tile.KeyBegin<kPrefix>(row + 8)};
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
          if (column + i / 4 * 8 + i % 2 < begins[i / 2 % 2]) s[i] = -INFINITY;
        }
      }
      if (tile.bits) {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) {
          if (!tile.HasBit(column + i / 4 * 8 + i % 2)) s[i] = -INFINITY;
        }
      }
    };
    // Whether V of block j holds NaN or Inf that some row of the tile does not see.
    const auto clear_values = [&](int j, int stage) {
      if (!hides_some(j)) return false;
      return ClearNonFinite<kBlockN, kHeadDim, kConsumerThreads>(shared.v[stage], shared.not_finite,
                                                                 tile.keys - j * kBlockN);
    };
    const auto spread = [&](int j) {
      SpreadNonFinite<kBlockN, kHeadDim, kConsumerThreads, T>(
          o, shared.not_finite, p.value, tile.batch, p.seq_k, p.kv_heads, p.value_dim,
          tile.head / int(p.heads / p.kv_heads), j * kBlockN, kClearBarrier, [&](int r, int row) {
            return tile.Sees<kPrefix>(tile.first_row + row_in_tile + 8 * r, j * kBlockN + row);
          });
    };
    OnlineSoftmax softmax;
    float rescale[2];
    BarrierWait(&shared.full_k[at.stage], at.parity);
    WgmmaFence();
    scores(query_at.stage, at.stage);
    WgmmaWait<0>();
    Pin(s);
    release(&shared.empty_k[at.stage]);
    mask(end_block - 1);
    softmax.Step(s, scale_log2, rescale);
    PackOperand<T>(s, probabilities);
#pragma unroll 1
    for (int j = end_block - 2; j >= first_block; --j) {
      const RingPosition last = at;
      at.Advance<Config::kStages>();
      // Both waits come first: between the products they would make ptxas serialise them.
      BarrierWait(&shared.full_k[at.stage], at.parity);
      BarrierWait(&shared.full_v[last.stage], last.parity);
      const bool cleared = clear_values(j + 1, last.stage);
      wait_turn();
      Pin(s);
      Pin(o);
      WgmmaFence();
      scores(query_at.stage, at.stage);
      add_values(last.stage, j < end_block - 2);
      pass_turn();
      WgmmaWait<1>();
      Pin(s);
      release(&shared.empty_k[at.stage]);
      mask(j);
      softmax.Step(s, scale_log2, rescale);
      WgmmaWait<0>();
      Pin(o);
      release(&shared.empty_v[last.stage]);
      if (cleared) spread(j + 1);
      PackOperand<T>(s, probabilities);
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }
    BarrierWait(&shared.full_v[at.stage], at.parity);
    const bool cleared = clear_values(first_block, at.stage);
    Pin(o);
    WgmmaFence();
    add_values(at.stage, end_block > first_block + 1);
    WgmmaWait<0>();
    Pin(o);
    if (cleared) spread(first_block);
    release(&shared.empty_v[at.stage]);
    at.Advance<Config::kStages>();

    FinishForward<T, kHeadDim>(a, tile, row_in_tile, lane, softmax, o);
    hand_over(query_at.stage);
    query_at.Advance<Config::kQueryStages>();
  }
}

template <typename T, int kHeadDim, bool kPrefix>
__global__ void __launch_bounds__(Sm90Forward<kHeadDim>::kThreads, 1)
    AttentionForwardSm90Kernel(const __grid_constant__ Sm90ForwardArguments a,
                               const __grid_constant__ CUtensorMap query_map,
                               const __grid_constant__ CUtensorMap key_map,
                               const __grid_constant__ CUtensorMap value_map,
                               const __grid_constant__ CUtensorMap output_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Config = Sm90Forward<kHeadDim>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Config::template Shared<T>*>(memory);
  ForgetRows(shared.not_finite);
  if (threadIdx.x == 0) {
    TmaPrefetchDescriptor(query_map);
    TmaPrefetchDescriptor(key_map);
    TmaPrefetchDescriptor(value_map);
    TmaPrefetchDescriptor(output_map);
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    for (int i = 0; i < Config::kQueryStages; ++i) {
      BarrierInit(&shared.full_q[i], 1);
      BarrierInit(&shared.empty_q[i], 1);
    }
    for (int i = 0; i < Config::kConsumers; ++i) BarrierInit(&shared.full_o[i], 4);
    for (int i = 0; i < Config::kStages; ++i) {
      BarrierInit(&shared.full_k[i], 1);
      BarrierInit(&shared.full_v[i], 1);
      BarrierInit(&shared.empty_k[i], kConsumerWarps);
      BarrierInit(&shared.empty_v[i], kConsumerWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    RegistersDown<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      ProduceForward<T, kHeadDim, kPrefix>(a, query_map, key_map, value_map, shared);
    } else if (threadIdx.x == 32) {
      StoreForward<T, kHeadDim, kPrefix>(a, output_map, shared);
    } else if (threadIdx.x >= 64) {
      ZeroForward<T, kHeadDim, kPrefix>(a);
    }
  } else {
    RegistersUp<Config::kConsumerRegisters>();
    ConsumeForward<T, kHeadDim, kPrefix>(a, shared);
  }
#endif
}

template <typename T, int kHeadDim>
Status AttentionForwardSm90(Gpu gpu, const AttentionProblem& p, char* key_masks, T* output,
                            float* lse) {
  using Config = Sm90Forward<kHeadDim>;
  CUtensorMap query_map, key_map, value_map, output_map;
  if (!MakeTensorMap<T>(p.query, p.head_dim, p.heads, p.seq_q, p.batch, Config::kBlockM,
                        &query_map) ||
      !MakeTensorMap<T>(p.key, p.head_dim, p.kv_heads, p.seq_k, p.batch, Config::kBlockN,
                        &key_map) ||
      !MakeTensorMap<T>(p.value, p.value_dim, p.kv_heads, p.seq_k, p.batch, Config::kBlockN,
                        &value_map) ||
      !MakeTensorMap<T>(output, p.value_dim, p.heads, p.seq_q, p.batch, 64, &output_map)) {
    return Internal("dot_product_attention: cuTensorMapEncodeTiled failed");
  }
  Sm90ForwardArguments a{p, {}, output, lse};
  if (Status s = MakeKeyMasks(gpu, p, key_masks, &a.key_masks); !s.ok()) return s;
  a.query_blocks = int((p.seq_q + Config::kBlockM - 1) / Config::kBlockM);
  a.tiles = int(p.batch * p.heads) * a.query_blocks;
  a.heads_per_group = HeadsPerGroup(
      p.seq_k * (p.head_dim + p.value_dim) * int64_t{sizeof(T)} * p.kv_heads / p.heads,
      p.batch * p.heads);

  auto* kernel = SeesPrefixes(p) ? AttentionForwardSm90Kernel<T, kHeadDim, true>
                                 : AttentionForwardSm90Kernel<T, kHeadDim, false>;
  constexpr int kSharedBytes = sizeof(typename Config::template Shared<T>);
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return Internal(cudaGetErrorString(error));
  }
  const int blocks = std::min(CurrentDevice().multiprocessors, a.tiles);
  kernel<<<blocks, Config::kThreads, kSharedBytes, gpu.stream>>>(a, query_map, key_map, value_map,
                                                                 output_map);
  return CudaStatus();
}

}  // namespace tf_ops
