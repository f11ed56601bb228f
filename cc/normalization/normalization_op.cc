// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/normalization/normalization.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Outputs y, s and `stats` tensors of one number per row; `weights` inputs follow x and residual.
absl::Status NormalizationShapes(InferenceContext* c, int weights, int stats) {
  int axes;
  TF_RETURN_IF_ERROR(c->GetAttr("axes", &axes));
  if (axes < 1) return absl::InvalidArgumentError("axes must be at least 1");
  ShapeHandle x, row;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), axes, &x));
  for (int w = 0; w < weights; ++w) {
    const ShapeHandle weight = c->input(2 + w);
    const int rank = c->RankKnown(weight) && c->RankKnown(x) ? c->Rank(weight) : 0;
    if (rank == 0 || (rank == 1 && c->Value(c->Dim(weight, 0)) == 0)) continue;
    for (int i = 1; i <= std::min(rank, c->Rank(x)); ++i) {
      DimensionHandle unused;
      // A weight that is left out is of shape [0], and may be known as [?] only.
      if (!c->ValueKnown(c->Dim(weight, -i))) continue;
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(x, -i), c->Dim(weight, -i), &unused));
    }
  }
  TF_RETURN_IF_ERROR(c->Subshape(x, 0, -axes, &row));
  c->set_output(0, x);
  c->set_output(1, c->input(1));
  for (int i = 0; i < stats; ++i) c->set_output(2 + i, row);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfOps>RmsNormalization")
    .Input("x: T")
    .Input("residual: T")
    .Input("scale: TWeight")
    .Attr("epsilon: float")
    .Attr("scale_offset: float = 0.0")
    .Attr("axes: int = 1")
    .Attr("return_residual: bool = false")
    .Output("y: T")
    .Output("s: T")
    .Output("rstd: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("TWeight: {float, half, bfloat16} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) { return NormalizationShapes(c, 1, 1); });
TF_OPS_BIND("TfOps>RmsNormalization", RmsNormalization, Forward("x", "y"),
            Forward("residual", "s"));

REGISTER_OP("TfOps>RmsNormalizationGrad")
    .Input("dy: T")
    .Input("ds: T")
    .Input("drstd: float")
    .Input("x: T")
    .Input("scale: TWeight")
    .Input("rstd: float")
    .Attr("epsilon: float")
    .Attr("scale_offset: float = 0.0")
    .Attr("axes: int = 1")
    .Output("dx: T")
    .Output("dscale: TWeight")
    .Attr("T: {float, half, bfloat16}")
    .Attr("TWeight: {float, half, bfloat16} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(3), &x));
      c->set_output(0, x);
      c->set_output(1, c->input(4));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>RmsNormalizationGrad", RmsNormalizationGrad, Forward("dy", "dx"),
            Needs(RmsNormalizationGradCpuWorkspace, RmsNormalizationGradGpuWorkspace));

REGISTER_OP("TfOps>LayerNormalization")
    .Input("x: T")
    .Input("residual: T")
    .Input("gamma: TWeight")
    .Input("beta: TWeight")
    .Attr("epsilon: float")
    .Attr("axes: int = 1")
    .Attr("return_residual: bool = false")
    .Output("y: T")
    .Output("s: T")
    .Output("mean: float")
    .Output("rstd: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("TWeight: {float, half, bfloat16} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) { return NormalizationShapes(c, 2, 2); });
TF_OPS_BIND("TfOps>LayerNormalization", LayerNormalization, Forward("x", "y"),
            Forward("residual", "s"));

REGISTER_OP("TfOps>LayerNormalizationGrad")
    .Input("dy: T")
    .Input("ds: T")
    .Input("dmean: float")
    .Input("drstd: float")
    .Input("x: T")
    .Input("gamma: TWeight")
    .Input("beta: TWeight")
    .Input("mean: float")
    .Input("rstd: float")
    .Attr("epsilon: float")
    .Attr("axes: int = 1")
    .Output("dx: T")
    .Output("dgamma: TWeight")
    .Output("dbeta: TWeight")
    .Attr("T: {float, half, bfloat16}")
    .Attr("TWeight: {float, half, bfloat16} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(4), &x));
      c->set_output(0, x);
      c->set_output(1, c->input(5));
      c->set_output(2, c->input(6));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>LayerNormalizationGrad", LayerNormalizationGrad, Forward("dy", "dx"),
            Needs(LayerNormalizationGradCpuWorkspace, LayerNormalizationGradGpuWorkspace));

}  // namespace tf_ops
