// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

#include "cc/common/cpu.h"
#include "cc/paged_attention/paged_attention.h"

namespace tf_ops {
namespace {

// Which keys the queries of a batch row see: a range each.
struct VisibleKeys {
  int64_t length, offset, window_left;

  VisibleKeys(const AttentionProblem& p, int64_t b) : window_left(p.window_left) {
    length = p.key_value_seq_lengths[b];
    length = length < 0 ? 0 : length > p.seq_k ? p.seq_k : length;
    offset = length - p.seq_q;
  }
  int64_t Begin(int64_t i) const {
    const int64_t begin = window_left < 0 ? 0 : i + offset - window_left;
    return begin < 0 ? 0 : begin;
  }
  int64_t End(int64_t i) const { return i + offset + 1; }
};

}  // namespace
}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/paged_attention/paged_attention_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

Status CheckPages(const AttentionProblem& p, const KeyPages& pages) {
  for (int64_t b = 0; b < p.batch && p.seq_q > 0 && p.heads > 0; ++b) {
    const VisibleKeys visible(p, b);
    const int64_t end = visible.End(p.seq_q - 1);
    for (int64_t j = visible.Begin(0) / pages.page_size; j * pages.page_size < end; ++j) {
      const int32_t page = pages.table[b * pages.pages_per_row + j];
      if (page < 0 || page >= pages.pages) {
        return InvalidArgument("paged_attention: page_table[" + std::to_string(b) + ", " +
                               std::to_string(j) + "] is " + std::to_string(page) + "; there are " +
                               std::to_string(pages.pages) + " pages");
      }
    }
  }
  return Ok();
}

}  // namespace

Status PagedAttention(Cpu cpu, TensorView query, TensorView key_pages, TensorView value_pages,
                      TensorView page_table, TensorView key_value_seq_lengths, TensorView sink,
                      float scale, float soft_cap, int64_t window_left, TensorView output,
                      Workspace* workspace) {
  AttentionProblem p;
  KeyPages pages;
  if (Status s =
          DescribePagedAttention(query, key_pages, value_pages, page_table, key_value_seq_lengths,
                                 sink, scale, soft_cap, window_left, output, &p, &pages);
      !s.ok()) {
    return s;
  }
  if (Status s = CheckPages(p, pages); !s.ok()) return s;
  return DispatchType<float, half, bf16>("paged_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    const DecodeParts parts(p, query.dtype, DecodeSplits(p, query.dtype, "CPU"), workspace);
    const auto part = TF_OPS_SIMD(PagedAttentionPart<T>);
    const int64_t cost = (p.head_dim + p.value_dim) * DecodeRows(p) * p.seq_k / 8 / parts.splits;
    cpu.ParallelFor(p.batch * p.kv_heads * parts.splits, cost, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t job = n / parts.splits;
        part(p, pages, parts, job / p.kv_heads, job % p.kv_heads, int(n % parts.splits),
             output.as<T>());
      }
    });
    if (parts.splits == 1) return Ok();
    const auto combine = TF_OPS_SIMD(CombineParts<T>);
    const int64_t combine_cost = parts.splits * p.value_dim / 4;
    cpu.ParallelFor(parts.rows, combine_cost, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) combine(p, parts, row, output.as<T>());
    });
    return Ok();
  });
}

}  // namespace tf_ops
