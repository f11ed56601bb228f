// SPDX-License-Identifier: Apache-2.0
#include "cc/cross_entropy/cross_entropy.h"

namespace tf_ops {
namespace {

Status Error(const std::string& message) { return InvalidArgument("cross_entropy: " + message); }

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

}  // namespace

Status DescribeCrossEntropy(const TensorView& labels, const TensorView& logits,
                            bool has_ignore_class, int64_t ignore_class, float label_smoothing,
                            float z_loss, float soft_cap, const TensorView* const (&per_token)[3],
                            CrossEntropyProblem* problem) {
  if (logits.rank < 1) return Error("logits must be [..., classes]; they are a scalar");
  TensorView tokens = logits;
  tokens.dims[--tokens.rank] = 0;
  if (!labels.SameShape(tokens)) {
    return Error("labels are " + ShapeOf(labels) + "; beside logits " + ShapeOf(logits) +
                 " they must be " + ShapeOf(tokens));
  }
  if (labels.dtype != DType::kInt32 && labels.dtype != DType::kInt64) {
    return Error("labels must be int32 or int64");
  }
  for (const TensorView* view : per_token) {
    if (!view->SameShape(tokens) || view->dtype != DType::kFloat32) {
      return Error("loss, its gradient, max and log_sum must be float32 " + ShapeOf(tokens) +
                   "; one is " + ShapeOf(*view));
    }
  }
  if (logits.dim(-1) < 1) {
    return Error("there must be at least one class; logits are " + ShapeOf(logits));
  }
  if (!(label_smoothing >= 0.0f && label_smoothing <= 1.0f)) {
    return Error("label_smoothing must be in [0, 1]");
  }
  // Not above the largest float32: finite, and not NaN.
  if (!(z_loss >= 0.0f && z_loss <= 3.402823466e38f)) {
    return Error("z_loss must be finite and not negative");
  }
  if (!(soft_cap >= 0.0f && soft_cap <= 3.402823466e38f)) {
    return Error("logits_soft_cap must be finite and not negative");
  }
  CrossEntropyProblem& p = *problem;
  p.tokens = tokens.size();
  p.classes = p.all_classes = logits.dim(-1);
  p.span = nullptr;
  p.first_class = 0;
  p.labels32 = labels.dtype == DType::kInt32 ? labels.as<const int32_t>() : nullptr;
  p.labels64 = labels.dtype == DType::kInt64 ? labels.as<const int64_t>() : nullptr;
  p.has_ignore_class = has_ignore_class;
  p.ignore_class = ignore_class;
  p.label_smoothing = label_smoothing;
  p.z_loss = z_loss;
  p.soft_cap = soft_cap;
  return Ok();
}

}  // namespace tf_ops
