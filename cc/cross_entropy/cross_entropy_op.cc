// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/cross_entropy/cross_entropy.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfOps>SparseSoftmaxCrossEntropy")
    .Input("labels: Tlabels")
    .Input("logits: T")
    .Attr("has_ignore_class: bool = false")
    .Attr("ignore_class: int = 0")
    .Attr("label_smoothing: float = 0.0")
    .Attr("z_loss: float = 0.0")
    .Attr("soft_cap: float = 0.0")
    .Output("loss: float")
    .Output("max: float")
    .Output("log_sum: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("Tlabels: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle logits, tokens;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &logits));
      TF_RETURN_IF_ERROR(c->Subshape(logits, 0, -1, &tokens));
      TF_RETURN_IF_ERROR(c->Merge(tokens, c->input(0), &tokens));
      for (int i = 0; i < 3; ++i) c->set_output(i, tokens);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>SparseSoftmaxCrossEntropy", SparseSoftmaxCrossEntropy);

REGISTER_OP("TfOps>SparseSoftmaxCrossEntropyGrad")
    .Input("dloss: float")
    .Input("labels: Tlabels")
    .Input("logits: T")
    .Input("max: float")
    .Input("log_sum: float")
    .Attr("has_ignore_class: bool = false")
    .Attr("ignore_class: int = 0")
    .Attr("label_smoothing: float = 0.0")
    .Attr("z_loss: float = 0.0")
    .Attr("soft_cap: float = 0.0")
    .Output("dlogits: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("Tlabels: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle logits, tokens;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(2), 1, &logits));
      TF_RETURN_IF_ERROR(c->Subshape(logits, 0, -1, &tokens));
      for (int i : {0, 1, 3, 4}) TF_RETURN_IF_ERROR(c->Merge(tokens, c->input(i), &tokens));
      c->set_output(0, logits);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>SparseSoftmaxCrossEntropyGrad", SparseSoftmaxCrossEntropyGrad,
            Forward("logits", "dlogits"));

}  // namespace tf_ops
