// SPDX-License-Identifier: Apache-2.0
// Tensor-core building blocks of sm_80 and later: 16-bit tiles in shared memory and warp-wide
// products of 16x16 by 16x8.
//
// A tile is row-major, kDim elements a row, kDim a multiple of 64; the 16-byte chunks of a row
// are permuted by the row (Swizzled), so that eight rows of one chunk lie in different banks.
// In a fragment, lane = 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of each 8.
#pragma once

#include "cc/common/cuda.cuh"

namespace tf_ops {

// kBytes (8 or 16) from global to shared memory, asynchronously; zeros unless `valid`.
template <int kBytes>
__device__ void CopyAsync(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

// Waits for this thread's copies; others see them after a barrier.
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8x8 matrices, whose rows of 16 bytes the lanes 0-7, 8-15, 16-23 and 24-31 point at.
__device__ inline void LoadMatrices(uint32_t (&d)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row));
}
__device__ inline void LoadMatricesTransposed(uint32_t (&d)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row));
}

// c += a b.
template <typename T>
__device__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
        "%7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tf_ops
