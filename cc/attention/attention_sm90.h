// SPDX-License-Identifier: Apache-2.0
// The Hopper kernels of attention, as the dispatch in attention.cu sees them.
#pragma once

#include "cc/attention/attention.h"

namespace tf_ops {

// Whether the kernels below can serve the problem on this device: sm_90, float16 or bfloat16,
// no bias, mask or soft cap, and rows that the tensor copy engine can address.
bool ServesSm90(const AttentionProblem& problem, DType dtype, const void* output);

// The forward pass. A row's flag, one for 16 rows, [batch * heads, ceil(seq_q / 16)], is set
// where a result is not finite: NaN or Inf that is invisible to a row may then have reached it,
// and the caller computes those rows by other kernels.
template <typename T, int kHeadDim>
Status AttentionForwardSm90(Gpu gpu, const AttentionProblem& problem, T* output, float* lse,
                            uint8_t* flags);

// The gradients. row_terms has room for 2 * batch * heads * Sm90PaddedQueries floats; the flags
// are of rows of dquery, and of dkey and dvalue, [batch * kv_heads, ceil(seq_k / 16)].
template <typename T, int kHeadDim>
Status AttentionBackwardSm90(Gpu gpu, const AttentionProblem& problem, const T* output,
                             const T* doutput, const float* lse, const float* dlse, T* dquery,
                             T* dkey, T* dvalue, float* row_terms, uint8_t* query_flags,
                             uint8_t* key_flags);
inline int64_t Sm90PaddedQueries(const AttentionProblem& problem) {
  return (problem.seq_q + 127) / 128 * 128;
}

}  // namespace tf_ops
