// SPDX-License-Identifier: Apache-2.0
#include "cc/common/elementwise.cuh"
#include "cc/scaled_square/scaled_square.h"

namespace tf_ops {
namespace {

struct Value {
  float scale;
  __device__ float operator()(float x) const { return scale * x * x; }
};

struct Gradient {
  float scale;
  __device__ float operator()(float dy, float x) const { return dy * (2.0f * scale * x); }
};

}  // namespace

Status ScaledSquare(Gpu gpu, TensorView x, float scale, TensorView y) {
  if (Status s = CheckScaledSquare(x, y); !s.ok()) return s;
  return DispatchType<float, half, bf16>("scaled_square", x.dtype, [&](auto t) {
    using T = decltype(t);
    return Elementwise(gpu, Value{scale}, {y}, x.as<T>());
  });
}

Status ScaledSquareGrad(Gpu gpu, TensorView dy, TensorView x, float scale, TensorView dx) {
  if (Status s = CheckScaledSquare(x, dy); !s.ok()) return s;
  if (Status s = CheckScaledSquare(x, dx); !s.ok()) return s;
  return DispatchType<float, half, bf16>("scaled_square", x.dtype, [&](auto t) {
    using T = decltype(t);
    return Elementwise(gpu, Gradient{scale}, {dx}, dy.as<T>(), x.as<T>());
  });
}

}  // namespace tf_ops
