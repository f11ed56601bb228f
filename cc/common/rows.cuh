// SPDX-License-Identifier: Apache-2.0
// Elements of a row as the kernels move them: vectors of 16 bytes, or single elements.
#pragma once

#include "cc/common/cuda.cuh"

namespace tf_ops {

template <int kBytes>
struct RawBytes;
template <>
struct RawBytes<16> {
  using Type = uint4;
};
template <>
struct RawBytes<4> {
  using Type = uint32_t;
};
template <>
struct RawBytes<2> {
  using Type = uint16_t;
};
// kVec elements of T as they lie in memory: 16 bytes, or one element.
template <typename T, int kVec>
using Raw = typename RawBytes<kVec * sizeof(T)>::Type;

template <typename T, int kVec>
__device__ void Unpack(const Raw<T, kVec>& raw, float (&out)[kVec]) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVec; ++i) out[i] = float(elements[i]);
}

template <typename T, int kVec>
__device__ Raw<T, kVec> Pack(const float (&in)[kVec]) {
  Raw<T, kVec> raw;
  T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = T(in[i]);
  return raw;
}

}  // namespace tf_ops
