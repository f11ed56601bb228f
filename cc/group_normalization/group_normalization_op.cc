// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/group_normalization/group_normalization.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfOps>GroupNormalization")
    .Input("x: T")
    .Input("gamma: W")
    .Input("beta: W")
    .Attr("groups: int")
    .Attr("epsilon: float = 1e-3")
    .Output("y: T")
    .Output("mean: float")
    .Output("rstd: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("W: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &x));
      int groups;
      TF_RETURN_IF_ERROR(c->GetAttr("groups", &groups));
      if (groups < 1) return absl::InvalidArgumentError("groups must be at least 1");
      c->set_output(0, x);
      for (int i : {1, 2}) c->set_output(i, c->Matrix(c->Dim(x, 0), groups));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>GroupNormalization", GroupNormalization, Forward("x", "y"));

REGISTER_OP("TfOps>GroupNormalizationGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("gamma: W")
    .Input("beta: W")
    .Input("mean: float")
    .Input("rstd: float")
    .Attr("groups: int")
    .Attr("epsilon: float = 1e-3")
    .Output("dx: T")
    .Output("dgamma: W")
    .Output("dbeta: W")
    .Attr("T: {float, half, bfloat16}")
    .Attr("W: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &x));
      c->set_output(0, x);
      c->set_output(1, c->input(2));
      c->set_output(2, c->input(3));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>GroupNormalizationGrad", GroupNormalizationGrad, Forward("dy", "dx"),
            Needs(GroupNormalizationGradWorkspace));

}  // namespace tf_ops
