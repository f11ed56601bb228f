// SPDX-License-Identifier: Apache-2.0
// TF_OPS_NVTX=1: a range around each launch, named by the op and the shapes of its inputs, which
// Nsight Systems shows above the kernels. A build without CUDA, or with one that lacks NVTX,
// makes none.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "cc/common/tensor_view.h"

namespace tf_ops {

void BeginRange(const std::string& name);
void EndRange();

class ProfilerRange {
 public:
  ProfilerRange(const std::string& op, const std::vector<TensorView>& tensors, int inputs) {
#if TF_OPS_CUDA
    if (Enabled()) BeginRange(Name(op, tensors, inputs));
#endif
  }
  ~ProfilerRange() {
#if TF_OPS_CUDA
    if (Enabled()) EndRange();
#endif
  }
  ProfilerRange(const ProfilerRange&) = delete;

 private:
  static bool Enabled() {
    static const bool enabled = [] {
      const char* value = std::getenv("TF_OPS_NVTX");
      return value && value[0] == '1';
    }();
    return enabled;
  }

  // "TfOps>Softmax bfloat16[16,4096]"; an input that is left out is not named.
  static std::string Name(std::string name, const std::vector<TensorView>& tensors, int inputs) {
    constexpr const char* kDTypeName[] = {"?",     "float32", "float16", "bfloat16",
                                          "int32", "int64",   "bool",    "uint8"};
    for (int i = 0; i < inputs; ++i) {
      const TensorView& view = tensors[i];
      if (!view.present()) continue;
      name += std::string(" ") + kDTypeName[static_cast<int>(view.dtype)] + "[";
      for (int j = 0; j < view.rank; ++j) name += (j ? "," : "") + std::to_string(view.dims[j]);
      name += "]";
    }
    return name;
  }
};

}  // namespace tf_ops
