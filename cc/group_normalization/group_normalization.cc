// SPDX-License-Identifier: Apache-2.0
#include "cc/group_normalization/group_normalization.h"

namespace tf_ops {
namespace {

Status Error(const std::string& message) {
  return InvalidArgument("group_normalization: " + message);
}

void TakeSums(const TensorView& x, Workspace* workspace, GroupNormalizationProblem* problem) {
  problem->sum_dy = workspace->Take<float>("sum_dy", {x.dims[0], x.dims[2]});
  problem->sum_dy_xhat = workspace->Take<float>("sum_dy_xhat", {x.dims[0], x.dims[2]});
}

}  // namespace

void GroupNormalizationGradWorkspace(TensorView, TensorView x, TensorView, TensorView, TensorView,
                                     TensorView, int, float, Workspace* workspace) {
  GroupNormalizationProblem problem;
  if (x.rank == 4) TakeSums(x, workspace, &problem);
}

Status DescribeGroupNormalization(const TensorView& x, const TensorView& gamma,
                                  const TensorView& beta, int groups, const TensorView& mean,
                                  const TensorView& rstd, GroupNormalizationProblem* problem) {
  if (x.rank != 4) return Error("x must be [samples, outer, channels, inner]");
  const int64_t channels = x.dims[2];
  if (groups < 1 || channels % groups != 0) {
    return Error("there are " + std::to_string(channels) + " channels, which " +
                 std::to_string(groups) + " groups do not divide");
  }
  for (const TensorView* weight : {&gamma, &beta}) {
    if (!weight->present()) continue;
    if (weight->rank != 1 || weight->dims[0] != channels) {
      return Error("gamma and beta must be [channels], which are " + std::to_string(channels));
    }
    if (weight->dtype != x.dtype && weight->dtype != DType::kFloat32) {
      return Error("gamma and beta must be of the dtype of x or float32");
    }
  }
  if (gamma.present() && beta.present() && gamma.dtype != beta.dtype) {
    return Error("gamma and beta must be of one dtype");
  }
  for (const TensorView* view : {&mean, &rstd}) {
    if (view->rank != 2 || view->dims[0] != x.dims[0] || view->dims[1] != groups ||
        view->dtype != DType::kFloat32) {
      return Error("mean and rstd must be float32 [samples, groups]");
    }
  }
  GroupNormalizationProblem& p = *problem;
  p = {};
  p.samples = x.dims[0];
  p.outer = x.dims[1];
  p.channels = channels;
  p.inner = x.dims[3];
  p.groups = groups;
  p.group_channels = channels / groups;
  p.float_weights = (gamma.present() ? gamma : beta).dtype == DType::kFloat32;
  p.x = x.data;
  p.gamma = gamma.present() ? gamma.data : nullptr;
  p.beta = beta.present() ? beta.data : nullptr;
  p.mean = mean.as<float>();
  p.rstd = rstd.as<float>();
  return Ok();
}

Status DescribeGroupNormalizationGrad(const TensorView& dy, const TensorView& x,
                                      const TensorView& gamma, const TensorView& beta,
                                      const TensorView& mean, const TensorView& rstd, int groups,
                                      const TensorView& dx, const TensorView& dgamma,
                                      const TensorView& dbeta, Workspace* workspace,
                                      GroupNormalizationProblem* problem) {
  if (Status s = DescribeGroupNormalization(x, gamma, beta, groups, mean, rstd, problem); !s.ok()) {
    return s;
  }
  if (!dy.SameShapeAndDType(x) || !dx.SameShapeAndDType(x)) {
    return Error("dy and dx must have the shape and dtype of x");
  }
  if (!dgamma.SameShapeAndDType(gamma) || !dbeta.SameShapeAndDType(beta)) {
    return Error("dgamma and dbeta must be as gamma and beta");
  }
  problem->dy = dy.data;
  problem->dx = dx.data;
  problem->dgamma = gamma.present() ? dgamma.data : nullptr;
  problem->dbeta = beta.present() ? dbeta.data : nullptr;
  TakeSums(x, workspace, problem);
  return Ok();
}

}  // namespace tf_ops
