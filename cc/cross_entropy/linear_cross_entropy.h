// SPDX-License-Identifier: Apache-2.0
// Cross entropy whose logits, hidden x kernel, exist only block by block of classes; the
// formulas are those of cross_entropy.h. The matrix products are the caller's:
//
//   for each block:  sums = LinearCrossEntropy(its logits, sums)
//   for each block:  dlogits = LinearCrossEntropyGrad(its logits again, ...)
//                    dhidden += dlogits kernel^T,  dkernel[block] = hidden^T dlogits
//
// sums: [tokens, 4] of float32, {max, sum of exp(x - max), sum of x, x[label]} over the blocks
// so far; the sum of x stays 0 where labels are not smoothed, and x[label] NaN until the block of
// the label has come, so that the loss of a label outside [0, classes) is NaN. On the CPU such a
// label is an error. The start is {-inf, 0, 0, NaN}.
//
// span: int64 {first class of the block, number of all classes}, on the device.
//
// logits, dlogits: [tokens, classes of the block]. labels, dloss, max, log_sum: [tokens].
//
// Outputs may alias the input they continue: new_sums sums, dlogits logits.
#pragma once

#include "cc/cross_entropy/cross_entropy.h"

namespace tf_ops {

Status LinearCrossEntropy(Cpu cpu, TensorView labels, TensorView logits, TensorView span,
                          TensorView sums, bool has_ignore_class, int64_t ignore_class,
                          float label_smoothing, float soft_cap, TensorView new_sums);
Status LinearCrossEntropy(Gpu gpu, TensorView labels, TensorView logits, TensorView span,
                          TensorView sums, bool has_ignore_class, int64_t ignore_class,
                          float label_smoothing, float soft_cap, TensorView new_sums);

Status LinearCrossEntropyGrad(Cpu cpu, TensorView dloss, TensorView labels, TensorView logits,
                              TensorView span, TensorView max, TensorView log_sum,
                              bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                              float z_loss, float soft_cap, TensorView dlogits);
Status LinearCrossEntropyGrad(Gpu gpu, TensorView dloss, TensorView labels, TensorView logits,
                              TensorView span, TensorView max, TensorView log_sum,
                              bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                              float z_loss, float soft_cap, TensorView dlogits);

// The sum grows by addend, in float32 arithmetic: [..., n], of any of the three types. A float32
// sum has a rest of shape [0]. One of bfloat16 is always rounded to the nearest, and the rest,
// uint8 [..., n, 2], holds a 16-bit integer for each element: as integers, sum * 2^16 + rest are
// the bits of the float32 sum. So the result needs no memory beside the sum's own. Outputs may
// alias what they continue.
Status LinearCrossEntropyHiddenGrad(Cpu cpu, TensorView sum, TensorView rest, TensorView addend,
                                    TensorView new_sum, TensorView new_rest);
Status LinearCrossEntropyHiddenGrad(Gpu gpu, TensorView sum, TensorView rest, TensorView addend,
                                    TensorView new_sum, TensorView new_rest);

// A copy of `whole`, [features, classes], in which `block`, [features, classes of the block] of
// its own dtype, takes its place; [classes, features] under transpose_kernel. new_whole may alias
// whole.
Status LinearCrossEntropyKernelGrad(Cpu cpu, TensorView whole, TensorView block, TensorView span,
                                    bool transpose_kernel, TensorView new_whole);
Status LinearCrossEntropyKernelGrad(Gpu gpu, TensorView whole, TensorView block, TensorView span,
                                    bool transpose_kernel, TensorView new_whole);

struct alignas(16) BlockSums {
  float max, sum, sum_x, x_label;
};

// The checks of both devices. What `span` holds, only the device knows.
Status DescribeBlockSums(const TensorView& labels, const TensorView& logits, const TensorView& span,
                         const TensorView& sums, bool has_ignore_class, int64_t ignore_class,
                         float label_smoothing, float soft_cap, const TensorView& new_sums,
                         CrossEntropyProblem* problem);
Status DescribeBlockGrad(const TensorView& dloss, const TensorView& labels,
                         const TensorView& logits, const TensorView& span, const TensorView& max,
                         const TensorView& log_sum, bool has_ignore_class, int64_t ignore_class,
                         float label_smoothing, float z_loss, float soft_cap,
                         const TensorView& dlogits, CrossEntropyProblem* problem);
Status CheckHiddenGrad(const TensorView& sum, const TensorView& rest, const TensorView& addend,
                       const TensorView& new_sum, const TensorView& new_rest);
// A gradient of the kernel as rows into which a part goes that starts at `unit` times the block's
// first class, which is `last` at most.
struct KernelGradProblem {
  int64_t rows, cols, width, unit, last;
};
Status DescribeKernelGrad(const TensorView& whole, const TensorView& block, const TensorView& span,
                          bool transpose_kernel, const TensorView& new_whole,
                          KernelGradProblem* problem);

}  // namespace tf_ops
