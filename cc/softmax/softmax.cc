// SPDX-License-Identifier: Apache-2.0
#include "cc/softmax/softmax.h"

namespace tf_ops {
namespace {

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

}  // namespace

Status DescribeMaskedSoftmax(const TensorView& x, const TensorView& mask, const TensorView& y,
                             RowMask* row_mask) {
  const auto error = [](const std::string& message) {
    return InvalidArgument("masked_softmax: " + message);
  };
  if (x.rank < 1) return error("x must be [..., cols]; it is a scalar");
  if (!y.SameShapeAndDType(x)) return error("y must have the shape and dtype of x");
  *row_mask = {};
  if (!mask.present()) return Ok();
  if (mask.dtype != DType::kBool) return error("mask must be bool");
  bool fits = mask.rank <= x.rank;
  for (int i = 1; fits && i <= mask.rank; ++i) {
    fits = mask.dim(-i) == 1 || mask.dim(-i) == x.dim(-i);
  }
  if (!fits) return error("mask is " + ShapeOf(mask) + "; it must broadcast to x, " + ShapeOf(x));

  RowMask& m = *row_mask;
  m.data = mask.as<const bool>();
  m.per_row = mask.rank == 0 || mask.dim(-1) == 1;
  int64_t stride = m.per_row ? 1 : mask.dim(-1);
  // From the last dimension to the first, which is the reverse of the order they are kept in.
  for (int i = 2; i <= x.rank; ++i) {
    const int64_t dim = x.dim(-i), mask_dim = i <= mask.rank ? mask.dim(-i) : 1;
    const int64_t step = mask_dim == 1 ? 0 : stride;
    stride *= mask_dim;
    if (dim == 1) continue;
    const int last = m.rank - 1;
    if (last >= 0 && step == m.strides[last] * m.dims[last]) {
      m.dims[last] *= dim;
    } else {
      m.dims[m.rank] = dim;
      m.strides[m.rank++] = step;
    }
  }
  for (int i = 0, j = m.rank - 1; i < j; ++i, --j) {
    std::swap(m.dims[i], m.dims[j]);
    std::swap(m.strides[i], m.strides[j]);
  }
  return Ok();
}

Status CheckMaskedSoftmaxGrad(const TensorView& dy, const TensorView& y, const TensorView& dx) {
  if (y.rank < 1) return InvalidArgument("masked_softmax: y must be [..., cols]; it is a scalar");
  if (!dy.SameShapeAndDType(y) || !dx.SameShapeAndDType(y)) {
    return InvalidArgument("masked_softmax: dy, y and dx must be of one shape and dtype");
  }
  return Ok();
}

}  // namespace tf_ops
