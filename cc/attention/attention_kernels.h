// SPDX-License-Identifier: Apache-2.0
// Which GPU kernels serve a call. `python -m tf_ops info attention` asks as well, without a GPU.
#pragma once

#include "cc/attention/attention.h"

namespace tf_ops {

enum class AttentionPass { kForward, kGrad, kBiasGrad };

enum class AttentionKernels {
  kDecode,  // attention_decode.cuh
  kSm90,    // attention_sm90_forward.cuh, attention_sm90_backward.cuh
  kSm80,    // attention_sm80.cuh, attention_sm80_grad.cuh
  kSimt,    // attention_simt.cuh
};

struct AttentionChoice {
  AttentionKernels kernels;
  const char* why_not_sm90;  // null for kDecode and kSm90
};

// `compute_capability` is 90 for 9.0; `aligned` says whether all 16-bit tensors of the call start
// at addresses of whole 16 bytes. Whether a build has the kernels is not asked.
AttentionChoice ChooseAttention(const AttentionProblem& problem, DType dtype, AttentionPass pass,
                                int compute_capability, bool aligned);

}  // namespace tf_ops
