// SPDX-License-Identifier: Apache-2.0
// The workspace of one call of an op. The op's size function and its launcher take the same
// pieces of it, best by the same lines:
//
//   float* sums = workspace->Take<float>("sums", {parts, cols});
//
// The first is given one without memory and thereby counts, the second one with as much memory
// as that. No TensorFlow, XLA or CUDA header here.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include "cc/common/tensor_view.h"

namespace tf_ops {

// TF_OPS_DEBUG_MEMORY=1: memory that a launcher is to write is NaN before, and what lies around
// the pieces of its workspace is looked at after.
inline bool DebugMemory() {
  static const bool debug = [] {
    const char* value = std::getenv("TF_OPS_DEBUG_MEMORY");
    return value && value[0] == '1';
  }();
  return debug;
}

class Workspace {
 public:
  struct Piece {
    const char* name;
    int64_t begin, end;  // bytes from the start of the memory
  };

  // Pieces begin at what `Device` reads in one go: a cache line, or a transaction of the GPU.
  template <typename Device>
  static constexpr int64_t kAlignment = std::is_same_v<Device, Cpu> ? 64 : 256;

  Workspace(int64_t alignment, void* memory)
      : alignment_(alignment),
        memory_(static_cast<char*>(memory)),
        end_(-reinterpret_cast<intptr_t>(memory) & (alignment - 1)),
        start_(end_) {}

  // Null where there is no memory or a dimension is 0.
  template <typename T>
  T* Take(const char* name, std::initializer_list<int64_t> dims) {
    int64_t bytes = sizeof(T), begin, end;
    bool overflow = false;
    for (int64_t dim : dims) {
      if (dim <= 0) return nullptr;
      overflow |= __builtin_mul_overflow(bytes, dim, &bytes);
    }
    const int64_t aside = guard() + alignment_ - 1;
    overflow |= __builtin_add_overflow(end_, aside, &begin);
    begin = start_ + (begin - start_) / alignment_ * alignment_;
    overflow |= __builtin_add_overflow(begin, bytes, &end);
    if (overflow || too_large_) {
      too_large_ = true;
      return nullptr;
    }
    end_ = end;
    pieces_.push_back({name, begin, end});
    return memory_ ? reinterpret_cast<T*>(memory_ + begin) : nullptr;
  }

  // What to allocate, at any address; the largest number if that is too large for one.
  int64_t bytes() const {
    if (pieces_.empty() && !too_large_) return 0;
    int64_t bytes;
    const bool overflow = __builtin_add_overflow(end_ - start_, guard() + alignment_, &bytes);
    return overflow || too_large_ ? std::numeric_limits<int64_t>::max() : bytes;
  }
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  // Bytes before, between and after the pieces that belong to none.
  int64_t guard() const { return DebugMemory() ? alignment_ : 0; }

  const int64_t alignment_;
  char* const memory_;
  int64_t end_;
  const int64_t start_;  // the first aligned byte
  bool too_large_ = false;
  std::vector<Piece> pieces_;
};

}  // namespace tf_ops
