// SPDX-License-Identifier: Apache-2.0
// The Hopper kernels of attention, as the dispatch in attention.cu sees them.
#pragma once

#include "cc/attention/attention_gpu.h"

namespace tf_ops {

// With a mask, key_masks has Sm90KeyMaskBytes.
template <typename T, int kHeadDim>
Status AttentionForwardSm90(Gpu gpu, const AttentionProblem& problem, char* key_masks, T* output,
                            float* lse);

// g.rows has room for 2 * batch * heads * Sm90PaddedQueries floats. Leaves the sink's terms, and
// not yet their sum.
template <typename T, int kHeadDim>
Status AttentionBackwardSm90(Gpu gpu, const AttentionProblem& problem, const AttentionGradients& g);
inline int64_t Sm90PaddedQueries(const AttentionProblem& problem) {
  return (problem.seq_q + 127) / 128 * 128;
}

}  // namespace tf_ops
