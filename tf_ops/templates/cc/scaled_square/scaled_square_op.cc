// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/scaled_square/scaled_square.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("MyOps>ScaledSquare")
    .Input("x: T")
    .Attr("scale: float = 1.0")
    .Output("y: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });
TF_OPS_BIND("MyOps>ScaledSquare", ScaledSquare, Forward("x", "y"));

REGISTER_OP("MyOps>ScaledSquareGrad")
    .Input("dy: T")
    .Input("x: T")
    .Attr("scale: float = 1.0")
    .Output("dx: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle dx;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &dx));
      c->set_output(0, dx);
      return absl::OkStatus();
    });
TF_OPS_BIND("MyOps>ScaledSquareGrad", ScaledSquareGrad, Forward("dy", "dx"));

}  // namespace tf_ops
