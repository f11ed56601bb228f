// SPDX-License-Identifier: Apache-2.0
#include "cc/paged_attention/paged_attention.h"

namespace tf_ops {
namespace {

Status Error(const std::string& message) { return InvalidArgument("paged_attention: " + message); }

}  // namespace

Status DescribePagedAttention(const TensorView& query, const TensorView& key_pages,
                              const TensorView& value_pages, const TensorView& page_table,
                              const TensorView& key_value_seq_lengths, const TensorView& sink,
                              float scale, float soft_cap, int64_t window_left,
                              const TensorView& output, AttentionProblem* problem,
                              KeyPages* pages) {
  if (query.rank != 4 || key_pages.rank != 4 || value_pages.rank != 4) {
    return Error("query, key_pages and value_pages must have rank 4");
  }
  const int64_t batch = query.dims[0], page_size = key_pages.dims[1];
  if (key_pages.dims[0] != value_pages.dims[0] || page_size != value_pages.dims[1] ||
      key_pages.dims[2] != value_pages.dims[2]) {
    return Error("key_pages and value_pages must agree but for their last dimension");
  }
  if (page_size < 1) return Error("a page must hold a key at least");
  if (key_pages.dims[3] != query.dims[3]) {
    return Error("the last dimension of key_pages must be the head_dim of query");
  }
  if (page_table.dtype != DType::kInt32 || page_table.rank != 2 || page_table.dims[0] != batch) {
    return Error("page_table must be int32 [batch, pages_per_row]");
  }
  if (key_value_seq_lengths.dtype != DType::kInt32 || key_value_seq_lengths.rank != 1 ||
      key_value_seq_lengths.dims[0] != batch) {
    return Error("key_value_seq_lengths must be int32 [batch]");
  }
  // To what both share, the pages of a row are one sequence.
  const int64_t capacity = page_table.dims[1] * page_size;
  TensorView key = key_pages, value = value_pages, lse = {nullptr, DType::kFloat32, 3};
  key.dims[0] = value.dims[0] = batch;
  key.dims[1] = value.dims[1] = capacity;
  lse.dims = {batch, query.dims[2], query.dims[1]};
  TensorView none = {nullptr, query.dtype, 1}, no_mask = {nullptr, DType::kBool, 1};
  TensorView no_lengths = {nullptr, DType::kInt32, 1}, no_seed = {nullptr, DType::kInt64, 1};
  Status s = DescribeAttention(query, key, value, none, no_mask, no_lengths, key_value_seq_lengths,
                               sink, no_seed, scale, soft_cap, /*is_causal=*/true,
                               /*bottom_right=*/true, window_left, -1, 0.0f, output, lse, problem);
  if (!s.ok()) return s;
  problem->key_value_seq_lengths = key_value_seq_lengths.as<const int32_t>();
  *pages = {page_table.as<const int32_t>(), key_pages.dims[0], page_size, page_table.dims[1]};
  return Ok();
}

void PagedAttentionWorkspace(TensorView query, TensorView key_pages, TensorView value_pages,
                             TensorView page_table, TensorView key_value_seq_lengths,
                             TensorView sink, float scale, float soft_cap, int64_t window_left,
                             Workspace* workspace) {
  TensorView output = query;
  output.dims[3] = value_pages.dims[3];
  AttentionProblem p;
  KeyPages pages;
  const bool ok =
      DescribePagedAttention(query, key_pages, value_pages, page_table, key_value_seq_lengths, sink,
                             scale, soft_cap, window_left, output, &p, &pages)
          .ok();
  if (ok) DecodeParts(p, query.dtype, 1, workspace);
}

}  // namespace tf_ops
