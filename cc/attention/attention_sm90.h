// SPDX-License-Identifier: Apache-2.0
// The Hopper kernels of attention, as the dispatch in attention.cu sees them.
#pragma once

#include <initializer_list>

#include "cc/attention/attention.h"

namespace tf_ops {

// Whether these kernels were compiled and serve the problem on the current device; what they do
// not serve, those of attention_sm80.cuh do. `data` are all 16-bit tensors of the call.
bool ServesSm90(const AttentionProblem& problem, DType dtype, int largest_head_dim,
                std::initializer_list<const void*> data);

template <typename T, int kHeadDim>
Status AttentionForwardSm90(Gpu gpu, const AttentionProblem& problem, T* output, float* lse);

// row_terms has room for 2 * batch * heads * Sm90PaddedQueries floats.
template <typename T, int kHeadDim>
Status AttentionBackwardSm90(Gpu gpu, const AttentionProblem& problem, const T* output,
                             const T* doutput, const float* lse, const float* dlse, T* dquery,
                             T* dkey, T* dvalue, float* row_terms);
inline int64_t Sm90PaddedQueries(const AttentionProblem& problem) {
  return (problem.seq_q + 127) / 128 * 128;
}

}  // namespace tf_ops
