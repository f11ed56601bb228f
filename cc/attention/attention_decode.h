// SPDX-License-Identifier: Apache-2.0
// Attention of few queries to many keys, as in generation: the work is to read keys and values
// once. Those of a batch row and key head are split among blocks (on the CPU: tasks), which leave
// unnormalised outputs in the workspace; these are combined in a fixed order. No CUDA header here.
#pragma once

#include <algorithm>

#include "cc/attention/attention.h"
#include "cc/common/tuning.h"

namespace tf_ops {

// Where keys and values are: in pages [pages, page_size, kv_heads, dim], of which batch row b
// has those named in table[b]; without a table in [batch, seq_k, kv_heads, dim].
struct KeyPages {
  const int32_t* table;  // [batch, pages_per_row], or null
  int64_t pages, page_size, pages_per_row;
};

// The queries of all heads that share a key head are rows of one matrix: (query, head).
inline int64_t DecodeRows(const AttentionProblem& p) {
  return p.kv_heads ? p.seq_q * (p.heads / p.kv_heads) : 0;
}

// The rows that a block takes.
inline int DecodeRowTile(const AttentionProblem& p, DType dtype) {
  return dtype != DType::kFloat32 ? 16 : DecodeRows(p) <= 1 ? 1 : 4;
}

// The parts of the keys, such that rounds of blocks are full and parts long: a function of shapes
// alone, for the workspace depends on it, and of no device in particular, for sums are to be the
// same on all.
inline int DecodeHeuristicSplits(const AttentionProblem& p, DType dtype) {
  constexpr int64_t kBlocks = 264;  // two on each of an H200's multiprocessors
  constexpr int64_t kTile = 64;     // keys; about what starting or combining parts takes
  int64_t keys = p.seq_k;
  if (p.window_left >= 0 && p.window_right >= 0) {
    keys = std::min(keys, p.window_left + p.window_right + p.seq_q);
  }
  const int64_t tiles = (keys + kTile - 1) / kTile, row_tile = DecodeRowTile(p, dtype);
  const int64_t jobs = p.batch * p.kv_heads * ((DecodeRows(p) + row_tile - 1) / row_tile);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int64_t splits = 1; splits <= std::min(tiles, kBlocks); ++splits) {
    const int64_t rounds = (jobs * splits + kBlocks - 1) / kBlocks;
    const int64_t cost = rounds * ((tiles + splits - 1) / splits + 1) + (splits > 1);
    if (cost < least) {
      least = cost;
      best = int(splits);
    }
  }
  return best;
}

// The parts that are tried and used, and the most of them, which the workspace holds: the product
// of rows and parts is bounded by the heuristic, so that twice as many are a few megabytes.
inline int DecodeMostSplits(const AttentionProblem& p, DType dtype) {
  const int64_t tiles = std::max<int64_t>((p.seq_k + 63) / 64, 1);
  return int(std::min<int64_t>(tiles, 2 * DecodeHeuristicSplits(p, dtype)));
}
inline int DecodeSplits(const AttentionProblem& p, DType dtype, const char* device) {
  const Tunable tunable = {"attention/decode", device, {"jobs", "rows", "seq_k", "value_dim"}};
  const int heuristic = DecodeHeuristicSplits(p, dtype), most = DecodeMostSplits(p, dtype);
  return int(Choose(tunable, dtype, {p.batch * p.kv_heads, DecodeRows(p), p.seq_k, p.value_dim},
                    heuristic, {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 66, 88, 132, 264},
                    [&](int64_t n) { return n >= 1 && n <= most && 4 * n >= heuristic; }));
}

// What the parts leave, of each row of the output: sums [splits, rows, stride] of values, and
// stats [splits, rows], the largest score and the sum of the exponentials.
struct DecodeParts {
  int splits;
  int64_t rows, stride;
  float* sums;
  float* stats;  // pairs

  // The memory is that of the most parts, for another number may be chosen between the call for
  // the workspace and the launch.
  DecodeParts(const AttentionProblem& p, DType dtype, int splits, Workspace* workspace)
      : splits(splits), rows(p.batch * p.seq_q * p.heads), stride((p.value_dim + 3) / 4 * 4) {
    const int64_t most = DecodeMostSplits(p, dtype);
    sums = most > 1 ? workspace->Take<float>("sums", {most, rows, stride}) : nullptr;
    stats = most > 1 ? workspace->Take<float>("stats", {most, rows, 2}) : nullptr;
  }
};

// Whether these kernels serve a contiguous cache: to queries that one block can take, a key that
// several heads share is read once, and the keys are long enough to be split. A function of
// shapes and attributes.
inline bool ServesDecode(const AttentionProblem& p, DType dtype) {
  if (p.bias || p.mask || p.dropout_threshold) return false;
  return p.seq_q <= (dtype == DType::kFloat32 ? 4 : 16) && p.seq_k >= 256;
}

// The kernels of one type; instances/*_decode.cu. Neither bias, mask nor dropout is served. lse
// may be null. A page that a query sees and that is none makes its output NaN.
template <typename T>
Status DecodeAttention(Gpu gpu, const AttentionProblem& p, const KeyPages& pages, T* output,
                       float* lse, Workspace* workspace);

}  // namespace tf_ops
