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

// 16 bytes are taken as words: element by element, the compiler makes eight loads of one from
// shared memory.
template <typename T, int kVec>
__device__ void Unpack(const Raw<T, kVec>& raw, float (&out)[kVec]) {
  if constexpr (sizeof(raw) == 16) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, bf16>) {
        out[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
      } else {
        out[i] = __half2float(__ushort_as_half(words[i / 2] >> 16 * (i % 2)));
      }
    }
  } else {
    out[0] = float(*reinterpret_cast<const T*>(&raw));
  }
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
