// SPDX-License-Identifier: Apache-2.0
// The checks and launchers of both devices.
#include "cc/glu/glu.h"

namespace tf_ops {
namespace {

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

constexpr std::pair<const char*, Activation> kActivations[] = {
    {"silu", Activation::kSilu},          {"gelu", Activation::kGelu},
    {"gelu_tanh", Activation::kGeluTanh}, {"relu", Activation::kRelu},
    {"sigmoid", Activation::kSigmoid},
};

// `y` is y or dy; the gradients are null in the forward.
Status Describe(const TensorView& gate, const TensorView& up, const std::string& activation,
                bool packed, const TensorView& y, const TensorView* dgate, const TensorView* dup,
                GatedLinearUnitProblem* problem) {
  const auto error = [](const std::string& message) {
    return InvalidArgument("gated_linear_unit: " + message);
  };
  GatedLinearUnitProblem& p = *problem;
  const auto* found = std::begin(kActivations);
  while (found != std::end(kActivations) && found->first != activation) ++found;
  if (found == std::end(kActivations)) {
    return error("activation must be silu, gelu, gelu_tanh, relu or sigmoid; it is " + activation);
  }
  p.activation = found->second;
  if (gate.dtype != DType::kFloat32 && gate.dtype != DType::kFloat16 &&
      gate.dtype != DType::kBFloat16) {
    return error("gate must be float32, float16 or bfloat16");
  }
  p.dtype = gate.dtype;
  TensorView result = gate;
  if (packed) {
    if (gate.rank < 1 || gate.dim(-1) % 2) {
      return error("gate is " + ShapeOf(gate) +
                   "; its last axis must hold gate and up, so that its size is even");
    }
    if (up.present()) return error("up is " + ShapeOf(up) + " beside a packed gate");
    result.dims[gate.rank - 1] /= 2;
    p.cols = gate.dim(-1) / 2;
    p.rows = p.cols ? result.size() / p.cols : 0;
    p.stride = 2 * p.cols;
  } else {
    if (!up.SameShapeAndDType(gate)) {
      return error("up is " + ShapeOf(up) + "; it must have the shape " + ShapeOf(gate) +
                   " and dtype of gate");
    }
    p.rows = 1;
    p.cols = p.stride = gate.size();
  }
  if (!y.SameShapeAndDType(result)) {
    return error("y or its gradient is " + ShapeOf(y) + "; it must be " + ShapeOf(result) +
                 " in the dtype of gate");
  }
  if (dgate && !(dgate->SameShapeAndDType(gate) && (packed || dup->SameShapeAndDType(up)))) {
    return error("gradients must have the shape and dtype of what they are gradients of");
  }
  const int64_t half = p.cols * kDTypeSize[static_cast<int>(p.dtype)];
  p.gate = gate.data;
  p.up = packed ? gate.as<char>() + half : up.data;
  p.dy = dgate ? y.data : nullptr;
  p.y = dgate ? nullptr : y.data;
  p.dgate = dgate ? dgate->data : nullptr;
  p.dup = dgate ? (packed ? dgate->as<char>() + half : dup->data) : nullptr;
  return Ok();
}

template <typename Device>
Status Run(Device device, const TensorView& gate, const TensorView& up,
           const std::string& activation, bool packed, const TensorView& y,
           const TensorView* dgate = nullptr, const TensorView* dup = nullptr) {
  GatedLinearUnitProblem p;
  if (Status s = Describe(gate, up, activation, packed, y, dgate, dup, &p);
      !s.ok() || p.rows * p.cols == 0) {
    return s;
  }
  return RunGatedLinearUnit(device, p);
}

}  // namespace

Status GatedLinearUnit(Cpu cpu, TensorView gate, TensorView up, std::string activation, bool packed,
                       TensorView y) {
  return Run(cpu, gate, up, activation, packed, y);
}
Status GatedLinearUnitGrad(Cpu cpu, TensorView dy, TensorView gate, TensorView up,
                           std::string activation, bool packed, TensorView dgate, TensorView dup) {
  return Run(cpu, gate, up, activation, packed, dy, &dgate, &dup);
}

#if TF_OPS_CUDA
Status GatedLinearUnit(Gpu gpu, TensorView gate, TensorView up, std::string activation, bool packed,
                       TensorView y) {
  return Run(gpu, gate, up, activation, packed, y);
}
Status GatedLinearUnitGrad(Gpu gpu, TensorView dy, TensorView gate, TensorView up,
                           std::string activation, bool packed, TensorView dgate, TensorView dup) {
  return Run(gpu, gate, up, activation, packed, dy, &dgate, &dup);
}
#endif

}  // namespace tf_ops
