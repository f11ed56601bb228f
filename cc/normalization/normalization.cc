// SPDX-License-Identifier: Apache-2.0
// The checks and launchers of both devices.
#include "cc/normalization/normalization.h"

namespace tf_ops {
namespace {

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

// An op's tensors by their part in the formulas; what an op does not have is left out.
struct Tensors {
  TensorView x, residual = kAbsent, scale = kAbsent, beta = kAbsent;
  TensorView y = kAbsent, s = kAbsent, mean = kAbsent, rstd;
  TensorView dy = kAbsent, ds = kAbsent, dmean = kAbsent, drstd = kAbsent;
  TensorView dx = kAbsent, dscale = kAbsent, dbeta = kAbsent;
  Workspace* workspace = nullptr;

  static constexpr TensorView kAbsent{nullptr, DType::kUnsupported, 1, {0}};
};

void* DataOf(const TensorView& view) { return view.present() ? view.data : nullptr; }

// Sizes alone, as far as the shapes make sense: workspaces are asked for before any check.
void SetSizes(const TensorView& x, const TensorView& scale, const TensorView& beta, int axes,
              NormalizationProblem* p) {
  const TensorView& weight = scale.present() ? scale : beta;
  const int weight_axes = weight.present() ? weight.rank : axes;
  p->rows = p->cols = p->groups = 1;
  for (int i = 0; i < x.rank; ++i) (i < x.rank - axes ? p->rows : p->cols) *= x.dims[i];
  for (int i = x.rank - weight_axes; i < x.rank - axes; ++i) {
    if (i >= 0) p->groups *= x.dims[i];
  }
  p->groups = std::max<int64_t>(p->groups, 1);
}

float* TakePartial(const TensorView& scale, const TensorView& beta, int64_t parts,
                   const NormalizationProblem& p, Workspace* workspace) {
  const int64_t weights = scale.present() + beta.present();
  return workspace->Take<float>("partial sums", {weights, parts, p.groups, p.cols});
}

void TakePartial(const TensorView& x, const TensorView& scale, const TensorView& beta, int axes,
                 int64_t (*parts)(const NormalizationProblem&), Workspace* workspace) {
  NormalizationProblem p;
  SetSizes(x, scale, beta, axes, &p);
  TakePartial(scale, beta, parts(p), p, workspace);
}

// Describes the gradient if `parts` is given, which says how many the device takes.
Status Describe(const std::string& op, const Tensors& t, float epsilon, float scale_offset,
                int axes, bool subtract_mean, int64_t (*parts)(const NormalizationProblem&),
                NormalizationProblem* problem) {
  const auto error = [&](const std::string& message) {
    return InvalidArgument(op + ": " + message);
  };
  const TensorView& x = t.x;
  if (x.dtype != DType::kFloat32 && x.dtype != DType::kFloat16 && x.dtype != DType::kBFloat16) {
    return error("x must be float32, float16 or bfloat16");
  }
  if (axes < 1 || axes > x.rank) {
    return error("x is " + ShapeOf(x) + ", of which " + std::to_string(axes) +
                 " axes cannot be normalised");
  }
  const auto like_x = [&](const char* name, const TensorView& view, bool optional) {
    if ((optional && !view.present()) || view.SameShapeAndDType(x)) return Ok();
    return error(std::string(name) + " is " + ShapeOf(view) + "; it must have the shape " +
                 ShapeOf(x) + " and dtype of x");
  };
  TensorView row = x;
  row.dtype = DType::kFloat32;
  row.rank -= axes;
  for (int i = row.rank; i < x.rank; ++i) row.dims[i] = 0;
  const auto one_per_row = [&](const char* name, const TensorView& view, bool optional) {
    if ((optional && !view.present()) || view.SameShapeAndDType(row)) return Ok();
    return error(std::string(name) + " is " + ShapeOf(view) + "; it must be float32 " +
                 ShapeOf(row));
  };
  const auto weight = [&](const char* name, const TensorView& view) {
    if (!view.present()) return Ok();
    bool fits = view.rank >= axes && view.rank <= x.rank;
    for (int i = 1; fits && i <= view.rank; ++i) fits = view.dim(-i) == x.dim(-i);
    if (!fits) {
      return error(std::string(name) + " is " + ShapeOf(view) + "; beside x " + ShapeOf(x) +
                   " it must have the last " + std::to_string(axes) + " or more dimensions of x");
    }
    if (view.dtype == x.dtype || view.dtype == DType::kFloat32) return Ok();
    return error(std::string(name) + " must be of the dtype of x or float32");
  };
  const bool gradient = parts != nullptr;
  for (const Status& s :
       {like_x("residual", t.residual, true), like_x("y", t.y, gradient),
        like_x("s", t.s, !t.residual.present()), one_per_row("mean", t.mean, !subtract_mean),
        one_per_row("rstd", t.rstd, false), weight("scale", t.scale), weight("beta", t.beta),
        like_x("the gradient of y", t.dy, !gradient), like_x("the gradient of s", t.ds, true),
        one_per_row("the gradient of mean", t.dmean, true),
        one_per_row("the gradient of rstd", t.drstd, true),
        like_x("the gradient of x", t.dx, !gradient)}) {
    if (!s.ok()) return s;
  }
  if (t.scale.present() && t.beta.present() && !t.scale.SameShapeAndDType(t.beta)) {
    return error("gamma is " + ShapeOf(t.scale) + " and beta " + ShapeOf(t.beta) +
                 "; they must be of one shape and dtype");
  }
  if (gradient && ((t.scale.present() && !t.dscale.SameShapeAndDType(t.scale)) ||
                   (t.beta.present() && !t.dbeta.SameShapeAndDType(t.beta)))) {
    return error("the gradient of a weight must have its shape and dtype");
  }
  NormalizationProblem& p = *problem;
  SetSizes(x, t.scale, t.beta, axes, &p);
  p.subtract_mean = subtract_mean;
  p.dtype = x.dtype;
  p.weight_dtype = t.scale.present() ? t.scale.dtype : t.beta.present() ? t.beta.dtype : x.dtype;
  p.epsilon = epsilon;
  p.scale_offset = scale_offset;
  p.x = DataOf(t.x);
  p.residual = DataOf(t.residual);
  p.scale = DataOf(t.scale);
  p.beta = DataOf(t.beta);
  p.y = DataOf(t.y);
  p.s = DataOf(t.s);
  p.mean = static_cast<float*>(subtract_mean ? t.mean.data : nullptr);
  p.rstd = static_cast<float*>(t.rstd.data);
  p.dy = DataOf(t.dy);
  p.ds = DataOf(t.ds);
  p.dmean = static_cast<const float*>(DataOf(t.dmean));
  p.drstd = static_cast<const float*>(DataOf(t.drstd));
  p.dx = DataOf(t.dx);
  p.dscale = t.scale.present() ? t.dscale.data : nullptr;
  p.dbeta = t.beta.present() ? t.dbeta.data : nullptr;
  p.partial = gradient ? TakePartial(t.scale, t.beta, parts(p), p, t.workspace) : nullptr;
  return Ok();
}

template <typename Device>
Status Run(Device device, const char* op, const Tensors& tensors, float epsilon, float scale_offset,
           int axes, bool subtract_mean) {
  NormalizationProblem p;
  if (Status s = Describe(op, tensors, epsilon, scale_offset, axes, subtract_mean, nullptr, &p);
      !s.ok() || p.rows == 0) {
    return s;
  }
  return Normalize(device, p);
}

template <typename Device>
Status RunGrad(Device device, const char* op, const Tensors& tensors, float epsilon,
               float scale_offset, int axes, bool subtract_mean) {
  constexpr bool kCpu = std::is_same_v<Device, Cpu>;
  NormalizationProblem p;
  if (Status s = Describe(op, tensors, epsilon, scale_offset, axes, subtract_mean,
                          kCpu ? NormalizationCpuParts : NormalizationGpuParts, &p);
      !s.ok() || p.groups * p.cols == 0) {
    return s;
  }
  return NormalizeGrad(device, p);
}

Tensors RmsTensors(TensorView x, TensorView residual, TensorView scale, TensorView y, TensorView s,
                   TensorView rstd) {
  Tensors t;
  t.x = x, t.residual = residual, t.scale = scale, t.y = y, t.s = s, t.rstd = rstd;
  return t;
}

Tensors RmsGradTensors(TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                       TensorView scale, TensorView rstd, TensorView dx, TensorView dscale,
                       Workspace* workspace) {
  Tensors t;
  t.dy = dy, t.ds = ds, t.drstd = drstd, t.x = x, t.scale = scale, t.rstd = rstd;
  t.dx = dx, t.dscale = dscale, t.workspace = workspace;
  return t;
}

Tensors LayerTensors(TensorView x, TensorView residual, TensorView gamma, TensorView beta,
                     TensorView y, TensorView s, TensorView mean, TensorView rstd) {
  Tensors t = RmsTensors(x, residual, gamma, y, s, rstd);
  t.beta = beta, t.mean = mean;
  return t;
}

Tensors LayerGradTensors(TensorView dy, TensorView ds, TensorView dmean, TensorView drstd,
                         TensorView x, TensorView gamma, TensorView beta, TensorView mean,
                         TensorView rstd, TensorView dx, TensorView dgamma, TensorView dbeta,
                         Workspace* workspace) {
  Tensors t = RmsGradTensors(dy, ds, drstd, x, gamma, rstd, dx, dgamma, workspace);
  t.dmean = dmean, t.beta = beta, t.mean = mean, t.dbeta = dbeta;
  return t;
}

}  // namespace

Status RmsNormalization(Cpu cpu, TensorView x, TensorView residual, TensorView scale, float epsilon,
                        float scale_offset, int axes, bool, TensorView y, TensorView s,
                        TensorView rstd) {
  return Run(cpu, "rms_normalization", RmsTensors(x, residual, scale, y, s, rstd), epsilon,
             scale_offset, axes, false);
}
Status RmsNormalizationGrad(Cpu cpu, TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                            TensorView scale, TensorView rstd, float epsilon, float scale_offset,
                            int axes, TensorView dx, TensorView dscale, Workspace* workspace) {
  return RunGrad(cpu, "rms_normalization_grad",
                 RmsGradTensors(dy, ds, drstd, x, scale, rstd, dx, dscale, workspace), epsilon,
                 scale_offset, axes, false);
}
Status LayerNormalization(Cpu cpu, TensorView x, TensorView residual, TensorView gamma,
                          TensorView beta, float epsilon, int axes, bool, TensorView y,
                          TensorView s, TensorView mean, TensorView rstd) {
  return Run(cpu, "layer_normalization", LayerTensors(x, residual, gamma, beta, y, s, mean, rstd),
             epsilon, 0.0f, axes, true);
}
Status LayerNormalizationGrad(Cpu cpu, TensorView dy, TensorView ds, TensorView dmean,
                              TensorView drstd, TensorView x, TensorView gamma, TensorView beta,
                              TensorView mean, TensorView rstd, float epsilon, int axes,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace) {
  return RunGrad(cpu, "layer_normalization_grad",
                 LayerGradTensors(dy, ds, dmean, drstd, x, gamma, beta, mean, rstd, dx, dgamma,
                                  dbeta, workspace),
                 epsilon, 0.0f, axes, true);
}

#if TF_OPS_CUDA
Status RmsNormalization(Gpu gpu, TensorView x, TensorView residual, TensorView scale, float epsilon,
                        float scale_offset, int axes, bool, TensorView y, TensorView s,
                        TensorView rstd) {
  return Run(gpu, "rms_normalization", RmsTensors(x, residual, scale, y, s, rstd), epsilon,
             scale_offset, axes, false);
}
Status RmsNormalizationGrad(Gpu gpu, TensorView dy, TensorView ds, TensorView drstd, TensorView x,
                            TensorView scale, TensorView rstd, float epsilon, float scale_offset,
                            int axes, TensorView dx, TensorView dscale, Workspace* workspace) {
  return RunGrad(gpu, "rms_normalization_grad",
                 RmsGradTensors(dy, ds, drstd, x, scale, rstd, dx, dscale, workspace), epsilon,
                 scale_offset, axes, false);
}
Status LayerNormalization(Gpu gpu, TensorView x, TensorView residual, TensorView gamma,
                          TensorView beta, float epsilon, int axes, bool, TensorView y,
                          TensorView s, TensorView mean, TensorView rstd) {
  return Run(gpu, "layer_normalization", LayerTensors(x, residual, gamma, beta, y, s, mean, rstd),
             epsilon, 0.0f, axes, true);
}
Status LayerNormalizationGrad(Gpu gpu, TensorView dy, TensorView ds, TensorView dmean,
                              TensorView drstd, TensorView x, TensorView gamma, TensorView beta,
                              TensorView mean, TensorView rstd, float epsilon, int axes,
                              TensorView dx, TensorView dgamma, TensorView dbeta,
                              Workspace* workspace) {
  return RunGrad(gpu, "layer_normalization_grad",
                 LayerGradTensors(dy, ds, dmean, drstd, x, gamma, beta, mean, rstd, dx, dgamma,
                                  dbeta, workspace),
                 epsilon, 0.0f, axes, true);
}
#endif

void RmsNormalizationGradCpuWorkspace(TensorView, TensorView, TensorView, TensorView x,
                                      TensorView scale, TensorView, float, float, int axes,
                                      Workspace* workspace) {
  TakePartial(x, scale, Tensors::kAbsent, axes, NormalizationCpuParts, workspace);
}
void LayerNormalizationGradCpuWorkspace(TensorView, TensorView, TensorView, TensorView,
                                        TensorView x, TensorView gamma, TensorView beta, TensorView,
                                        TensorView, float, int axes, Workspace* workspace) {
  TakePartial(x, gamma, beta, axes, NormalizationCpuParts, workspace);
}
void RmsNormalizationGradGpuWorkspace(TensorView, TensorView, TensorView, TensorView x,
                                      TensorView scale, TensorView, float, float, int axes,
                                      Workspace* workspace) {
  TakePartial(x, scale, Tensors::kAbsent, axes, NormalizationGpuParts, workspace);
}
void LayerNormalizationGradGpuWorkspace(TensorView, TensorView, TensorView, TensorView,
                                        TensorView x, TensorView gamma, TensorView beta, TensorView,
                                        TensorView, float, int axes, Workspace* workspace) {
  TakePartial(x, gamma, beta, axes, NormalizationGpuParts, workspace);
}

}  // namespace tf_ops
