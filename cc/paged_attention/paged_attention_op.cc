// SPDX-License-Identifier: Apache-2.0
#include "absl/status/status.h"
#include "cc/common/op.h"
#include "cc/paged_attention/paged_attention.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfOps>PagedAttention")
    .Input("query: T")
    .Input("key_pages: T")
    .Input("value_pages: T")
    .Input("page_table: int32")
    .Input("key_value_seq_lengths: int32")
    .Input("sink: float")
    .Attr("scale: float")
    .Attr("soft_cap: float = 0.0")
    .Attr("window_left: int = -1")
    .Output("output: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle query, keys, values, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &query));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 4, &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 4, &values));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5), 1, &unused));
      c->set_output(0, c->MakeShape({c->Dim(query, 0), c->Dim(query, 1), c->Dim(query, 2),
                                     c->Dim(values, 3)}));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>PagedAttention", PagedAttention, Needs(PagedAttentionWorkspace));

}  // namespace tf_ops
