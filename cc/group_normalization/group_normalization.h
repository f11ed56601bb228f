// SPDX-License-Identifier: Apache-2.0
// Group normalization: the channels of a sample in `groups` groups of neighbours,
//
//   y = (x - mean) rstd gamma + beta,   rstd = 1 / sqrt(variance + epsilon),
//
// mean and variance over a group's channels and all places, gamma and beta by channel.
// Gradients, with xhat = (x - mean) rstd, g = dy gamma and averages over a group:
//
//   dx = rstd (g - average(g) - xhat average(g xhat)),
//   dgamma = sum of dy xhat,  dbeta = sum of dy, over samples and places.
//
// x, y, dy, dx: [samples, outer, channels, inner] of float32, float16 or bfloat16; places are
// outer x inner, so that channels last is inner = 1, and channels first outer = 1. gamma, beta and
// their gradients: [channels], of the dtype of x or float32, or left out. mean, rstd: [samples,
// groups], float32. Sums are in float32 or wider, of a fixed order. y may alias x, dx dy.
#pragma once

#include "cc/common/workspace.h"

namespace tf_ops {

Status GroupNormalization(Cpu cpu, TensorView x, TensorView gamma, TensorView beta, int groups,
                          float epsilon, TensorView y, TensorView mean, TensorView rstd);
Status GroupNormalization(Gpu gpu, TensorView x, TensorView gamma, TensorView beta, int groups,
                          float epsilon, TensorView y, TensorView mean, TensorView rstd);

Status GroupNormalizationGrad(Cpu cpu, TensorView dy, TensorView x, TensorView gamma,
                              TensorView beta, TensorView mean, TensorView rstd, int groups,
                              float epsilon, TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace);
Status GroupNormalizationGrad(Gpu gpu, TensorView dy, TensorView x, TensorView gamma,
                              TensorView beta, TensorView mean, TensorView rstd, int groups,
                              float epsilon, TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace);
// For each sample and channel, the sums of dy and of dy xhat.
void GroupNormalizationGradWorkspace(TensorView dy, TensorView x, TensorView gamma, TensorView beta,
                                     TensorView mean, TensorView rstd, int groups, float epsilon,
                                     Workspace* workspace);

// What both devices compute with. A CUDA kernel takes it by value.
struct GroupNormalizationProblem {
  int64_t samples, outer, channels, inner, groups, group_channels;
  float epsilon;
  bool float_weights;  // else of the dtype of x
  const void *x, *gamma, *beta, *dy;
  void *y, *dx, *dgamma, *dbeta;
  float *mean, *rstd;
  float *sum_dy, *sum_dy_xhat;  // [samples, channels]
};

Status DescribeGroupNormalization(const TensorView& x, const TensorView& gamma,
                                  const TensorView& beta, int groups, const TensorView& mean,
                                  const TensorView& rstd, GroupNormalizationProblem* problem);
Status DescribeGroupNormalizationGrad(const TensorView& dy, const TensorView& x,
                                      const TensorView& gamma, const TensorView& beta,
                                      const TensorView& mean, const TensorView& rstd, int groups,
                                      const TensorView& dx, const TensorView& dgamma,
                                      const TensorView& dbeta, Workspace* workspace,
                                      GroupNormalizationProblem* problem);

}  // namespace tf_ops
