// SPDX-License-Identifier: Apache-2.0
// Element by element:
//
//   y  = scale x x
//   dx = dy 2 scale x
//
// x, y, dy, dx: one shape, one dtype of float32, float16 or bfloat16. Arithmetic is in float32.
// y may alias x; dx may alias dy or x.
#pragma once

#include "cc/common/tensor_view.h"

namespace tf_ops {

Status ScaledSquare(Cpu cpu, TensorView x, float scale, TensorView y);
Status ScaledSquare(Gpu gpu, TensorView x, float scale, TensorView y);

Status ScaledSquareGrad(Cpu cpu, TensorView dy, TensorView x, float scale, TensorView dx);
Status ScaledSquareGrad(Gpu gpu, TensorView dy, TensorView x, float scale, TensorView dx);

// The check of all of them.
inline Status CheckScaledSquare(const TensorView& x, const TensorView& other) {
  if (other.SameShapeAndDType(x)) return Ok();
  return InvalidArgument("scaled_square: tensors must have the shape and dtype of x");
}

}  // namespace tf_ops
