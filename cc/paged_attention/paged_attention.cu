// SPDX-License-Identifier: Apache-2.0
// The kernels are those of cc/attention/attention_decode.cuh.
#include "cc/common/cuda.cuh"
#include "cc/paged_attention/paged_attention.h"

namespace tf_ops {

Status PagedAttention(Gpu gpu, TensorView query, TensorView key_pages, TensorView value_pages,
                      TensorView page_table, TensorView key_value_seq_lengths, TensorView sink,
                      float scale, float soft_cap, int64_t window_left, TensorView output,
                      Workspace* workspace) {
  AttentionProblem p;
  KeyPages pages;
  if (Status s =
          DescribePagedAttention(query, key_pages, value_pages, page_table, key_value_seq_lengths,
                                 sink, scale, soft_cap, window_left, output, &p, &pages);
      !s.ok()) {
    return s;
  }
  return DispatchType<float, half, bf16>("paged_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    return DecodeAttention<T>(gpu, p, pages, output.as<T>(), nullptr, workspace);
  });
}

}  // namespace tf_ops
