// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <initializer_list>

#include "cc/common/hopper.cuh"
#include "cc/common/tuning.h"
#include "cc/normalization/normalization.cuh"

namespace tf_ops {
namespace {

// Starts copying *from to shared memory; 16 bytes do it without passing through registers.
template <typename Vector>
__device__ void StartCopy(Vector* to, const Vector* from) {
  if constexpr (sizeof(Vector) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(to)), "l"(from)
                 : "memory");
  } else {
    *to = *from;
  }
}

// From Hopper on a kernel that is launched to do so may begin while the one before still runs: once
// all blocks of that have allowed it, or ended. Until the wait it sees nothing of their results.
__device__ void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What the gradient needs to know of a row.
struct RowStats {
  float mean = 0.0f, rstd = 0.0f, dmean = 0.0f, drstd = 0.0f;
};
template <bool kMean>
__device__ RowStats LoadStats(const NormalizationProblem& p, int64_t row) {
  RowStats stats;
  stats.rstd = __ldg(p.rstd + row);
  if (p.drstd) stats.drstd = __ldg(p.drstd + row);
  if constexpr (kMean) {
    stats.mean = __ldg(p.mean + row);
    if (p.dmean) stats.dmean = __ldg(p.dmean + row);
  }
  return stats;
}

// Sums over the threads of the kCluster blocks of a cluster, which share a row: each warp sends its
// sums to all of them, and they arrive at the barrier of their half. A half is free again when
// those of the next call have come: they are sent after it was read.
template <int kThreads, int kCluster, int kValues>
struct ClusterSum {
  static constexpr int kWarps = kThreads / 32, kCount = kCluster * kWarps;
  uint64_t barriers[2];
  alignas(16) float values[2][kValues][kCount];

  __device__ void Init() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      BarrierInit(&barriers[0], 1);
      BarrierInit(&barriers[1], 1);
      FenceBarrierInit();
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  __device__ void Add(float (&value)[kValues], int turn, int rank) {
#if __CUDA_ARCH__ >= 900
    const int half = turn % 2, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) BarrierExpectBytes(&barriers[half], kValues * kCount * sizeof(float));
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      value[i] = WarpReduce(value[i], Sum());
      if (lane >= kCluster) continue;
      const float* to = &values[half][i][rank * kWarps + threadIdx.x / 32];
      asm volatile(
          "{\n.reg .b32 to, barrier;\n"
          "mapa.shared::cluster.u32 to, %0, %2;\n"
          "mapa.shared::cluster.u32 barrier, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [barrier];\n}" ::"r"(
              SharedAddress(to)),
          "r"(SharedAddress(&barriers[half])), "r"(lane), "f"(value[i])
          : "memory");
    }
    BarrierWait(&barriers[half], turn / 2 % 2);
#pragma unroll
    for (int i = 0; i < kValues; ++i) value[i] = SumShared<kCount>(values[half][i]);
#endif
  }
};

// How many rows a block takes at a time, and what of them is in flight.
template <typename Layout>
struct GradShape {
  static constexpr int kCluster = Layout::kBlocksPerRow;
  // A block of 512 threads on a multiprocessor leaves 128 registers to each.
  static constexpr int kBlock = 512, kRows = kBlock / Layout::kThreadsPerRow;
  static constexpr int kTensor = Layout::kChunksPerThread * kBlock;  // vectors
  // More than two vectors of g and xhat do not fit the registers from one pass to the other.
  static constexpr bool kReadsTwice = Layout::kChunksPerThread > 2;
};
constexpr int kStages = 3;  // rows in shared memory: this one and two to come

// A persistent block, or cluster of blocks, per part and group of weights takes kRows of its rows
// at a time, kThreads threads of each block to a row. A thread has the same columns of all rows, so
// that its weights and its sums for their gradients stay in registers: two vectors of 16 bytes are
// as many as there is room for. dy, x and ds of the next rows are on their way to shared memory
// meanwhile; a thread reads only what it copied itself. dx may be dy: a block reads a row before
// it writes it.
template <typename T, bool kMean, int kVec, typename Layout>
__global__ void __launch_bounds__(GradShape<Layout>::kBlock, 1)
    NormalizationGradKernel(NormalizationProblem p, int64_t parts) {
  using Vector = Raw<T, kVec>;
  using Shape = GradShape<Layout>;
  constexpr int kThreads = Layout::kThreadsPerRow, kChunks = Layout::kChunksPerThread;
  constexpr int kRows = Shape::kRows, kBlock = Shape::kBlock, kTensor = Shape::kTensor;
  constexpr int kCluster = Shape::kCluster, kValues = kMean ? 2 : 1;
  extern __shared__ uint4 shared[];
  Vector* const ring = reinterpret_cast<Vector*>(shared) + threadIdx.x;
  const int stage = (p.ds ? 3 : 2) * kTensor;
  __shared__
      std::conditional_t<(kCluster > 1), ClusterSum<kThreads, kCluster, kValues>, WarpSums<kValues>>
          sum;
  int half = 0;

  const int rank = blockIdx.x % kCluster;
  const int64_t group = blockIdx.x / kCluster % p.groups, part = blockIdx.x / kCluster / p.groups;
  const int64_t vectors = p.cols / kVec;
  const int64_t first_vector = rank * (kThreads * kChunks) + threadIdx.x % kThreads;
  bool valid[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) valid[c] = first_vector + c * kThreads < vectors;

  // Rows are counted within the group: the one being started, and this one.
  const int64_t rows = p.rows / p.groups, step = parts * kRows;
  int64_t row_ahead = part * kRows + threadIdx.x / kThreads, row_here = row_ahead;
  // Turns are those of the block's first row: the sums over a row take whole warps.
  const int64_t turns = (rows - part * kRows + step - 1) / step;
  int64_t stats_row = row_ahead * p.groups + group;
  int64_t ahead = (stats_row * vectors + first_vector) * sizeof(Vector), here = ahead;  // bytes
  const int64_t stride = step * p.groups * vectors * sizeof(Vector);
  int stage_ahead = 0, stage_here = 0;
  const auto start = [&] {
    if (row_ahead < rows) {
      const auto copy = [&](const void* tensor, int number) {
        const Vector* from =
            reinterpret_cast<const Vector*>(static_cast<const char*>(tensor) + ahead);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (!valid[c]) continue;
          StartCopy(&ring[stage_ahead + number * kTensor + c * kBlock], from + c * kThreads);
        }
      };
      copy(p.dy, 0);
      copy(p.x, 1);
      if (p.ds) copy(p.ds, 2);
    }
    CommitCopies();
    row_ahead += step;
    ahead += stride;
    stage_ahead = stage_ahead == (kStages - 1) * stage ? 0 : stage_ahead + stage;
  };

  LetNextKernelBegin();
  start();
  start();
  RowStats next = row_here < rows ? LoadStats<kMean>(p, stats_row) : RowStats{};
  float dscale[kChunks][kVec] = {}, dbeta[kMean ? kChunks : 1][kVec] = {};
  // The weights: as they are in memory where registers are short.
  float w[Shape::kReadsTwice ? 1 : kChunks][kVec];
  Vector raw_w[Shape::kReadsTwice ? kChunks : 1] = {};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const bool load = p.scale && valid[c];
    const int64_t at = group * vectors + first_vector + c * kThreads;
    if constexpr (Shape::kReadsTwice) {
      if (load) raw_w[c] = __ldg(static_cast<const Vector*>(p.scale) + at);
    } else {
      if (load) LoadWeights<T, kVec>(p.scale, p.weight_dtype == DType::kFloat32, at, w[c]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[c][i] = load ? w[c][i] + p.scale_offset : 1.0f;
    }
  }
  const float scale_offset = p.scale ? p.scale_offset : 1.0f;
  // xhat and g = dy (scale + scale_offset) of a vector, from d = dy and xhat = x.
  const auto prepare = [&](int c, const RowStats& row, const float (&d)[kVec], float (&xhat)[kVec],
                           float (&g)[kVec]) {
    if constexpr (Shape::kReadsTwice) {
      KeepRaw(raw_w[c]);
      Unpack<T, kVec>(raw_w[c], g);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      xhat[i] = (xhat[i] - row.mean) * row.rstd;
      g[i] = d[i] * (Shape::kReadsTwice ? g[i] + scale_offset : w[c][i]);
    }
  };
  if constexpr (kCluster > 1) sum.Init();

  const float inverse_cols = 1.0f / p.cols;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const bool active = row_here < rows;
    const RowStats row = next;
    row_here += step;
    stats_row += step * p.groups;
    if (row_here < rows) next = LoadStats<kMean>(p, stats_row);
    start();
    WaitForCopyGroups<kStages - 1>();

    const Vector* const from = ring + stage_here;
    float g[kChunks][kVec], xhat[kChunks][kVec];
    float sums[kValues] = {};  // of g xhat, and of g
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!valid[c] || !active) continue;
      float d[kVec];
      Unpack<T, kVec>(from[c * kBlock], d);
      Unpack<T, kVec>(from[kTensor + c * kBlock], xhat[c]);
      prepare(c, row, d, xhat[c], g[c]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sums[0] += g[c][i] * xhat[c][i];
        dscale[c][i] += d[i] * xhat[c][i];
        if constexpr (kMean) {
          sums[1] += g[c][i];
          dbeta[c][i] += d[i];
        }
      }
    }
    if constexpr (kCluster > 1) {
      sum.Add(sums, turn, rank);
    } else {
      SumOverRow<kThreads, kRows>(sums, sum, half);
    }
    const float dot = (sums[0] + row.rstd * row.drstd) * inverse_cols;
    const float shift = kMean ? sums[kValues - 1] * inverse_cols : 0.0f;
    const float dmean = row.dmean * inverse_cols;
    Vector* const dx = reinterpret_cast<Vector*>(static_cast<char*>(p.dx) + here);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!valid[c] || !active) continue;
      float d[kVec];
      if constexpr (Shape::kReadsTwice) {
        Unpack<T, kVec>(from[c * kBlock], d);
        Unpack<T, kVec>(from[kTensor + c * kBlock], xhat[c]);
        prepare(c, row, d, xhat[c], g[c]);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        d[i] = row.rstd * (g[c][i] - shift - xhat[c][i] * dot);
        if constexpr (kMean) d[i] += dmean;
      }
      if (p.ds) {
        float ds[kVec];
        Unpack<T, kVec>(from[2 * kTensor + c * kBlock], ds);
#pragma unroll
        for (int i = 0; i < kVec; ++i) d[i] += ds[i];
      }
      dx[c * kThreads] = Pack<T, kVec>(d);
    }
    here += stride;
    stage_here = stage_here == (kStages - 1) * stage ? 0 : stage_here + stage;
  }
  WaitForCopyGroups<0>();

  // The block's sums, over its rows in flight, to partial sums number `tensor`, [parts, groups,
  // cols].
  const auto write = [&](const float (&sums)[kChunks][kVec], int tensor) {
    float* const out = p.partial + ((tensor * parts + part) * p.groups + group) * p.cols;
    constexpr int kWidth = kThreads * kChunks * kVec;
    float* const block_sums = reinterpret_cast<float*>(shared);
    float* const to = kRows > 1 ? block_sums + threadIdx.x / kThreads * kWidth : out;
    if constexpr (kRows > 1) __syncthreads();  // `shared` is in use
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!valid[c]) continue;
      const int64_t column = (first_vector + c * kThreads) * kVec;
      if constexpr (kVec == 1) {
        to[column] = sums[c][0];
      } else {
#pragma unroll
        for (int i = 0; i < kVec; i += 4) {
          *reinterpret_cast<float4*>(to + column + i) =
              make_float4(sums[c][i], sums[c][i + 1], sums[c][i + 2], sums[c][i + 3]);
        }
      }
    }
    if constexpr (kRows > 1) {
      __syncthreads();
      for (int column = threadIdx.x; column < p.cols; column += kBlock) {
        float sum = 0.0f;
        for (int r = 0; r < kRows; ++r) sum += block_sums[r * kWidth + column];
        out[column] = sum;
      }
    }
  };
  if (p.dscale) write(dscale, 0);
  if constexpr (kMean) {
    if (p.dbeta) write(dbeta, p.dscale ? 1 : 0);
  }
}

// False: this device has no such kernel, or not the shared memory for it.
// How many blocks share the rows of a group: as many as run at once, of at most `turns`, unless a
// part of them is as quick and leaves less to add up.
int64_t ChooseParts(DType dtype, const NormalizationProblem& p, int64_t turns, int64_t at_once) {
  constexpr Tunable kParts = {"normalization/grad_parts", "GPU", {"rows", "cols", "groups"}};
  const int64_t most = std::min(NormalizationGpuParts(p), turns);
  return Choose(kParts, dtype, {p.rows, p.cols, p.groups}, std::min(most, at_once),
                {16, 33, 44, 66, 88, 99, 110, 120, 126, 132, 264},
                [&](int64_t n) { return n >= 1 && n <= most && n <= 2 * at_once; });
}

template <typename T, bool kMean, int kVec, typename Layout>
bool LaunchGrad(Gpu gpu, const NormalizationProblem& p, int64_t* parts) {
  using Shape = GradShape<Layout>;
  constexpr int kCluster = Shape::kCluster, kRows = Shape::kRows;
  const DeviceProperties device = CurrentDevice();
  if (kCluster > 1 && !(TF_OPS_SM90A && device.major == 9)) return false;
  if (Shape::kReadsTwice && p.scale && p.weight_dtype != kDTypeOf<T>) return false;
  const auto kernel = NormalizationGradKernel<T, kMean, kVec, Layout>;
  const int ring = kStages * (p.ds ? 3 : 2) * Shape::kTensor * int(sizeof(Raw<T, kVec>));
  const int sums = kRows > 1 ? Shape::kTensor * kVec * int(sizeof(float)) : 0;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(Shape::kBlock);
  config.dynamicSmemBytes = std::max(ring, sums);
  config.stream = gpu.stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = kCluster > 1 ? 1 : 0;
  constexpr size_t kStatic = 1024;  // at most
  int number, most_shared;
  if (cudaGetDevice(&number) != cudaSuccess ||
      cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, number) !=
          cudaSuccess) {
    return true;  // CudaStatus() tells
  }
  if (config.dynamicSmemBytes + kStatic > size_t(most_shared)) return false;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       int(config.dynamicSmemBytes));
  int at_once = device.multiprocessors;
  if (kCluster > 1) {
    config.gridDim = dim3(kCluster);
    if (cudaOccupancyMaxActiveClusters(&at_once, kernel, &config) != cudaSuccess) return true;
  }
  *parts = ChooseParts(kDTypeOf<T>, p, (p.rows / p.groups + kRows - 1) / kRows,
                       std::max<int64_t>(at_once / p.groups, 1));
  config.gridDim = dim3(*parts * p.groups * kCluster);
  cudaLaunchKernelEx(&config, kernel, p, *parts);
  return true;
}

constexpr int kWideThreads = 1024;

// As above for rows of any width, which are read twice, the second time mostly from the
// second-level cache; the sums for the weights' gradients are in the workspace.
template <typename T, bool kMean, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    NormalizationGradWideKernel(NormalizationProblem p, int64_t parts) {
  using Vector = Raw<T, kVec>;
  __shared__ WarpSums<kMean ? 2 : 1> warps;
  int half = 0;
  const bool float_weights = p.weight_dtype == DType::kFloat32;
  const int64_t group = blockIdx.x % p.groups, part = blockIdx.x / p.groups;
  const int64_t vectors = p.cols / kVec, weight = group * vectors;
  const float cols = p.cols;
  float* dscale = p.dscale ? p.partial + (part * p.groups + group) * p.cols : nullptr;
  float* dbeta =
      p.dbeta ? p.partial + ((dscale ? parts + part : part) * p.groups + group) * p.cols : nullptr;

  for (int64_t turn = part; turn < p.rows / p.groups; turn += parts) {
    const int64_t row = turn * p.groups + group, base = row * vectors;
    const RowStats stats = LoadStats<kMean>(p, row);
    const auto load = [&](int64_t v, float (&d)[kVec], float (&xhat)[kVec], float (&g)[kVec]) {
      Unpack<T, kVec>(static_cast<const Vector*>(p.dy)[base + v], d);
      Unpack<T, kVec>(static_cast<const Vector*>(p.x)[base + v], xhat);
#pragma unroll
      for (int i = 0; i < kVec; ++i) xhat[i] = (xhat[i] - stats.mean) * stats.rstd;
      if (p.scale) {
        LoadWeights<T, kVec>(p.scale, float_weights, weight + v, g);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = d[i] * (g[i] + p.scale_offset);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = d[i];
      }
    };
    float sums[kMean ? 2 : 1] = {};
    for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
      float d[kVec], xhat[kVec], g[kVec];
      load(v, d, xhat, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int64_t column = v * kVec + i;
        sums[0] += g[i] * xhat[i];
        if (dscale) dscale[column] = (turn == part ? 0.0f : dscale[column]) + d[i] * xhat[i];
        if constexpr (kMean) {
          sums[1] += g[i];
          if (dbeta) dbeta[column] = (turn == part ? 0.0f : dbeta[column]) + d[i];
        }
      }
    }
    SumOverRow<kWideThreads>(sums, warps, half);
    const float dot = (sums[0] + stats.rstd * stats.drstd) / cols;
    const float shift = kMean ? sums[kMean] / cols : 0.0f, dmean = stats.dmean / cols;
    for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
      float d[kVec], xhat[kVec], g[kVec];
      load(v, d, xhat, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) g[i] = stats.rstd * (g[i] - shift - xhat[i] * dot) + dmean;
      if (p.ds) {
        Unpack<T, kVec>(static_cast<const Vector*>(p.ds)[base + v], d);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] += d[i];
      }
      static_cast<Vector*>(p.dx)[base + v] = Pack<T, kVec>(g);
    }
  }
}

constexpr int kColumns = 32, kSlices = 16;

// out = the sum of partial, [parts, size], over the parts, which the kSlices warps of a block
// share; a block takes 32 columns of the first tensor, or with blockIdx.y 1 of the second.
template <typename W>
__global__ void __launch_bounds__(kColumns* kSlices)
    SumPartsKernel(const float* partial, int64_t parts, int64_t size, W* first, W* second) {
  __shared__ float sums[kSlices][kColumns];
  WaitForKernelBefore();
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  if (blockIdx.y == 1) partial += parts * size;
  float sum = 0.0f;
  if (column < size) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += kSlices) {
      sum += partial[part * size + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= size) return;
  for (int i = 1; i < kSlices; ++i) sum += sums[i][threadIdx.x];
  (blockIdx.y == 1 ? second : first)[column] = W(sum);
}

Status SumParts(Gpu gpu, const NormalizationProblem& p, int64_t parts) {
  void* const first = p.dscale ? p.dscale : p.dbeta;
  void* const second = p.dscale ? p.dbeta : nullptr;
  if (!first) return Ok();
  const int64_t size = p.groups * p.cols;
  return DispatchType<float, half, bf16>("normalization", p.weight_dtype, [&](auto w) {
    using W = decltype(w);
    const dim3 grid((size + kColumns - 1) / kColumns, second ? 2 : 1);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(kColumns, kSlices);
    config.stream = gpu.stream;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = CurrentDevice().major >= 9 ? 1 : 0;
    cudaLaunchKernelEx(&config, SumPartsKernel<W>, static_cast<const float*>(p.partial), parts,
                       size, static_cast<W*>(first), static_cast<W*>(second));
    return CudaStatus();
  });
}

}  // namespace

Status NormalizeGrad(Gpu gpu, const NormalizationProblem& p) {
  if (p.rows == 0) return SumParts(gpu, p, 0);
  if (p.groups > INT32_MAX / 8) {  // a grid holds 2^31 blocks, of which a row takes up to 8
    return InvalidArgument("normalization: the weights have more than 2^28 rows");
  }
  return DispatchVectors(p, {p.dy, p.ds, p.x, p.scale, p.dx}, [&](auto t, auto mean, auto vec) {
    using T = decltype(t);
    constexpr bool kMean = decltype(mean)::value;
    constexpr int kVec = decltype(vec)::value;
    int64_t parts = 0;
    const auto launch = [&](auto layout) {
      return LaunchGrad<T, kMean, kVec, decltype(layout)>(gpu, p, &parts);
    };
    if (!DispatchLayout<RowLayout<8, 1>, RowLayout<16, 1>, RowLayout<32, 1>, RowLayout<32, 2>,
                        RowLayout<64, 2>, RowLayout<128, 2>, RowLayout<256, 2>, RowLayout<512, 2>,
                        RowLayout<512, 4>, RowLayout<512, 2, 2>, RowLayout<512, 4, 2>,
                        RowLayout<512, 2, 4>, RowLayout<512, 4, 4>, RowLayout<512, 2, 8>>(
            p.cols / kVec, launch)) {
      parts = ChooseParts(kDTypeOf<T>, p, p.rows / p.groups,
                          std::max<int64_t>(CurrentDevice().multiprocessors / p.groups, 1));
      NormalizationGradWideKernel<T, kMean, kVec>
          <<<parts * p.groups, kWideThreads, 0, gpu.stream>>>(p, parts);
    }
    const Status status = CudaStatus();
    return status.ok() ? SumParts(gpu, p, parts) : status;
  });
}

}  // namespace tf_ops
