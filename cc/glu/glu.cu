// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include "cc/common/rows.cuh"
#include "cc/glu/glu.h"

namespace tf_ops {
namespace {

constexpr int kThreads = 256;

// To what its caller's dtype can show; the intrinsics scale denormal numbers, for which there is
// no use here.
template <typename T>
__device__ float Exp(float x) {
  if constexpr (std::is_same_v<T, float>) return expf(x);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x * 1.44269504f));
  return x;
}
__device__ float Reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

// f(x) and f'(x); the compiler drops what is not used. The formulas are those of glu_simd.h.
template <typename T, Activation kActivation>
__device__ float2 Activate(float x) {
  if constexpr (kActivation == Activation::kRelu) {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (kActivation == Activation::kGelu) {
    const float density = Exp<T>(x * x * -0.5f);
    const float t = Reciprocal(1.0f + 0.35f * fabsf(x));
    float p = t * -0.0291259638f + 0.143872698f;
    p = p * t - 0.255505481f;
    p = p * t + 0.158930286f;
    p = p * t - 0.022937782f;
    p = p * t + 0.105433189f;
    p = p * t + 0.119852379f;
    p = p * t + 0.139859089f;
    p = p * t + 0.139621569f;
    const float tail = p * t * density;
    const float phi = x < 0.0f ? tail : 1.0f - tail;
    return {x * phi, phi + x * (density * 0.398942280f)};
  } else {
    constexpr bool kTanh = kActivation == Activation::kGeluTanh;
    const float x2 = x * x;
    const float u = kTanh ? 1.59576912f * x * (1.0f + 0.044715f * x2) : x;
    // With a finite e, e s is 0 and not NaN where s is 0. fminf would pass over a NaN.
    const float e = Exp<T>(u < -88.0f ? 88.0f : -u);
    const float s = u < -88.0f ? 0.0f : Reciprocal(1.0f + e);
    const float slope = s * (e * s);
    if constexpr (kActivation == Activation::kSigmoid) return {s, slope};
    const float du = kTanh ? 1.59576912f * (1.0f + 0.134145f * fminf(x2, 1e4f)) : 1.0f;
    return {x * s, s + x * slope * du};
  }
}

// Vector number v of y and dy, which is number `at` of gate, up and their gradients. All loads
// come before all stores, which may go to the same memory.
template <typename T, int kVec, Activation kActivation, bool kGrad>
__device__ void Process(const GatedLinearUnitProblem& p, int64_t v, int64_t at) {
  using Vector = Raw<T, kVec>;
  const Vector raw_gate = __ldcg(static_cast<const Vector*>(p.gate) + at);
  const Vector raw_up = __ldcg(static_cast<const Vector*>(p.up) + at);
  float gate[kVec], up[kVec];
  if constexpr (kGrad) {
    const Vector raw_dy = __ldcg(static_cast<const Vector*>(p.dy) + v);
    float dy[kVec];
    Unpack<T, kVec>(raw_gate, gate);
    Unpack<T, kVec>(raw_up, up);
    Unpack<T, kVec>(raw_dy, dy);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float2 f = Activate<T, kActivation>(gate[i]);
      gate[i] = dy[i] * up[i] * f.y;
      up[i] = dy[i] * f.x;
    }
    static_cast<Vector*>(p.dgate)[at] = Pack<T, kVec>(gate);
    static_cast<Vector*>(p.dup)[at] = Pack<T, kVec>(up);
  } else {
    Unpack<T, kVec>(raw_gate, gate);
    Unpack<T, kVec>(raw_up, up);
#pragma unroll
    for (int i = 0; i < kVec; ++i) up[i] *= Activate<T, kActivation>(gate[i]).x;
    static_cast<Vector*>(p.y)[v] = Pack<T, kVec>(up);
  }
}

// A vector to a thread: with few registers, the many threads keep enough loads in flight.
template <typename T, int kVec, Activation kActivation, bool kGrad>
__global__ void __launch_bounds__(kThreads) GatedLinearUnitKernel(GatedLinearUnitProblem p) {
  // Packed rows are whole vectors; what is not packed is one row, which may have a rest.
  const int64_t vectors_per_row = p.cols / kVec, gap = (p.stride - p.cols) / kVec;
  const int64_t vectors = p.rows * vectors_per_row;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (v < vectors) {
    // Divisions of 64 bits are slow.
    const int64_t row = gap == 0                ? 0
                        : vectors <= UINT32_MAX ? uint32_t(v) / uint32_t(vectors_per_row)
                                                : v / vectors_per_row;
    Process<T, kVec, kActivation, kGrad>(p, v, v + row * gap);
  }
  if constexpr (kVec > 1) {
    const int64_t rest = vectors * kVec + threadIdx.x;
    if (blockIdx.x == 0 && rest < p.rows * p.cols) {
      Process<T, 1, kActivation, kGrad>(p, rest, rest);
    }
  }
}

}  // namespace

Status RunGatedLinearUnit(Gpu gpu, const GatedLinearUnitProblem& p) {
  return DispatchType<float, half, bf16>("gated_linear_unit", p.dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int kVec = 16 / sizeof(T);
    bool aligned = p.stride == p.cols || p.cols % kVec == 0;
    for (const void* pointer :
         std::initializer_list<const void*>{p.gate, p.up, p.dy, p.y, p.dgate, p.dup}) {
      aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    }
    const auto launch = [&](auto activation, auto vec, auto grad) {
      constexpr int kWidth = decltype(vec)::value;
      const int64_t blocks = (p.rows * p.cols - 1) / (kThreads * kWidth) + 1;
      GatedLinearUnitKernel<T, kWidth, decltype(activation)::value, decltype(grad)::value>
          <<<blocks, kThreads, 0, gpu.stream>>>(p);
    };
    DispatchActivation(p.activation, [&](auto activation) {
      const auto with_vectors = [&](auto vec) {
        p.dy ? launch(activation, vec, std::true_type{})
             : launch(activation, vec, std::false_type{});
      };
      aligned ? with_vectors(std::integral_constant<int, kVec>{})
              : with_vectors(std::integral_constant<int, 1>{});
    });
    return CudaStatus();
  });
}

}  // namespace tf_ops
