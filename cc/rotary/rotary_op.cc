// SPDX-License-Identifier: Apache-2.0
#include "cc/common/op.h"
#include "cc/rotary/rotary.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_ops {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfOps>RotaryEmbedding")
    .Input("x: T")
    .Input("key: T")
    .Input("positions: int32")
    .Input("cos: float")
    .Input("sin: float")
    .Attr("theta: float = 10000.0")
    .Attr("scaling_factor: float = 1.0")
    .Attr("rotary_dim: int = 0")
    .Attr("interleaved: bool = false")
    .Attr("inverse: bool = false")
    .Output("y: T")
    .Output("rotated_key: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &x));
      c->set_output(0, x);
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });
TF_OPS_BIND("TfOps>RotaryEmbedding", RotaryEmbedding, Forward("x", "y"),
            Forward("key", "rotated_key"));

}  // namespace tf_ops
