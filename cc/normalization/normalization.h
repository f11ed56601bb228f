// SPDX-License-Identifier: Apache-2.0
// RMS and layer normalisation over the last `axes` dimensions of x, of `cols` elements:
//
//   s  = x + residual, rounded to the dtype of x;  x itself without a residual
//   y  = xhat (scale + scale_offset) + beta,  xhat = (s - mean) rstd
//   rstd = 1 / sqrt(mean((s - mean)^2) + epsilon);  mean is 0 for RMS
//
//   g  = dy (scale + scale_offset)
//   dx = rstd (g - mean(g) - xhat (sum(g xhat) + rstd drstd) / cols) + dmean / cols + ds
//   dscale = sum over rows of dy xhat,  dbeta = sum over rows of dy
//
// without mean(g) and dmean for RMS. dx is the gradient of the residual, too.
//
// x, residual, y, s: one shape and dtype (float32, float16, bfloat16). scale (gamma) and beta: the
// last `axes` dimensions of x or more of them, one shape, of the dtype of x or float32; their
// gradients are like them. mean, rstd: float32, the leading dimensions of x. Arithmetic is
// in float32. Inputs that are left out are of shape [0], and so are their gradients, and s without
// a residual. y may alias x, s residual, and dx dy. The gradients take s for x, and read of beta
// the shape alone. return_residual is for the callers: whether s has a gradient.
#pragma once

#include <algorithm>

#include "cc/common/workspace.h"

namespace tf_ops {

Status RmsNormalization(Cpu cpu, TensorView x, TensorView residual, TensorView scale, float epsilon,
                        float scale_offset, int axes, bool return_residual, TensorView y,
                        TensorView s, TensorView rstd);
Status RmsNormalization(Gpu gpu, TensorView x, TensorView residual, TensorView scale, float epsilon,
                        float scale_offset, int axes, bool return_residual, TensorView y,
                        TensorView s, TensorView rstd);

Status RmsNormalizationGrad(Cpu cpu, TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                            TensorView scale, TensorView rstd, float epsilon, float scale_offset,
                            int axes, TensorView dx, TensorView dscale, Workspace* workspace);
Status RmsNormalizationGrad(Gpu gpu, TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                            TensorView scale, TensorView rstd, float epsilon, float scale_offset,
                            int axes, TensorView dx, TensorView dscale, Workspace* workspace);

Status LayerNormalization(Cpu cpu, TensorView x, TensorView residual, TensorView gamma,
                          TensorView beta, float epsilon, int axes, bool return_residual,
                          TensorView y, TensorView s, TensorView mean, TensorView rstd);
Status LayerNormalization(Gpu gpu, TensorView x, TensorView residual, TensorView gamma,
                          TensorView beta, float epsilon, int axes, bool return_residual,
                          TensorView y, TensorView s, TensorView mean, TensorView rstd);

Status LayerNormalizationGrad(Cpu cpu, TensorView dy, TensorView ds, TensorView dmean,
                              TensorView drstd, TensorView x, TensorView gamma, TensorView beta,
                              TensorView mean, TensorView rstd, float epsilon, int axes,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace);
Status LayerNormalizationGrad(Gpu gpu, TensorView dy, TensorView ds, TensorView dmean,
                              TensorView drstd, TensorView x, TensorView gamma, TensorView beta,
                              TensorView mean, TensorView rstd, float epsilon, int axes,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace);

// What the loops and kernels of both ops compute with; null where a tensor is left out.
struct NormalizationProblem {
  bool subtract_mean;
  DType dtype, weight_dtype;
  int64_t rows, cols, groups;  // row i takes row i % groups of the weights
  float epsilon, scale_offset;
  const void *x, *residual, *scale, *beta;
  void *y, *s;
  float *mean, *rstd;
  // The gradient's.
  const void *dy, *ds;
  const float *dmean, *drstd;
  void *dx, *dscale, *dbeta;
  float* partial;  // dscale's [parts, groups, cols], then dbeta's
};
Status Normalize(Cpu cpu, const NormalizationProblem& problem);
Status Normalize(Gpu gpu, const NormalizationProblem& problem);
Status NormalizeGrad(Cpu cpu, const NormalizationProblem& problem);
Status NormalizeGrad(Gpu gpu, const NormalizationProblem& problem);

// The gradients of the weights are summed over `parts` sets of rows, then over the parts, in a
// fixed order. On the CPU a part is of 8 rows or more, so that its sums are small beside x, and
// of about 32 where there are many, for the rounding errors of a longer sum would add up.
inline int64_t NormalizationCpuParts(const NormalizationProblem& p) {
  const int64_t rows = p.rows / p.groups;
  return rows == 0 ? 0 : std::clamp<int64_t>(rows / 8, 1, std::max<int64_t>(64, rows / 32));
}
// The most; a GPU with few multiprocessors takes fewer.
inline int64_t NormalizationGpuParts(const NormalizationProblem& p) {
  const int64_t limit = std::min<int64_t>(640, (int64_t{1} << 25) / std::max<int64_t>(p.cols, 1));
  return p.rows == 0 ? 0 : std::clamp<int64_t>(limit / p.groups, 1, p.rows / p.groups);
}

// The partial sums: functions of the gradients' inputs and attributes.
void RmsNormalizationGradCpuWorkspace(TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                                      TensorView scale, TensorView rstd, float epsilon,
                                      float scale_offset, int axes, Workspace* workspace);
void RmsNormalizationGradGpuWorkspace(TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                                      TensorView scale, TensorView rstd, float epsilon,
                                      float scale_offset, int axes, Workspace* workspace);
void LayerNormalizationGradCpuWorkspace(TensorView dy, TensorView ds, TensorView dmean,
                                        TensorView drstd, TensorView x, TensorView gamma,
                                        TensorView beta, TensorView mean, TensorView rstd,
                                        float epsilon, int axes, Workspace* workspace);
void LayerNormalizationGradGpuWorkspace(TensorView dy, TensorView ds, TensorView dmean,
                                        TensorView drstd, TensorView x, TensorView gamma,
                                        TensorView beta, TensorView mean, TensorView rstd,
                                        float epsilon, int axes, Workspace* workspace);

}  // namespace tf_ops
