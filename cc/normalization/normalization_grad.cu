// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <initializer_list>

#include "cc/normalization/normalization.cuh"

namespace tf_ops {
namespace {

constexpr int kStages = 3;  // rows of dy and x in shared memory: this one and two to come

// Starts copying *from to shared memory; 16 bytes do it without passing through registers.
template <typename Vector>
__device__ void StartCopy(Vector* to, const Vector* from) {
  if constexpr (sizeof(Vector) == 16) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    *to = *from;
  }
}
// Copies started since the last call are one group.
__device__ void EndGroup() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kGroups` groups of this thread are under way.
template <int kGroups>
__device__ void WaitForGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
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

// A persistent block per part and group of weights takes kRows of its rows at a time, kThreads
// threads to a row. A thread has the same columns of all rows, so that its sums for the weights'
// gradients stay in registers. dy and x of the next rows are on their way to shared memory
// meanwhile; a thread reads only what it copied itself. dx may be dy: a block reads a row before
// it writes it.
template <typename T, bool kMean, int kVec, int kThreads, int kChunks, int kRows, int kBlocks>
__global__ void __launch_bounds__(kThreads* kRows, kBlocks)
    NormalizationGradKernel(NormalizationProblem p, int64_t parts) {
  using Vector = Raw<T, kVec>;
  constexpr int kBlock = kThreads * kRows;
  extern __shared__ uint4 shared[];
  Vector* const ring = reinterpret_cast<Vector*>(shared) + threadIdx.x;
  const auto staged = [&](int stage, int tensor, int chunk) {
    return ring + ((stage * 2 + tensor) * kChunks + chunk) * kBlock;
  };
  __shared__ float partial[2][kMean ? 2 : 1][32];
  int half = 0;

  const bool float_weights = p.weight_dtype == DType::kFloat32;
  const int lane = threadIdx.x % kThreads;
  const int64_t group = blockIdx.x % p.groups, part = blockIdx.x / p.groups;
  const int64_t vectors = p.cols / kVec, weight = group * vectors;
  const int64_t rows = p.rows / p.groups;  // of this group
  const int64_t first = part * kRows + threadIdx.x / kThreads, step = parts * kRows;
  // Turns are those of the block's first row: the sums over a row take all threads.
  const int64_t turns = (rows - part * kRows + step - 1) / step;
  const float cols = p.cols;
  const auto active = [&](int64_t turn) { return turn < turns && first + turn * step < rows; };
  const auto row_of = [&](int64_t turn) { return (first + turn * step) * p.groups + group; };
  const auto start = [&](int64_t turn, int stage) {
    if (active(turn)) {
      const int64_t base = row_of(turn) * vectors;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int64_t v = lane + c * kThreads;
        if (v >= vectors) continue;
        StartCopy(staged(stage, 0, c), static_cast<const Vector*>(p.dy) + base + v);
        StartCopy(staged(stage, 1, c), static_cast<const Vector*>(p.x) + base + v);
      }
    }
    EndGroup();
  };

  float dscale[kChunks * kVec] = {}, dbeta[kMean ? kChunks * kVec : 1] = {};
  start(0, 0);
  start(1, 1);
  RowStats next = active(0) ? LoadStats<kMean>(p, row_of(0)) : RowStats{};
  int stage = 0;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t row_vectors = active(turn) ? vectors : 0, base = row_of(turn) * vectors;
    const RowStats row = next;
    if (active(turn + 1)) next = LoadStats<kMean>(p, row_of(turn + 1));
    start(turn + 2, stage == 0 ? 2 : stage - 1);
    Vector ds[kChunks];
    if (p.ds) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int64_t v = lane + c * kThreads;
        if (v < row_vectors) ds[c] = __ldcg(static_cast<const Vector*>(p.ds) + base + v);
      }
    }
    WaitForGroups<kStages - 1>();

    // dy, xhat and g = dy (scale + scale_offset) of chunk c.
    const auto load = [&](int c, float (&d)[kVec], float (&xhat)[kVec], float (&g)[kVec]) {
      Unpack<T, kVec>(*staged(stage, 0, c), d);
      Unpack<T, kVec>(*staged(stage, 1, c), xhat);
#pragma unroll
      for (int i = 0; i < kVec; ++i) xhat[i] = (xhat[i] - row.mean) * row.rstd;
      if (p.scale) {
        LoadWeights<T, kVec>(p.scale, float_weights, weight + lane + c * kThreads, g);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = d[i] * (g[i] + p.scale_offset);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = d[i];
      }
    };
    float sums[kMean ? 2 : 1] = {};  // of g xhat, and of g
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (lane + c * kThreads >= row_vectors) continue;
      float d[kVec], xhat[kVec], g[kVec];
      load(c, d, xhat, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sums[0] += g[i] * xhat[i];
        dscale[c * kVec + i] += d[i] * xhat[i];
        if constexpr (kMean) {
          sums[1] += g[i];
          dbeta[c * kVec + i] += d[i];
        }
      }
    }
    SumOverRow<kThreads>(sums, partial, half);
    const float dot = (sums[0] + row.rstd * row.drstd) / cols;
    const float shift = kMean ? sums[kMean] / cols : 0.0f, dmean = row.dmean / cols;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t v = lane + c * kThreads;
      if (v >= row_vectors) continue;
      float d[kVec], xhat[kVec], g[kVec];
      load(c, d, xhat, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) g[i] = row.rstd * (g[i] - shift - xhat[i] * dot) + dmean;
      if (p.ds) {
        Unpack<T, kVec>(ds[c], d);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] += d[i];
      }
      static_cast<Vector*>(p.dx)[base + v] = Pack<T, kVec>(g);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // The block's sums, over its rows in flight, to `to`, [parts, groups, cols].
  const auto write = [&](const float* sums, float* to) {
    to += (part * p.groups + group) * p.cols;
    constexpr int kWidth = kThreads * kChunks * kVec;
    float* const rows_sums = reinterpret_cast<float*>(shared);
    float* const row = rows_sums + threadIdx.x / kThreads * kWidth;
    if constexpr (kRows > 1) __syncthreads();  // `shared` is in use
#pragma unroll
    for (int i = 0; i < kChunks * kVec; ++i) {
      const int64_t column = (lane + i / kVec * kThreads) * kVec + i % kVec;
      if (column < p.cols) (kRows > 1 ? row : to)[column] = sums[i];
    }
    if constexpr (kRows > 1) {
      __syncthreads();
      for (int column = threadIdx.x; column < p.cols; column += kBlock) {
        float sum = 0.0f;
        for (int r = 0; r < kRows; ++r) sum += rows_sums[r * kWidth + column];
        to[column] = sum;
      }
    }
  };
  WaitForGroups<0>();
  float* to = p.partial;
  if (p.dscale) {
    write(dscale, to);
    to += parts * p.groups * p.cols;
  }
  if constexpr (kMean) {
    if (p.dbeta) write(dbeta, to);
  }
}

constexpr int kWideThreads = 1024;

// As above for rows of any width, which are read twice, the second time mostly from the
// second-level cache; the sums for the weights' gradients are in the workspace.
template <typename T, bool kMean, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    NormalizationGradWideKernel(NormalizationProblem p, int64_t parts) {
  using Vector = Raw<T, kVec>;
  __shared__ float partial[2][kMean ? 2 : 1][32];
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
    SumOverRow<kWideThreads>(sums, partial, half);
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
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  if (blockIdx.y == 1) partial += parts * size;
  float sum = 0.0f;
  if (column < size) {
#pragma unroll 4
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
    SumPartsKernel<W><<<grid, dim3(kColumns, kSlices), 0, gpu.stream>>>(
        p.partial, parts, size, static_cast<W*>(first), static_cast<W*>(second));
    return CudaStatus();
  });
}

// The current device's multiprocessors, and bytes of shared memory that a block may have.
Status DescribeDevice(int* processors, int* shared) {
  int device;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    cudaDeviceGetAttribute(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return CudaStatus();
}

}  // namespace

Status NormalizeGrad(Gpu gpu, const NormalizationProblem& p) {
  if (p.rows == 0) return SumParts(gpu, p, 0);
  int processors, most_shared;
  if (Status s = DescribeDevice(&processors, &most_shared); !s.ok()) return s;
  // For blocks that take `rows` rows at a time and fill a multiprocessor by `blocks`.
  const auto count_parts = [&](int rows, int blocks) {
    return std::min({NormalizationGpuParts(p), (p.rows / p.groups + rows - 1) / rows,
                     std::max<int64_t>(int64_t{processors} * blocks / p.groups, 1)});
  };
  return DispatchVectors(p, {p.dy, p.ds, p.x, p.scale, p.dx}, [&](auto t, auto mean, auto vec) {
    using T = decltype(t);
    constexpr bool kMean = decltype(mean)::value;
    constexpr int kVec = decltype(vec)::value;
    int64_t parts = 0;
    const auto launch = [&](auto layout) {
      using Layout = decltype(layout);
      constexpr int kThreads = Layout::kThreadsPerRow, kChunks = Layout::kChunksPerThread;
      constexpr int kRows = kThreads < 256 ? 256 / kThreads : 1;
      constexpr int kBlocks = kChunks == 1 ? 4 : kThreads < 512 ? 2 : 1;  // as registers allow
      constexpr int kShared = kStages * 2 * kChunks * kThreads * kRows * kVec * sizeof(T);
      if (kShared > most_shared) return false;
      parts = count_parts(kRows, kBlocks);
      const auto kernel =
          NormalizationGradKernel<T, kMean, kVec, kThreads, kChunks, kRows, kBlocks>;
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      kernel<<<parts * p.groups, kThreads * kRows, kShared, gpu.stream>>>(p, parts);
      return true;
    };
    if (!DispatchLayout<RowLayout<8, 1>, RowLayout<16, 1>, RowLayout<32, 1>, RowLayout<32, 4>,
                        RowLayout<256, 2>, RowLayout<512, 4>>(p.cols / kVec, launch)) {
      parts = count_parts(1, 1);
      NormalizationGradWideKernel<T, kMean, kVec>
          <<<parts * p.groups, kWideThreads, 0, gpu.stream>>>(p, parts);
    }
    const Status status = CudaStatus();
    return status.ok() ? SumParts(gpu, p, parts) : status;
  });
}

}  // namespace tf_ops
