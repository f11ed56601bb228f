// SPDX-License-Identifier: Apache-2.0
// The checks and launchers of both devices.
#include "cc/rotary/rotary.h"

#include <cmath>

namespace tf_ops {
namespace {

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

Status Error(const std::string& message) { return InvalidArgument("rotary_embedding: " + message); }

void SetTurns(float theta, float scaling_factor, RotaryProblem* p) {
  constexpr double kTurn = 6.283185307179586;
  for (int64_t i = 0; i < p->pairs; ++i) {
    const double turns =
        std::pow(double{theta}, -double(i) / double(p->pairs)) / (kTurn * scaling_factor);
    p->turns[i] = static_cast<uint64_t>((turns - std::floor(turns)) * 0x1p64);
  }
}

Status SetTables(const TensorView& cos, const TensorView& sin, const TensorView& positions,
                 int rotary_dim, RotaryProblem* p) {
  if (cos.dtype != DType::kFloat32 || !cos.SameShapeAndDType(sin)) {
    return Error("cos and sin must be float32 of one shape; they are " + ShapeOf(cos) + " and " +
                 ShapeOf(sin));
  }
  if (cos.rank != 2 && cos.rank != 3) {
    return Error("cos is " + ShapeOf(cos) + "; it must be [rows, rotary_dim / 2] or " +
                 "[batch, seq, rotary_dim / 2]");
  }
  p->pairs = cos.dim(-1);
  if (rotary_dim && p->pairs != rotary_dim / 2) {
    return Error("cos is " + ShapeOf(cos) + " beside a rotary_dim of " +
                 std::to_string(rotary_dim) + ", of which its last axis must be the half");
  }
  p->cos = cos.as<const float>();
  p->sin = sin.as<const float>();
  if (cos.rank == 2) {
    p->table_by_position = true;
    p->table_rows = cos.dim(0);
    if (!p->positions && p->table_rows < p->seq) {
      return Error("cos has " + std::to_string(p->table_rows) + " rows for " +
                   std::to_string(p->seq) + " positions");
    }
    return Ok();
  }
  if (positions.present()) return Error("positions choose rows of cos [rows, rotary_dim / 2] only");
  if (cos.dim(1) != p->seq || (cos.dim(0) != 1 && cos.dim(0) != p->batch)) {
    return Error("cos is " + ShapeOf(cos) + " beside a batch of " + std::to_string(p->batch) +
                 " and a seq of " + std::to_string(p->seq));
  }
  p->table_stride = cos.dim(0) == 1 ? 0 : p->seq;
  return Ok();
}

Status Describe(const TensorView& x, const TensorView& key, const TensorView& positions,
                const TensorView& cos, const TensorView& sin, float theta, float scaling_factor,
                int rotary_dim, bool interleaved, bool inverse, const TensorView& y,
                const TensorView& rotated_key, RotaryProblem* problem) {
  RotaryProblem& p = *problem;
  if (x.rank != 4) {
    return Error("x must be [batch, seq, heads, head_dim]; it is " + ShapeOf(x));
  }
  if (x.dtype != DType::kFloat32 && x.dtype != DType::kFloat16 && x.dtype != DType::kBFloat16) {
    return Error("x must be float32, float16 or bfloat16");
  }
  p.dtype = x.dtype;
  p.batch = x.dim(0), p.seq = x.dim(1), p.heads = x.dim(2), p.head_dim = x.dim(3);
  p.interleaved = interleaved;
  p.inverse = inverse;
  if (key.present()) {
    if (key.rank != 4 || key.dtype != x.dtype || key.dim(0) != p.batch || key.dim(1) != p.seq ||
        key.dim(3) != p.head_dim) {
      return Error("key is " + ShapeOf(key) + "; beside x " + ShapeOf(x) +
                   " only its heads may be others");
    }
    p.key_heads = key.dim(2);
  }
  if (!y.SameShapeAndDType(x) || !rotated_key.SameShapeAndDType(key)) {
    return Error("results must have the shape and dtype of x and key");
  }
  p.x = x.data, p.key = key.data, p.y = y.data, p.rotated_key = rotated_key.data;
  if (positions.present()) {
    const bool per_row = positions.rank == 2;
    if (positions.dtype != DType::kInt32 || positions.rank < 1 || positions.rank > 2 ||
        positions.dim(-1) != p.seq ||
        (per_row && positions.dim(0) != 1 && positions.dim(0) != p.batch)) {
      return Error("positions are " + ShapeOf(positions) + "; beside x " + ShapeOf(x) +
                   " they must be int32 [seq] or [batch, seq]");
    }
    p.positions = positions.as<const int32_t>();
    p.position_stride = per_row && positions.dim(0) != 1 ? p.seq : 0;
  }
  const bool tables = cos.present() || sin.present();
  p.pairs = (rotary_dim ? rotary_dim : p.head_dim) / 2;
  if (tables) {
    if (Status s = SetTables(cos, sin, positions, rotary_dim, &p); !s.ok()) return s;
  }
  const int64_t rotated = tables || rotary_dim == 0 ? 2 * p.pairs : rotary_dim;
  if (rotary_dim < 0 || rotary_dim % 2 || rotated > p.head_dim ||
      (!tables && rotary_dim == 0 && p.head_dim % 2)) {
    return Error("rotary_dim must be even and at most head_dim " + std::to_string(p.head_dim) +
                 "; it is " +
                 std::to_string(rotary_dim ? rotary_dim
                                : tables   ? rotated
                                           : p.head_dim));
  }
  if (tables) return Ok();
  if (p.pairs > RotaryProblem::kMaxPairs) {
    return Error("rotary_dim is " + std::to_string(2 * p.pairs) + "; without cos and sin it is " +
                 std::to_string(2 * RotaryProblem::kMaxPairs) + " at most");
  }
  if (!(theta > 0.0f && theta <= 3.402823466e38f)) return Error("theta must be positive");
  if (!(scaling_factor > 0.0f && scaling_factor <= 3.402823466e38f)) {
    return Error("scaling_factor must be positive");
  }
  SetTurns(theta, scaling_factor, &p);
  return Ok();
}

template <typename Device>
Status Run(Device device, const TensorView& x, const TensorView& key, const TensorView& positions,
           const TensorView& cos, const TensorView& sin, float theta, float scaling_factor,
           int rotary_dim, bool interleaved, bool inverse, const TensorView& y,
           const TensorView& rotated_key) {
  RotaryProblem p = {};
  if (Status s = Describe(x, key, positions, cos, sin, theta, scaling_factor, rotary_dim,
                          interleaved, inverse, y, rotated_key, &p);
      !s.ok() || x.size() + (key.present() ? key.size() : 0) == 0) {
    return s;
  }
  return RunRotaryEmbedding(device, p);
}

}  // namespace

Status RotaryEmbedding(Cpu cpu, TensorView x, TensorView key, TensorView positions, TensorView cos,
                       TensorView sin, float theta, float scaling_factor, int rotary_dim,
                       bool interleaved, bool inverse, TensorView y, TensorView rotated_key) {
  return Run(cpu, x, key, positions, cos, sin, theta, scaling_factor, rotary_dim, interleaved,
             inverse, y, rotated_key);
}
#if TF_OPS_CUDA
Status RotaryEmbedding(Gpu gpu, TensorView x, TensorView key, TensorView positions, TensorView cos,
                       TensorView sin, float theta, float scaling_factor, int rotary_dim,
                       bool interleaved, bool inverse, TensorView y, TensorView rotated_key) {
  return Run(gpu, x, key, positions, cos, sin, theta, scaling_factor, rotary_dim, interleaved,
             inverse, y, rotated_key);
}
#endif

}  // namespace tf_ops
