// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/glu/glu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// The shape of y, from the inputs at `gate` and after it.
absl::Status ResultShape(InferenceContext* c, int gate, ShapeHandle* y) {
  bool packed;
  TF_RETURN_IF_ERROR(c->GetAttr("packed", &packed));
  if (!packed) return c->Merge(c->input(gate), c->input(gate + 1), y);
  ShapeHandle both;
  DimensionHandle half;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(gate), 1, &both));
  TF_RETURN_IF_ERROR(c->Divide(c->Dim(both, -1), 2, /*evenly_divisible=*/true, &half));
  return c->ReplaceDim(both, -1, half, y);
}

}  // namespace

REGISTER_OP("TfOps>GatedLinearUnit")
    .Input("gate: T")
    .Input("up: T")
    .Attr("activation: string = 'silu'")
    .Attr("packed: bool = false")
    .Output("y: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle y;
      TF_RETURN_IF_ERROR(ResultShape(c, 0, &y));
      c->set_output(0, y);
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>GatedLinearUnit", GatedLinearUnit, Forward("gate", "y"), Forward("up", "y"));

REGISTER_OP("TfOps>GatedLinearUnitGrad")
    .Input("dy: T")
    .Input("gate: T")
    .Input("up: T")
    .Attr("activation: string = 'silu'")
    .Attr("packed: bool = false")
    .Output("dgate: T")
    .Output("dup: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle y;
      TF_RETURN_IF_ERROR(ResultShape(c, 1, &y));
      TF_RETURN_IF_ERROR(c->Merge(y, c->input(0), &y));
      c->set_output(0, c->input(1));
      c->set_output(1, c->input(2));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>GatedLinearUnitGrad", GatedLinearUnitGrad, Forward("gate", "dgate"),
            Forward("up", "dup"));

}  // namespace tf_ops
