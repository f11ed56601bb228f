// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_sm90_backward.cuh"
#include "cc/attention/attention_sm90_forward.cuh"

namespace tf_ops {

template Status AttentionForwardSm90<half, 128>(Gpu, const AttentionProblem&, char*, half*, float*);
template Status AttentionBackwardSm90<half, 128>(Gpu, const AttentionProblem&,
                                                 const AttentionGradients&);

}  // namespace tf_ops
