// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_decode.cuh"

namespace tf_ops {
template Status DecodeAttention<bf16>(Gpu, const AttentionProblem&, const KeyPages&, bf16*, float*,
                                      Workspace*);
}  // namespace tf_ops
