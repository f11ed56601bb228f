// SPDX-License-Identifier: Apache-2.0
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/attention/attention.h"
#include "cc/common/op.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

absl::Status WithRank4(InferenceContext* c, int input, const char* name, ShapeHandle* shape) {
  if (c->WithRank(c->input(input), 4, shape).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dot_product_attention: ", name, " is ",
                                                 c->DebugString(c->input(input)),
                                                 "; it must have rank 4"));
}

}  // namespace

REGISTER_OP("TfOps>DotProductAttention")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("bias: T")
    .Input("mask: bool")
    .Input("query_seq_lengths: int32")
    .Input("key_value_seq_lengths: int32")
    .Input("sink: float")
    .Input("seed: int64")
    .Attr("scale: float")
    .Attr("soft_cap: float = 0.0")
    .Attr("is_causal: bool = false")
    .Attr("bottom_right: bool = false")
    .Attr("window_left: int = -1")
    .Attr("window_right: int = -1")
    .Attr("dropout_rate: float = 0.0")
    .Output("output: T")
    .Output("lse: float")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle query, key, value;
      TF_RETURN_IF_ERROR(WithRank4(c, 0, "query", &query));
      TF_RETURN_IF_ERROR(WithRank4(c, 1, "key", &key));
      TF_RETURN_IF_ERROR(WithRank4(c, 2, "value", &value));
      // Whether the dimensions agree the launcher says better: it names them.
      c->set_output(0, c->MakeShape({c->Dim(query, 0), c->Dim(query, 1), c->Dim(query, 2),
                                     c->Dim(value, 3)}));
      c->set_output(1, c->MakeShape({c->Dim(query, 0), c->Dim(query, 2), c->Dim(query, 1)}));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>DotProductAttention", DotProductAttention,
            Needs(DotProductAttentionCpuWorkspace, DotProductAttentionGpuWorkspace));

REGISTER_OP("TfOps>DotProductAttentionGrad")
    .Input("doutput: T")
    .Input("dlse: float")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("bias: T")
    .Input("mask: bool")
    .Input("query_seq_lengths: int32")
    .Input("key_value_seq_lengths: int32")
    .Input("sink: float")
    .Input("seed: int64")
    .Input("output: T")
    .Input("lse: float")
    .Attr("scale: float")
    .Attr("soft_cap: float = 0.0")
    .Attr("is_causal: bool = false")
    .Attr("bottom_right: bool = false")
    .Attr("window_left: int = -1")
    .Attr("window_right: int = -1")
    .Attr("dropout_rate: float = 0.0")
    .Output("dquery: T")
    .Output("dkey: T")
    .Output("dvalue: T")
    .Output("dsink: float")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 + i), 4, &shape));
        c->set_output(i, shape);
      }
      c->set_output(3, c->input(9));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>DotProductAttentionGrad", DotProductAttentionGrad,
            Needs(DotProductAttentionGradCpuWorkspace, DotProductAttentionGradGpuWorkspace));

REGISTER_OP("TfOps>DotProductAttentionBiasGrad")
    .Input("doutput: T")
    .Input("dlse: float")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("bias: T")
    .Input("mask: bool")
    .Input("query_seq_lengths: int32")
    .Input("key_value_seq_lengths: int32")
    .Input("sink: float")
    .Input("seed: int64")
    .Input("output: T")
    .Input("lse: float")
    .Attr("scale: float")
    .Attr("soft_cap: float = 0.0")
    .Attr("is_causal: bool = false")
    .Attr("bottom_right: bool = false")
    .Attr("window_left: int = -1")
    .Attr("window_right: int = -1")
    .Attr("dropout_rate: float = 0.0")
    .Output("dbias: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle bias;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5), 4, &bias));
      c->set_output(0, bias);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>DotProductAttentionBiasGrad", DotProductAttentionBiasGrad,
            Needs(DotProductAttentionBiasGradCpuWorkspace,
                  DotProductAttentionBiasGradGpuWorkspace));

}  // namespace tf_ops
