// SPDX-License-Identifier: Apache-2.0
// Gated linear units, element by element:
//
//   y = f(gate) up
//   dgate = dy up f'(gate)
//   dup   = dy f(gate)
//
//   silu       f(x) = x / (1 + exp(-x))
//   gelu       f(x) = x Phi(x), Phi the normal distribution function (1 + erf(x / sqrt 2)) / 2
//   gelu_tanh  f(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//   relu       f(x) = max(x, 0), f'(0) = 0
//   sigmoid    f(x) = 1 / (1 + exp(-x))
//
// gate, up, y and their gradients: one shape, one dtype of float32, float16 or bfloat16.
// packed: gate is [..., 2 cols] and holds gate and up in the halves of its last axis, dgate their
// gradients; up and dup are of shape [0], y and dy [..., cols]. Arithmetic is in float32.
// y may alias gate or up; dgate gate; dup up.
#pragma once

#include "cc/common/tensor_view.h"

namespace tf_ops {

Status GatedLinearUnit(Cpu cpu, TensorView gate, TensorView up, std::string activation, bool packed,
                       TensorView y);
Status GatedLinearUnit(Gpu gpu, TensorView gate, TensorView up, std::string activation, bool packed,
                       TensorView y);

Status GatedLinearUnitGrad(Cpu cpu, TensorView dy, TensorView gate, TensorView up,
                           std::string activation, bool packed, TensorView dgate, TensorView dup);
Status GatedLinearUnitGrad(Gpu gpu, TensorView dy, TensorView gate, TensorView up,
                           std::string activation, bool packed, TensorView dgate, TensorView dup);

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kSigmoid };

// What the loops of both devices take, packed or not: `rows` rows of `cols` elements, which in
// gate, up, dgate and dup begin `stride` elements apart, in y and dy one after another.
struct GatedLinearUnitProblem {
  DType dtype;
  Activation activation;
  int64_t rows, cols, stride;
  const void *gate, *up, *dy;
  void *y, *dgate, *dup;
};

// Calls f(std::integral_constant<Activation, a>{}) for the activation a.
template <typename F>
void DispatchActivation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSilu: return f(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kGelu: return f(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return f(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kRelu: return f(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kSigmoid: return f(std::integral_constant<Activation, Activation::kSigmoid>{});
  }
}

// The loops: y where `dy` is null, else dgate and dup.
Status RunGatedLinearUnit(Cpu cpu, const GatedLinearUnitProblem& p);
Status RunGatedLinearUnit(Gpu gpu, const GatedLinearUnitProblem& p);

}  // namespace tf_ops
