// SPDX-License-Identifier: Apache-2.0
// Choices of kernels that have more than one configuration. A launcher asks for one:
//
//   constexpr Tunable kThreads = {"cross_entropy/forward", "GPU", {"tokens", "classes"}};
//   const int64_t threads = Choose(kThreads, dtype, {p.tokens, p.classes}, heuristic,
//                                  {32, 256, 1024}, [&](int64_t n) { return n <= most; });
//
// Without tuning that is the heuristic, always the same. tf_ops/tuning.py listens to what a call
// asks, measures the values, and hands a table over. That table may change between the calls for
// a workspace and a launch: a workspace must do for every legal value.
// Plain C++17; no TensorFlow, XLA or CUDA header may be included here.
#pragma once

#include <functional>
#include <initializer_list>

#include "cc/common/tensor_view.h"

namespace tf_ops {

struct Tunable {
  const char* name;    // family/kernel
  const char* device;  // CPU or GPU
  const char* sizes[4];
};

// The value for these sizes, of which powers of two are told apart. `legal` says which values,
// for exactly these sizes, give the right result and are worth a trial; a stored value that it
// refuses is not used.
int64_t Choose(const Tunable& tunable, DType dtype, std::initializer_list<int64_t> sizes,
               int64_t heuristic, std::initializer_list<int64_t> values,
               const std::function<bool(int64_t)>& legal);

}  // namespace tf_ops
