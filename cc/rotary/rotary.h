// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of the first rotary_dim entries of each head; the rest is copied.
//
//   y1_i = x1_i cos a_i - x2_i sin a_i        a_i = position / scaling_factor theta^(-2 i /
//   rotary_dim) y2_i = x2_i cos a_i + x1_i sin a_i        i < rotary_dim / 2
//
// x1_i, x2_i are entries i and rotary_dim / 2 + i of a head, or 2 i and 2 i + 1 if interleaved.
// `inverse` rotates by -a: the gradient. rotary_dim 0: head_dim, or what the tables are for.
//
// x, y: [batch, seq, heads, head_dim] of float32, float16 or bfloat16. key, rotated_key: the same
// with other heads, or of shape [0]. positions: int32 [seq], [1, seq] or [batch, seq], or [0]: 0,
// 1, 2, ... cos, sin: float32, or [0]; tables [rows, rotary_dim / 2] take the place of cos a and
// sin a at row `position`, tables [1 or batch, seq, rotary_dim / 2] at the token. A position
// outside a table is an error on the CPU, and NaN for that token on the GPU.
// Arithmetic is in float32; angles are exact to 2^-32 of a turn at positions below 2^20. y may
// alias x, rotated_key key.
#pragma once

#include "cc/common/tensor_view.h"

namespace tf_ops {

Status RotaryEmbedding(Cpu cpu, TensorView x, TensorView key, TensorView positions, TensorView cos,
                       TensorView sin, float theta, float scaling_factor, int rotary_dim,
                       bool interleaved, bool inverse, TensorView y, TensorView rotated_key);
Status RotaryEmbedding(Gpu gpu, TensorView x, TensorView key, TensorView positions, TensorView cos,
                       TensorView sin, float theta, float scaling_factor, int rotary_dim,
                       bool interleaved, bool inverse, TensorView y, TensorView rotated_key);

// What the loops of both devices take. A CUDA kernel takes it by value, 4 KB at most.
struct RotaryProblem {
  static constexpr int kMaxPairs = 256;  // without tables

  DType dtype;
  int64_t batch, seq, heads, key_heads, head_dim;
  int64_t pairs;  // rotary_dim / 2
  bool interleaved, inverse;
  const void *x, *key;
  void *y, *rotated_key;
  const int32_t* positions;  // null: 0, 1, 2, ...
  int64_t position_stride;   // from one row of the batch to the next
  const float *cos, *sin;    // null: computed
  bool table_by_position;    // else a row for each token
  int64_t table_rows;
  int64_t table_stride;  // from one row of the batch to the next, in tokens
  // a_i / position in turns, modulo 1, times 2^64: a product with a position, itself modulo 2^64,
  // is exact where float angles of 1e6 have lost 0.06.
  uint64_t turns[kMaxPairs];
};

Status RunRotaryEmbedding(Cpu cpu, const RotaryProblem& p);
Status RunRotaryEmbedding(Gpu gpu, const RotaryProblem& p);

}  // namespace tf_ops
