// SPDX-License-Identifier: Apache-2.0
#include "cc/rotary/rotary.h"

namespace tf_ops {

constexpr int kPairsAtOnce = RotaryProblem::kMaxPairs;  // whose cosines lie on the stack

}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/rotary/rotary_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

int64_t Position(const RotaryProblem& p, int64_t token) {
  const int64_t row = token / p.seq, at = token % p.seq;
  return p.positions ? p.positions[row * p.position_stride + at] : at;
}

// Before anything is read at a position.
Status CheckPositions(const RotaryProblem& p) {
  if (!p.table_by_position || !p.positions) return Ok();
  const int64_t count = p.position_stride ? p.batch * p.seq : p.seq;
  for (int64_t i = 0; i < count; ++i) {
    if (p.positions[i] < 0 || p.positions[i] >= p.table_rows) {
      return InvalidArgument("rotary_embedding: position " + std::to_string(p.positions[i]) +
                             " is outside the " + std::to_string(p.table_rows) + " rows of cos");
    }
  }
  return Ok();
}

}  // namespace

Status RunRotaryEmbedding(Cpu cpu, const RotaryProblem& p) {
  if (Status s = CheckPositions(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("rotary_embedding", p.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t cost = (p.heads + p.key_heads) * p.head_dim + 5 * p.pairs;
    cpu.ParallelFor(p.batch * p.seq, cost, [&](int64_t begin, int64_t end) {
      const auto rotate = TF_OPS_SIMD(RotaryToken<T>);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t position = Position(p, token);
        const int64_t of_token = token / p.seq * p.table_stride + token % p.seq;
        rotate(p, token, position, p.table_by_position ? position : of_token);
      }
    });
    return Ok();
  });
}

}  // namespace tf_ops
