// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include "cc/normalization/normalization.cuh"

namespace tf_ops {
namespace {

// kRows rows at a time per block, kThreads threads to a row, which they hold in registers: it is
// read from memory once, all of its loads in flight together. Of registers each thread may have
// what lets 1024 run on a multiprocessor, so that blocks load while others wait for their sums.
template <typename T, bool kFloatWeights, bool kMean, int kVec, int kThreads, int kChunks,
          int kRows>
__global__ void __launch_bounds__(kThreads* kRows, 1024 / (kThreads * kRows))
    NormalizationKernel(NormalizationProblem p) {
  using Vector = Raw<T, kVec>;
  __shared__ WarpSums<1> warps;
  int half = 0;
  // Weights that are left out are zeros.
  const float scale_offset = p.scale ? p.scale_offset : 1.0f;
  const int lane = threadIdx.x % kThreads;
  const float cols = p.cols;

  // Every thread of a block makes the same number of turns: the sums take all of them.
  for (int64_t first = blockIdx.x * int64_t{kRows}; first < p.rows;
       first += gridDim.x * int64_t{kRows}) {
    const int64_t row = first + threadIdx.x / kThreads;
    const int64_t vectors = row < p.rows ? p.cols / kVec : 0, base = row * vectors;

    Vector x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t v = lane + c * kThreads;
      if (v < vectors) x[c] = __ldcg(static_cast<const Vector*>(p.x) + base + v);
    }
    if (p.residual) {
      Vector residual[kChunks];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int64_t v = lane + c * kThreads;
        if (v < vectors) residual[c] = __ldcg(static_cast<const Vector*>(p.residual) + base + v);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int64_t v = lane + c * kThreads;
        if (v >= vectors) continue;
        float a[kVec], b[kVec];
        Unpack<T, kVec>(x[c], a);
        Unpack<T, kVec>(residual[c], b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) a[i] += b[i];
        x[c] = Pack<T, kVec>(a);
        static_cast<Vector*>(p.s)[base + v] = x[c];
      }
    }

    float mean = 0.0f;
    if constexpr (kMean) {
      float sum[1] = {0.0f};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (lane + c * kThreads >= vectors) continue;
        float a[kVec];
        Unpack<T, kVec>(x[c], a);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[0] += a[i];
      }
      SumOverRow<kThreads>(sum, warps, half);
      mean = sum[0] / cols;
    }
    float squares[1] = {0.0f};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (lane + c * kThreads >= vectors) continue;
      float a[kVec];
      Unpack<T, kVec>(x[c], a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares[0] += (a[i] - mean) * (a[i] - mean);
    }
    SumOverRow<kThreads>(squares, warps, half);
    const float rstd = rsqrtf(squares[0] / cols + p.epsilon);
    if (lane == 0 && row < p.rows) {
      if constexpr (kMean) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }

    const int64_t weight = GroupOf(p, row) * vectors;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t v = lane + c * kThreads;
      if (v >= vectors) continue;
      float a[kVec], scale[kVec] = {}, beta[kVec] = {};
      Unpack<T, kVec>(x[c], a);
      if (p.scale) LoadWeights<T, kVec>(p.scale, kFloatWeights, weight + v, scale);
      if (kMean && p.beta) LoadWeights<T, kVec>(p.beta, kFloatWeights, weight + v, beta);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        a[i] = (a[i] - mean) * rstd * (scale[i] + scale_offset);
        if constexpr (kMean) a[i] += beta[i];
      }
      static_cast<Vector*>(p.y)[base + v] = Pack<T, kVec>(a);
    }
  }
}

constexpr int kWideThreads = 1024;

// A block per row of any width, which is read once more for each sum and for the result, then
// mostly from the second-level cache.
template <typename T, bool kMean, int kVec>
__global__ void __launch_bounds__(kWideThreads) NormalizationWideKernel(NormalizationProblem p) {
  using Vector = Raw<T, kVec>;
  __shared__ WarpSums<1> warps;
  int half = 0;
  const bool float_weights = p.weight_dtype == DType::kFloat32;
  const int64_t vectors = p.cols / kVec;
  const float cols = p.cols;

  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Vector* x = static_cast<const Vector*>(p.x) + row * vectors;
    if (p.residual) {
      const Vector* residual = static_cast<const Vector*>(p.residual) + row * vectors;
      Vector* s = static_cast<Vector*>(p.s) + row * vectors;
      // A thread reads back only what it wrote itself.
      for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
        float a[kVec], b[kVec];
        Unpack<T, kVec>(x[v], a);
        Unpack<T, kVec>(residual[v], b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) a[i] += b[i];
        s[v] = Pack<T, kVec>(a);
      }
      x = s;
    }
    float mean = 0.0f;
    if constexpr (kMean) {
      float sum[1] = {0.0f};
      for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
        float a[kVec];
        Unpack<T, kVec>(x[v], a);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[0] += a[i];
      }
      SumOverRow<kWideThreads>(sum, warps, half);
      mean = sum[0] / cols;
    }
    float squares[1] = {0.0f};
    for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
      float a[kVec];
      Unpack<T, kVec>(x[v], a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares[0] += (a[i] - mean) * (a[i] - mean);
    }
    SumOverRow<kWideThreads>(squares, warps, half);
    const float rstd = rsqrtf(squares[0] / cols + p.epsilon);
    if (threadIdx.x == 0) {
      if constexpr (kMean) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    const int64_t weight = GroupOf(p, row) * vectors;
    for (int64_t v = threadIdx.x; v < vectors; v += kWideThreads) {
      float a[kVec], w[kVec];
      Unpack<T, kVec>(x[v], a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) a[i] = (a[i] - mean) * rstd;
      if (p.scale) {
        LoadWeights<T, kVec>(p.scale, float_weights, weight + v, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) a[i] *= w[i] + p.scale_offset;
      }
      if (p.beta) {
        LoadWeights<T, kVec>(p.beta, float_weights, weight + v, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) a[i] += w[i];
      }
      static_cast<Vector*>(p.y)[row * vectors + v] = Pack<T, kVec>(a);
    }
  }
}

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

}  // namespace

Status Normalize(Gpu gpu, const NormalizationProblem& p) {
  return DispatchVectors(
      p, {p.x, p.residual, p.scale, p.beta, p.y, p.s}, [&](auto t, auto mean, auto vec) {
        using T = decltype(t);
        constexpr bool kMean = decltype(mean)::value;
        constexpr int kVec = decltype(vec)::value;
        const auto launch = [&](auto layout) {
          using Layout = decltype(layout);
          constexpr int kThreads = Layout::kThreadsPerRow;
          constexpr int kRows = kThreads < 128 ? 128 / kThreads : 1;
          const int64_t blocks = std::min((p.rows + kRows - 1) / kRows, kMostBlocks);
          const auto with = [&](auto float_weights) {
            NormalizationKernel<T, decltype(float_weights)::value, kMean, kVec, kThreads,
                                Layout::kChunksPerThread, kRows>
                <<<blocks, kThreads * kRows, 0, gpu.stream>>>(p);
          };
          p.weight_dtype == kDTypeOf<T> ? with(std::is_same<T, float>{}) : with(std::true_type{});
          return true;
        };
        // A warp or less for a row as long as that holds it without spilling; four vectors per
        // thread keep enough loads in flight.
        if (!DispatchLayout<RowLayout<8, 1>, RowLayout<16, 1>, RowLayout<32, 1>, RowLayout<32, 4>,
                            RowLayout<128, 4>, RowLayout<256, 4>, RowLayout<512, 4>,
                            RowLayout<1024, 4>>(p.cols / kVec, launch)) {
          NormalizationWideKernel<T, kMean, kVec>
              <<<std::min(p.rows, kMostBlocks), kWideThreads, 0, gpu.stream>>>(p);
        }
        return CudaStatus();
      });
}

}  // namespace tf_ops
