// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_sm90_backward.cuh"
#include "cc/attention/attention_sm90_forward.cuh"

namespace tf_ops {

template Status AttentionForwardSm90<bf16, 128>(Gpu, const AttentionProblem&, char*, bf16*, float*);
template Status AttentionBackwardSm90<bf16, 128>(Gpu, const AttentionProblem&,
                                                 const AttentionGradients&);

}  // namespace tf_ops
