// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_sm90_backward.cuh"
#include "cc/attention/attention_sm90_forward.cuh"

namespace tf_ops {

template Status AttentionForwardSm90<half, 64>(Gpu, const AttentionProblem&, half*, float*);
template Status AttentionBackwardSm90<half, 64>(Gpu, const AttentionProblem&, const half*,
                                                const half*, const float*, const float*, half*,
                                                half*, half*, float*);

}  // namespace tf_ops
