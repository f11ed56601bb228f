// SPDX-License-Identifier: Apache-2.0
// What the two gradient kernels for sm_90a share; attention_sm90_backward.cuh says how they work.
#pragma once

#include "cc/attention/attention_sm90.cuh"

namespace tf_ops {

struct Sm90BackwardArguments {
  AttentionProblem problem;
  Sm90KeyMasks key_masks;
  const float *lse_log2, *delta;  // [batch, heads, padded_queries], the second after the first
  const void* doutput;
  void *dquery, *dkey, *dvalue;
  int padded_queries;
  int row_blocks, tiles, heads_per_group;
};

constexpr int kSm90BackwardThreads = 384;

// Which tile an index is: rows of one head, heads within a group whose data fits in L2.
struct Sm90HeadRows {
  int batch, head, first_row;
  __device__ Sm90HeadRows(const Sm90BackwardArguments& a, int index, int heads, int rows_per_tile,
                          bool backwards) {
    const int batch_heads = int(a.problem.batch) * heads;
    const int group = index / (a.heads_per_group * a.row_blocks);
    const int in_group = min(a.heads_per_group, batch_heads - group * a.heads_per_group);
    const int within = index - group * a.heads_per_group * a.row_blocks;
    const int batch_head = group * a.heads_per_group + within % in_group;
    const int block = within / in_group;
    batch = batch_head / heads;
    head = batch_head % heads;
    first_row = (backwards ? a.row_blocks - 1 - block : block) * rows_per_tile;
  }
};

}  // namespace tf_ops
