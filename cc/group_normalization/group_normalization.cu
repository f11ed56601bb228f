// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cc/common/rows.cuh"
#include "cc/group_normalization/group_normalization.h"

namespace tf_ops {
namespace {

constexpr int kThreads = 256;

// Where the elements of one group of one sample are: `outer` runs of neighbours, which are its
// channels' places in turn. A vector of kVec lies in one run, and, unless the channels come last,
// in one channel.
template <int kVec>
struct Group {
  int64_t first, stride, channel;  // elements, elements from run to run, its first channel
  int64_t run, vectors;            // vectors of a run, and of all
  __device__ Group(const GroupNormalizationProblem& p, int64_t group) {
    const int64_t sample = group / p.groups, g = group % p.groups;
    channel = g * p.group_channels;
    stride = p.channels * p.inner;
    first = sample * p.outer * stride + channel * p.inner;
    run = p.group_channels * p.inner / kVec;
    vectors = run * p.outer;
  }
  // The index of vector v in units of vectors, and its place in its run in elements.
  __device__ int64_t At(int64_t v, int64_t* in_run) const {
    int64_t o, r;
    if (vectors <= INT32_MAX) {  // divisions of 64 bits are slow
      o = uint32_t(v) / uint32_t(run), r = uint32_t(v) % uint32_t(run);
    } else {
      o = v / run, r = v % run;
    }
    *in_run = r * kVec;
    return (first + o * stride) / kVec + r;
  }
};

// A weight, or what stands for one that is left out.
template <typename T>
__device__ float Weight(const void* weights, bool is_float, int64_t channel, float absent) {
  if (!weights) return absent;
  return is_float ? __ldg(static_cast<const float*>(weights) + channel)
                  : float(static_cast<const T*>(weights)[channel]);
}

// The channel of element i of a vector, by the place of its first element in the run.
template <bool kLast>
__device__ int64_t Channel(const GroupNormalizationProblem& p, int64_t in_run, int i) {
  return kLast ? in_run + i : in_run / p.inner;
}

// A block per group of a sample. It is read three times, twice from the caches.
template <typename T, int kVec, bool kLast>
__global__ void __launch_bounds__(kThreads) GroupNormalizationKernel(GroupNormalizationProblem p) {
  using Vector = Raw<T, kVec>;
  __shared__ WarpSums<1> warps;
  int half = 0;
  for (int64_t index = blockIdx.x; index < p.samples * p.groups; index += gridDim.x) {
    const Group<kVec> group(p, index);
    const float count = float(group.vectors) * kVec;
    const auto load = [&](int64_t v, int64_t* in_run, float (&a)[kVec]) {
      const int64_t at = group.At(v, in_run);
      Unpack<T, kVec>(static_cast<const Vector*>(p.x)[at], a);
      return at;
    };
    float a[kVec], sum[1] = {0.0f}, squares[1] = {0.0f};
    int64_t in_run;
    for (int64_t v = threadIdx.x; v < group.vectors; v += kThreads) {
      load(v, &in_run, a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[0] += a[i];
    }
    SumOverRow<kThreads>(sum, warps, half);
    const float mean = sum[0] / count;
    for (int64_t v = threadIdx.x; v < group.vectors; v += kThreads) {
      load(v, &in_run, a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares[0] += (a[i] - mean) * (a[i] - mean);
    }
    SumOverRow<kThreads>(squares, warps, half);
    const float rstd = rsqrtf(squares[0] / count + p.epsilon);
    if (threadIdx.x == 0) {
      p.mean[index] = mean;
      p.rstd[index] = rstd;
    }
    for (int64_t v = threadIdx.x; v < group.vectors; v += kThreads) {
      const int64_t at = load(v, &in_run, a);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int64_t c = group.channel + Channel<kLast>(p, in_run, i);
        a[i] = (a[i] - mean) * rstd * Weight<T>(p.gamma, p.float_weights, c, 1.0f) +
               Weight<T>(p.beta, p.float_weights, c, 0.0f);
      }
      static_cast<Vector*>(p.y)[at] = Pack<T, kVec>(a);
    }
  }
}

// A block per group of a sample: the sums of its channels, then dx. Where channels come last,
// a thread keeps to the same kVec of them, and the threads of a channel are added up in shared
// memory; else the block takes the channels in turn.
template <typename T, int kVec, bool kLast>
__global__ void __launch_bounds__(kThreads)
    GroupNormalizationGradKernel(GroupNormalizationProblem p) {
  using Vector = Raw<T, kVec>;
  __shared__ WarpSums<2> warps;
  __shared__ float by_thread[kLast ? 2 : 1][kLast ? kThreads * kVec : 1];
  int half = 0;
  for (int64_t index = blockIdx.x; index < p.samples * p.groups; index += gridDim.x) {
    const Group<kVec> group(p, index);
    const float mean = p.mean[index], rstd = p.rstd[index];
    const int64_t sample = index / p.groups, channels_at = sample * p.channels + group.channel;
    const Vector *x = static_cast<const Vector*>(p.x), *dy = static_cast<const Vector*>(p.dy);
    float total[2] = {0.0f, 0.0f};  // of dy gamma, and of that times xhat
    const auto finish_channel = [&](int64_t c, float sum_dy, float sum_dy_xhat) {
      p.sum_dy[channels_at + c] = sum_dy;
      p.sum_dy_xhat[channels_at + c] = sum_dy_xhat;
      const float gamma = Weight<T>(p.gamma, p.float_weights, group.channel + c, 1.0f);
      total[0] += sum_dy * gamma;
      total[1] += sum_dy_xhat * gamma;
    };
    const auto add = [&](int64_t at, float (&sum)[2][kVec]) {
      float a[kVec], d[kVec];
      Unpack<T, kVec>(x[at], a);
      Unpack<T, kVec>(dy[at], d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sum[0][i] += d[i];
        sum[1][i] += d[i] * ((a[i] - mean) * rstd);
      }
    };
    if constexpr (kLast) {
      for (int64_t begin = 0; begin < group.run; begin += kThreads) {
        const int width = group.run - begin < kThreads ? group.run - begin : kThreads;
        const int turns = kThreads / width, turn = threadIdx.x / width;
        const int64_t r = begin + threadIdx.x % width;
        float sum[2][kVec] = {};
        if (turn < turns) {
          for (int64_t o = turn; o < p.outer; o += turns) {
            add((group.first + o * group.stride) / kVec + r, sum);
          }
        }
        __syncthreads();  // the last sums have been read
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          by_thread[0][threadIdx.x * kVec + i] = sum[0][i];
          by_thread[1][threadIdx.x * kVec + i] = sum[1][i];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < width * kVec; c += kThreads) {
          float sum_dy = 0.0f, sum_dy_xhat = 0.0f;
          for (int t = 0; t < turns; ++t) {
            sum_dy += by_thread[0][t * width * kVec + c];
            sum_dy_xhat += by_thread[1][t * width * kVec + c];
          }
          finish_channel(begin * kVec + c, sum_dy, sum_dy_xhat);
        }
      }
      SumOverRow<kThreads>(total, warps, half);
    } else {
      const int64_t per_channel = p.inner / kVec;
      for (int64_t c = 0; c < p.group_channels; ++c) {
        float sum[2][kVec] = {};
        for (int64_t o = 0; o < p.outer; ++o) {
          const int64_t base = (group.first + o * group.stride + c * p.inner) / kVec;
          for (int64_t v = threadIdx.x; v < per_channel; v += kThreads) add(base + v, sum);
        }
        float both[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          both[0] += sum[0][i];
          both[1] += sum[1][i];
        }
        SumOverRow<kThreads>(both, warps, half);
        // Every thread adds up the same totals; one writes.
        const float gamma = Weight<T>(p.gamma, p.float_weights, group.channel + c, 1.0f);
        total[0] += both[0] * gamma;
        total[1] += both[1] * gamma;
        if (threadIdx.x == 0) {
          p.sum_dy[channels_at + c] = both[0];
          p.sum_dy_xhat[channels_at + c] = both[1];
        }
      }
    }
    const float count = float(group.vectors) * kVec;
    const float average = total[0] / count, average_xhat = total[1] / count;
    for (int64_t v = threadIdx.x; v < group.vectors; v += kThreads) {
      int64_t in_run;
      const int64_t at = group.At(v, &in_run);
      float a[kVec], d[kVec];
      Unpack<T, kVec>(x[at], a);
      Unpack<T, kVec>(dy[at], d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int64_t c = group.channel + Channel<kLast>(p, in_run, i);
        const float g = d[i] * Weight<T>(p.gamma, p.float_weights, c, 1.0f);
        a[i] = rstd * (g - average - (a[i] - mean) * rstd * average_xhat);
      }
      static_cast<Vector*>(p.dx)[at] = Pack<T, kVec>(a);
    }
  }
}

constexpr int kColumns = 32, kSlices = 16;

// The kSlices warps of a block share the samples of 32 channels.
template <typename W>
__global__ void __launch_bounds__(kColumns* kSlices)
    GroupNormalizationWeightGradKernel(GroupNormalizationProblem p) {
  __shared__ float sums[2][kSlices][kColumns];
  const int64_t c = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float dgamma = 0.0f, dbeta = 0.0f;
  if (c < p.channels) {
#pragma unroll 4
    for (int64_t n = threadIdx.y; n < p.samples; n += kSlices) {
      dgamma += p.sum_dy_xhat[n * p.channels + c];
      dbeta += p.sum_dy[n * p.channels + c];
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = dgamma;
  sums[1][threadIdx.y][threadIdx.x] = dbeta;
  __syncthreads();
  if (threadIdx.y > 0 || c >= p.channels) return;
  for (int i = 1; i < kSlices; ++i) {
    dgamma += sums[0][i][threadIdx.x];
    dbeta += sums[1][i][threadIdx.x];
  }
  if (p.dgamma) static_cast<W*>(p.dgamma)[c] = W(dgamma);
  if (p.dbeta) static_cast<W*>(p.dbeta)[c] = W(dbeta);
}

// Calls f(T{}, kVec, std::bool_constant<channels come last>{}): vectors of 16 bytes where the
// runs, the channels and the pointers allow it, else single elements.
template <typename F>
Status Dispatch(DType dtype, const GroupNormalizationProblem& p, const F& f) {
  return DispatchType<float, half, bf16>("group_normalization", dtype, [&](auto t) {
    constexpr int kVec = 16 / sizeof(t);
    const bool last = p.inner == 1;
    bool aligned = (last ? p.group_channels : p.inner) % kVec == 0;
    for (const void* pointer : {p.x, p.dy, static_cast<const void*>(p.y), (const void*)p.dx}) {
      aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    }
    const auto with_layout = [&](auto vec) {
      last ? f(t, vec, std::true_type{}) : f(t, vec, std::false_type{});
    };
    if (aligned) {
      with_layout(std::integral_constant<int, kVec>{});
    } else {
      with_layout(std::integral_constant<int, 1>{});
    }
    return CudaStatus();
  });
}

unsigned Blocks(const GroupNormalizationProblem& p) {
  return std::clamp<int64_t>(p.samples * p.groups, 1, (int64_t{1} << 31) - 1);
}

}  // namespace

Status GroupNormalization(Gpu gpu, TensorView x, TensorView gamma, TensorView beta, int groups,
                          float epsilon, TensorView y, TensorView mean, TensorView rstd) {
  GroupNormalizationProblem p;
  if (Status s = DescribeGroupNormalization(x, gamma, beta, groups, mean, rstd, &p);
      !s.ok() || p.samples == 0) {
    return s;
  }
  if (!y.SameShapeAndDType(x)) return InvalidArgument("group_normalization: y must be as x");
  p.epsilon = epsilon;
  p.y = y.data;
  return Dispatch(x.dtype, p, [&](auto t, auto vec, auto last) {
    GroupNormalizationKernel<decltype(t), vec, last><<<Blocks(p), kThreads, 0, gpu.stream>>>(p);
  });
}

Status GroupNormalizationGrad(Gpu gpu, TensorView dy, TensorView x, TensorView gamma,
                              TensorView beta, TensorView mean, TensorView rstd, int groups, float,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace) {
  GroupNormalizationProblem p;
  if (Status s = DescribeGroupNormalizationGrad(dy, x, gamma, beta, mean, rstd, groups, dx, dgamma,
                                                dbeta, workspace, &p);
      !s.ok() || p.channels == 0) {
    return s;
  }
  Status status = Ok();
  if (p.samples > 0) {
    status = Dispatch(x.dtype, p, [&](auto t, auto vec, auto last) {
      GroupNormalizationGradKernel<decltype(t), vec, last>
          <<<Blocks(p), kThreads, 0, gpu.stream>>>(p);
    });
  }
  if (!status.ok() || (!p.dgamma && !p.dbeta)) return status;
  return DispatchType<float, half, bf16>(
      "group_normalization", p.float_weights ? DType::kFloat32 : x.dtype, [&](auto w) {
        GroupNormalizationWeightGradKernel<decltype(w)>
            <<<(p.channels + kColumns - 1) / kColumns, dim3(kColumns, kSlices), 0, gpu.stream>>>(p);
        return CudaStatus();
      });
}

}  // namespace tf_ops
