// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_decode.cuh"

namespace tf_ops {
template Status DecodeAttention<float>(Gpu, const AttentionProblem&, const KeyPages&, float*,
                                       float*, Workspace*);
}  // namespace tf_ops
