// SPDX-License-Identifier: Apache-2.0
// Kernels over elements: Elementwise(gpu, f, {out}, in...) is out[i] = f(in[i]...), where f takes
// and returns floats; with several outputs it returns FloatVector<outputs>. Inputs and outputs have
// one dtype and size. An output may be the same memory as an input.
#pragma once

#include <algorithm>

#include "cc/common/rows.cuh"

namespace tf_ops {

template <int kCount>
struct FloatVector {
  float at[kCount];
};

template <typename T, int kOutputs>
struct OutputPointers {
  T* at[kOutputs];
};

template <int kVec, typename T>
__device__ FloatVector<kVec> ReadVector(const T* in, int64_t v) {
  FloatVector<kVec> x;
  Unpack<T, kVec>(reinterpret_cast<const Raw<T, kVec>*>(in)[v], x.at);
  return x;
}

template <int kVec, int kOutputs, typename F, typename T, typename... In>
__device__ void WriteVectors(const F& f, const OutputPointers<T, kOutputs>& out, int64_t v,
                             const In&... in) {
  float y[kOutputs][kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const FloatVector<kOutputs> values = {f(in.at[i]...)};
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) y[k][i] = values.at[k];
  }
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    reinterpret_cast<Raw<T, kVec>*>(out.at[k])[v] = Pack<T, kVec>(y[k]);
  }
}

constexpr int kElementwiseThreads = 256;

// A thread takes one vector of kVec elements; the first threads also take what is left over.
template <int kVec, typename F, typename T, int kOutputs, typename... In>
__global__ void __launch_bounds__(kElementwiseThreads)
    ElementwiseKernel(F f, int64_t size, OutputPointers<T, kOutputs> out, const In*... in) {
  const int64_t v = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x, vectors = size / kVec;
  if (v < vectors) WriteVectors<kVec>(f, out, v, ReadVector<kVec>(in, v)...);
  const int64_t rest = vectors * kVec + v;
  if (rest < size && v < kVec) WriteVectors<1>(f, out, rest, ReadVector<1>(in, rest)...);
}

template <typename F, int kOutputs, typename T, typename... In>
Status Elementwise(Gpu gpu, const F& f, const TensorView (&outputs)[kOutputs], const T* first,
                   const In*... more) {
  const int64_t size = outputs[0].size();
  if (size == 0) return Ok();
  OutputPointers<T, kOutputs> out;
  bool aligned = true;
  const auto check = [&](const void* p) { aligned &= reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  for (int k = 0; k < kOutputs; ++k) check(out.at[k] = static_cast<T*>(outputs[k].data));
  check(first);
  (check(more), ...);

  const auto launch = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t blocks = (size - 1) / (int64_t{kVec} * kElementwiseThreads) + 1;
    if (blocks > INT32_MAX) return InvalidArgument("a tensor is too large for one launch");
    ElementwiseKernel<kVec>
        <<<blocks, kElementwiseThreads, 0, gpu.stream>>>(f, size, out, first, more...);
    return CudaStatus();
  };
  constexpr int kWidest = 16 / sizeof(T);
  if (aligned) return launch(std::integral_constant<int, kWidest>{});
  return launch(std::integral_constant<int, 1>{});
}

}  // namespace tf_ops
