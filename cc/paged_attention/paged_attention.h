// SPDX-License-Identifier: Apache-2.0
// Attention to keys and values that are kept in pages, for inference:
//
//   o_i = sum over visible j of exp(s_ij - lse_i) v_j,   s_ij = cap(scale q_i . k_j)
//
// with cap, scale, the sink's part in lse, and visibility those of cc/attention/attention.h,
// causal and bottom right: the last query sees the last key. Key j of batch row b is row
// j % page_size of page page_table[b, j / page_size].
//
// Shapes: query [batch, seq_q, heads, head_dim], key_pages [pages, page_size, kv_heads,
// head_dim], value_pages [pages, page_size, kv_heads, value_dim], output [batch, seq_q, heads,
// value_dim], of one dtype (float32, float16, bfloat16); page_table int32 [batch,
// pages_per_row]; key_value_seq_lengths int32 [batch], clamped into [0, pages_per_row
// page_size]; sink float32 [heads], or [0]. Rows may share pages.
//
// Table entries whose keys no query sees are not looked at. Among the others one that names no
// page is an error on the CPU; on the GPU nothing is read for it, and the queries that see it
// have NaN as output.
#pragma once

#include "cc/attention/attention_decode.h"

namespace tf_ops {

Status PagedAttention(Cpu cpu, TensorView query, TensorView key_pages, TensorView value_pages,
                      TensorView page_table, TensorView key_value_seq_lengths, TensorView sink,
                      float scale, float soft_cap, int64_t window_left, TensorView output,
                      Workspace* workspace);
Status PagedAttention(Gpu gpu, TensorView query, TensorView key_pages, TensorView value_pages,
                      TensorView page_table, TensorView key_value_seq_lengths, TensorView sink,
                      float scale, float soft_cap, int64_t window_left, TensorView output,
                      Workspace* workspace);
void PagedAttentionWorkspace(TensorView query, TensorView key_pages, TensorView value_pages,
                             TensorView page_table, TensorView key_value_seq_lengths,
                             TensorView sink, float scale, float soft_cap, int64_t window_left,
                             Workspace* workspace);

// Checks what the launchers take, all but the table's entries, and describes it.
Status DescribePagedAttention(const TensorView& query, const TensorView& key_pages,
                              const TensorView& value_pages, const TensorView& page_table,
                              const TensorView& key_value_seq_lengths, const TensorView& sink,
                              float scale, float soft_cap, int64_t window_left,
                              const TensorView& output, AttentionProblem* problem, KeyPages* pages);

}  // namespace tf_ops
