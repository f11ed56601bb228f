// SPDX-License-Identifier: Apache-2.0
#include "cc/cross_entropy/linear_cross_entropy.h"

namespace tf_ops {
namespace {

Status Error(const std::string& message) {
  return InvalidArgument("linear_cross_entropy: " + message);
}

bool IsSpan(const TensorView& span) {
  return span.dtype == DType::kInt64 && span.rank == 1 && span.dims[0] == 2;
}

// alignas(16): TensorFlow's and XLA's memory is, but for a slice.
bool IsSums(const TensorView& sums, int64_t tokens) {
  return sums.dtype == DType::kFloat32 && sums.rank == 2 && sums.dims[0] == tokens &&
         sums.dims[1] == 4 && reinterpret_cast<uintptr_t>(sums.data) % alignof(BlockSums) == 0;
}

}  // namespace

Status DescribeBlockSums(const TensorView& labels, const TensorView& logits, const TensorView& span,
                         const TensorView& sums, bool has_ignore_class, int64_t ignore_class,
                         float label_smoothing, float soft_cap, const TensorView& new_sums,
                         CrossEntropyProblem* problem) {
  TensorView per_token = labels;
  per_token.dtype = DType::kFloat32;
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               0.0f, soft_cap, {&per_token, &per_token, &per_token}, problem);
      !s.ok()) {
    return s;
  }
  if (logits.rank != 2) return Error("logits must be [tokens, classes of the block]");
  if (!IsSpan(span)) return Error("span must be int64 [2]");
  if (!IsSums(sums, problem->tokens) || !IsSums(new_sums, problem->tokens)) {
    return Error("sums must be float32 [tokens, 4], aligned to 16 bytes");
  }
  problem->span = span.as<const int64_t>();
  return Ok();
}

Status DescribeBlockGrad(const TensorView& dloss, const TensorView& labels,
                         const TensorView& logits, const TensorView& span, const TensorView& max,
                         const TensorView& log_sum, bool has_ignore_class, int64_t ignore_class,
                         float label_smoothing, float z_loss, float soft_cap,
                         const TensorView& dlogits, CrossEntropyProblem* problem) {
  if (Status s =
          DescribeCrossEntropy(labels, logits, has_ignore_class, ignore_class, label_smoothing,
                               z_loss, soft_cap, {&dloss, &max, &log_sum}, problem);
      !s.ok()) {
    return s;
  }
  if (logits.rank != 2) return Error("logits must be [tokens, classes of the block]");
  if (!IsSpan(span)) return Error("span must be int64 [2]");
  if (!dlogits.SameShapeAndDType(logits)) return Error("dlogits must be as logits");
  problem->span = span.as<const int64_t>();
  return Ok();
}

Status CheckHiddenGrad(const TensorView& sum, const TensorView& rest, const TensorView& addend,
                       const TensorView& new_sum, const TensorView& new_rest) {
  const bool split = sum.dtype == DType::kBFloat16;
  if ((sum.dtype != DType::kFloat32 && !split) || !addend.SameShape(sum) ||
      !new_sum.SameShapeAndDType(sum)) {
    return Error("sum and addend must be of one shape, the sum float32 or bfloat16");
  }
  if (rest.dtype != DType::kUInt8 || !new_rest.SameShapeAndDType(rest) ||
      (split ? rest.size() != 2 * sum.size() : rest.present())) {
    return Error("rest must be uint8, two for each element of a bfloat16 sum and else none");
  }
  return Ok();
}

Status DescribeKernelGrad(const TensorView& whole, const TensorView& block, const TensorView& span,
                          bool transpose_kernel, const TensorView& new_whole,
                          KernelGradProblem* problem) {
  const int classes = transpose_kernel ? 0 : 1, features = 1 - classes;
  if (whole.rank != 2 || block.rank != 2 || block.dims[features] != whole.dims[features] ||
      block.dims[classes] > whole.dims[classes] || !new_whole.SameShapeAndDType(whole)) {
    return Error(
        "the gradient of a block must have the features of the whole and not more classes");
  }
  if (!IsSpan(span)) return Error("span must be int64 [2]");
  *problem = {whole.dims[0], whole.dims[1], block.dims[1], 1,
              whole.dims[classes] - block.dims[classes]};
  if (transpose_kernel) {
    *problem = {1, whole.size(), block.size(), whole.dims[1], problem->last};
  }
  return Ok();
}

}  // namespace tf_ops
