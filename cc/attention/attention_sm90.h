// SPDX-License-Identifier: Apache-2.0
// The Hopper kernels of attention, as the dispatch in attention.cu sees them.
#pragma once

#include "cc/attention/attention.h"

namespace tf_ops {

// Whether the kernels below can serve the problem on this device: sm_90, float16 or bfloat16,
// no bias, mask or soft cap, and rows that the tensor copy engine can address.
bool ServesSm90(const AttentionProblem& problem, DType dtype, const void* output);

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
