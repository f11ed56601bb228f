// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_sm90_forward.cuh"

namespace tf_ops {

template Status AttentionForwardSm90<bf16, 256>(Gpu, const AttentionProblem&, bf16*, float*);

}  // namespace tf_ops
