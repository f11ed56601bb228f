// SPDX-License-Identifier: Apache-2.0
// Includes TF_OPS_SIMD_FILE once per instruction set, each time in a namespace of its own:
//
//   #define TF_OPS_SIMD_FILE "cc/softmax/softmax_simd.h"
//   #include "cc/common/foreach_isa.h"
//   ...
//   TF_OPS_SIMD(SoftmaxRows<T>)(x, scale, rows, cols, y);   // the best one of this machine
//
// Nothing of the standard library may be first instantiated inside: the linker merges such
// functions with those of other files, whatever they were compiled for. Include its headers
// before this one, and keep std::vector, std::function and the like out of SIMD files.
#include "cc/common/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace tf_ops::avx512 {
#define TF_OPS_ISA 3
#include "cc/common/simd.h"
#include TF_OPS_SIMD_FILE
#undef TF_OPS_ISA
}  // namespace tf_ops::avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
namespace tf_ops::avx2 {
#define TF_OPS_ISA 2
#include "cc/common/simd.h"
#include TF_OPS_SIMD_FILE
#undef TF_OPS_ISA
}  // namespace tf_ops::avx2
#pragma GCC pop_options
#endif

namespace tf_ops::baseline {
#define TF_OPS_ISA 1
#include "cc/common/simd.h"
#include TF_OPS_SIMD_FILE
#undef TF_OPS_ISA
}  // namespace tf_ops::baseline

#if defined(__x86_64__)
#define TF_OPS_SIMD(...)                                                                   \
  ::tf_ops::ForThisMachine(&::tf_ops::baseline::__VA_ARGS__, &::tf_ops::avx2::__VA_ARGS__, \
                           &::tf_ops::avx512::__VA_ARGS__)
#else
#define TF_OPS_SIMD(...) (&::tf_ops::baseline::__VA_ARGS__)
#endif
