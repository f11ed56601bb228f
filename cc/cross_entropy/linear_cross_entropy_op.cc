// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/cross_entropy/linear_cross_entropy.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfOps>LinearCrossEntropy")
    .Input("labels: Tlabels")
    .Input("logits: T")
    .Input("span: int64")
    .Input("sums: float")
    .Attr("has_ignore_class: bool = false")
    .Attr("ignore_class: int = 0")
    .Attr("label_smoothing: float = 0.0")
    .Attr("soft_cap: float = 0.0")
    .Output("new_sums: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("Tlabels: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle logits, tokens;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &logits));
      TF_RETURN_IF_ERROR(c->Subshape(logits, 0, -1, &tokens));
      TF_RETURN_IF_ERROR(c->Merge(tokens, c->input(0), &tokens));
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>LinearCrossEntropy", LinearCrossEntropy, Forward("sums", "new_sums"));

REGISTER_OP("TfOps>LinearCrossEntropyGrad")
    .Input("dloss: float")
    .Input("labels: Tlabels")
    .Input("logits: T")
    .Input("span: int64")
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
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &logits));
      TF_RETURN_IF_ERROR(c->Subshape(logits, 0, -1, &tokens));
      for (int i : {0, 1, 4, 5}) TF_RETURN_IF_ERROR(c->Merge(tokens, c->input(i), &tokens));
      c->set_output(0, logits);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>LinearCrossEntropyGrad", LinearCrossEntropyGrad, Forward("logits", "dlogits"));

REGISTER_OP("TfOps>LinearCrossEntropyHiddenGrad")
    .Input("sum: Tsum")
    .Input("rest: uint8")
    .Input("addend: T")
    .Output("new_sum: Tsum")
    .Output("new_rest: uint8")
    .Attr("Tsum: {float, bfloat16}")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle sum;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(2), &sum));
      c->set_output(0, sum);
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>LinearCrossEntropyHiddenGrad", LinearCrossEntropyHiddenGrad,
            Forward("sum", "new_sum"), Forward("rest", "new_rest"));

REGISTER_OP("TfOps>LinearCrossEntropyKernelGrad")
    .Input("whole: Twhole")
    .Input("block: T")
    .Input("span: int64")
    .Attr("transpose_kernel: bool = false")
    .Output("new_whole: Twhole")
    .Attr("Twhole: {float, half, bfloat16}")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle whole;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &whole));
      c->set_output(0, whole);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>LinearCrossEntropyKernelGrad", LinearCrossEntropyKernelGrad,
            Forward("whole", "new_whole"));

}  // namespace tf_ops
