// SPDX-License-Identifier: Apache-2.0
// What the forward and the gradient kernels share.
#pragma once

#include "cc/common/rows.cuh"
#include "cc/normalization/normalization.h"

namespace tf_ops {

// Vector number `at` of weights, which are of type T or float. They stay in L1: every row of a
// group takes the same ones.
template <typename T, int kVec>
__device__ void LoadWeights(const void* weights, bool is_float, int64_t at, float (&out)[kVec]) {
  if (!is_float) {
    Unpack<T, kVec>(__ldg(static_cast<const Raw<T, kVec>*>(weights) + at), out);
  } else if constexpr (kVec % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 v = __ldg(static_cast<const float4*>(weights) + at * (kVec / 4) + i / 4);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  } else {
    out[0] = __ldg(static_cast<const float*>(weights) + at);
  }
}

// Keeps the compiler from unpacking once what a loop unpacks each time.
__device__ inline void KeepRaw(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
__device__ inline void KeepRaw(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ inline void KeepRaw(uint16_t& v) { asm volatile("" : "+h"(v)); }

// The row of the weights that a row takes. Divisions of 64 bits are slow.
__device__ inline int64_t GroupOf(const NormalizationProblem& p, int64_t row) {
  if (p.groups == 1) return 0;
  if (p.rows <= INT32_MAX) return static_cast<uint32_t>(row) % static_cast<uint32_t>(p.groups);
  return row % p.groups;
}

// Calls f(T{}, std::bool_constant<subtract_mean>{}, std::integral_constant<int, kVec>{}): vectors
// of 16 bytes where all of `pointers` and the rows allow it, else single elements.
template <typename F>
Status DispatchVectors(const NormalizationProblem& p, std::initializer_list<const void*> pointers,
                       F&& f) {
  return DispatchType<float, half, bf16>("normalization", p.dtype, [&](auto t) {
    constexpr int kVec = 16 / sizeof(t);
    bool aligned = p.cols % kVec == 0;
    for (const void* pointer : pointers) aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    const auto with_mean = [&](auto mean) {
      return aligned ? f(t, mean, std::integral_constant<int, kVec>{})
                     : f(t, mean, std::integral_constant<int, 1>{});
    };
    return p.subtract_mean ? with_mean(std::true_type{}) : with_mean(std::false_type{});
  });
}

}  // namespace tf_ops
