// SPDX-License-Identifier: Apache-2.0
// What the Python loader asks the library about itself.
#include "cc/common/cpu.h"

#ifndef TF_OPS_TENSORFLOW_VERSION
#define TF_OPS_TENSORFLOW_VERSION ""
#endif
#ifndef TF_OPS_CUDA_BUILD
#define TF_OPS_CUDA_BUILD "cuda= archs="
#endif

// The loader looks for this text in the file, before it loads it.
extern "C" const char* tf_ops_build_info() {
  return "tf_ops_build tensorflow=" TF_OPS_TENSORFLOW_VERSION " " TF_OPS_CUDA_BUILD;
}

extern "C" const char* tf_ops_isa() {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
  return kNames[tf_ops::WidestIsa() - 1];
}
