// SPDX-License-Identifier: Apache-2.0
// Kernels over elements: Elementwise(gpu, f, out, in...) is out[i] = f(in[i]...), where f takes and
// returns floats. Inputs and output have one dtype and size, and may be the same memory.
#pragma once

#include <algorithm>

#include "cc/common/rows.cuh"

namespace tf_ops {

template <int kVec>
struct FloatVector {
  float at[kVec];
};

template <int kVec, typename T>
__device__ FloatVector<kVec> ReadVector(const T* in, int64_t v) {
  FloatVector<kVec> x;
  Unpack<T, kVec>(__ldcs(reinterpret_cast<const Raw<T, kVec>*>(in) + v), x.at);
  return x;
}

template <int kVec, typename F, typename T, typename... In>
__device__ void WriteVector(const F& f, T* out, int64_t v, const In&... in) {
  FloatVector<kVec> y;
#pragma unroll
  for (int i = 0; i < kVec; ++i) y.at[i] = f(in.at[i]...);
  reinterpret_cast<Raw<T, kVec>*>(out)[v] = Pack<T, kVec>(y.at);
}

constexpr int kElementwiseThreads = 256;

// A thread takes one vector of kVec elements; the first threads also take what is left over.
template <int kVec, typename F, typename T, typename... In>
__global__ void __launch_bounds__(kElementwiseThreads)
    ElementwiseKernel(F f, int64_t size, T* out, const In*... in) {
  const int64_t v = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x, vectors = size / kVec;
  if (v < vectors) WriteVector<kVec>(f, out, v, ReadVector<kVec>(in, v)...);
  const int64_t rest = vectors * kVec + v;
  if (rest < size && v < kVec) WriteVector<1>(f, out, rest, ReadVector<1>(in, rest)...);
}

template <typename F, typename T, typename... In>
Status Elementwise(Gpu gpu, const F& f, const TensorView& out, const T* first, const In*... more) {
  const int64_t size = out.size();
  if (size == 0) return Ok();
  constexpr int kVec = 16 / sizeof(T);
  T* y = out.as<T>();
  const auto launch = [&](auto vec) {
    constexpr int kWidth = decltype(vec)::value;
    const int64_t blocks = (size - 1) / (int64_t{kWidth} * kElementwiseThreads) + 1;
    if (blocks > INT32_MAX) return InvalidArgument("a tensor is too large for one launch");
    ElementwiseKernel<kWidth>
        <<<blocks, kElementwiseThreads, 0, gpu.stream>>>(f, size, y, first, more...);
    return CudaStatus();
  };
  bool aligned = true;
  for (const void* p : std::initializer_list<const void*>{y, first, more...}) {
    aligned &= reinterpret_cast<uintptr_t>(p) % 16 == 0;
  }
  if (aligned) return launch(std::integral_constant<int, kVec>{});
  return launch(std::integral_constant<int, 1>{});
}

}  // namespace tf_ops
