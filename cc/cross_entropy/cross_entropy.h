// SPDX-License-Identifier: Apache-2.0
// Softmax cross entropy with integer labels, over the last dimension of the logits:
//
//   x    = cap(logits),   cap(x) = c tanh(x / c), or x where soft_cap is 0
//   loss = lse - (1 - e) x[label] - e mean(x) + z lse^2,   lse = log sum exp(x)
//   dlogits_j = dx_j (1 - (x_j / c)^2),   p_j = exp(x_j - lse)
//   dx_j = dloss (p_j (1 + 2 z lse) - (1 - e) [j = label] - e / classes)
//
// e is label_smoothing, z is z_loss. A token whose label is ignore_class has loss 0 and dlogits
// 0, whatever its logits are. Another label outside [0, classes) is an error on the CPU, and NaN
// for that token, loss and dlogits, on the GPU.
//
// logits, dlogits: [..., classes] of float32, float16 or bfloat16; labels: [...], int32 or
// int64; loss, dloss, max, log_sum: [...], float32. The forward keeps lse as max + log_sum,
// for their rounded sum would spoil p at logits of 1e4. Arithmetic is in float32.
// dlogits may alias logits. Every result is the same bit for bit at each call.
#pragma once

#include "cc/common/tensor_view.h"

namespace tf_ops {

Status SparseSoftmaxCrossEntropy(Cpu cpu, TensorView labels, TensorView logits,
                                 bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                                 float z_loss, float soft_cap, TensorView loss, TensorView max,
                                 TensorView log_sum);
Status SparseSoftmaxCrossEntropy(Gpu gpu, TensorView labels, TensorView logits,
                                 bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                                 float z_loss, float soft_cap, TensorView loss, TensorView max,
                                 TensorView log_sum);

Status SparseSoftmaxCrossEntropyGrad(Cpu cpu, TensorView dloss, TensorView labels,
                                     TensorView logits, TensorView max, TensorView log_sum,
                                     bool has_ignore_class, int64_t ignore_class,
                                     float label_smoothing, float z_loss, float soft_cap,
                                     TensorView dlogits);
Status SparseSoftmaxCrossEntropyGrad(Gpu gpu, TensorView dloss, TensorView labels,
                                     TensorView logits, TensorView max, TensorView log_sum,
                                     bool has_ignore_class, int64_t ignore_class,
                                     float label_smoothing, float z_loss, float soft_cap,
                                     TensorView dlogits);

// What both devices and both directions compute with. A CUDA kernel takes it by value.
struct CrossEntropyProblem {
  int64_t tokens, classes;
  // Where the logits are those of a block of classes: its first class and the number of all
  // classes, on the device. A launcher for the CPU sets what follows from it.
  const int64_t* span;
  int64_t first_class, all_classes;
  const int32_t* labels32;  // one of the two is set
  const int64_t* labels64;
  bool has_ignore_class;
  int64_t ignore_class;
  float label_smoothing, z_loss, soft_cap;
};

// Checks what the launchers take, and describes it. `per_token` are loss or dloss, and the two
// parts of lse.
Status DescribeCrossEntropy(const TensorView& labels, const TensorView& logits,
                            bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                            float z_loss, float soft_cap, const TensorView* const (&per_token)[3],
                            CrossEntropyProblem* problem);

}  // namespace tf_ops
