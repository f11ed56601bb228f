// SPDX-License-Identifier: Apache-2.0
// Attention to pages on the CPU, for one instruction set: foreach_isa.h includes it. The queries
// of heads that share a key head are rows, taken by fours; a block of keys is read from memory
// for the first four.

constexpr int kPageBlock = 64;  // keys; 64 of 128 bfloat16, and their values, fit the first cache
constexpr int kPageRows = 16;   // of one query at a time

// Of each of kPageRows rows: query and output, padded with zeros, the largest score and the sum
// of the exponentials.
struct PageRows {
  float query[kPageRows][kMaxHeadDim];
  float output[kPageRows][kMaxHeadDim];
  float max[kPageRows], total[kPageRows];
};

// `count` keys to kRows rows from `row` on.
template <typename T, int kRows>
TF_OPS_INLINE void AttendToBlock(const AttentionProblem& p, const T* const* keys,
                                 const T* const* values, int count, int row, PageRows* rows) {
  float s[kRows][kPageBlock];
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);
  for (int j = 0; j < count; ++j) {
    Floats sums[kRows] = {};
    for (int d = 0; d < head_dim; d += kLanes) {
      const int left = head_dim - d;
      const Floats k = left >= kLanes ? Load(keys[j] + d) : LoadPartial(keys[j] + d, left);
      for (int r = 0; r < kRows; ++r) sums[r] += Load(rows->query[row + r] + d) * k;
    }
    for (int r = 0; r < kRows; ++r) s[r][j] = ReduceSum(sums[r]);
  }
  float scale[kRows];
  for (int r = 0; r < kRows; ++r) {
    for (int j = count; j < kPageBlock; ++j) s[r][j] = 0.0f;
    float max = rows->max[row + r];
    for (int j = 0; j < kPageBlock; j += kLanes) {
      Floats x = Load(s[r] + j) * p.scale;
      if (p.soft_cap > 0.0f) x = p.soft_cap * Tanh(x / p.soft_cap);
      Store(s[r] + j, x);
    }
    for (int j = count; j < kPageBlock; ++j) s[r][j] = -INFINITY;
    for (int j = 0; j < kPageBlock; j += kLanes) {
      const float largest = ReduceMax(Load(s[r] + j));
      max = largest > max ? largest : max;
    }
    const float base = max == -INFINITY ? 0.0f : max;
    scale[r] = Exp(Set(rows->max[row + r] - base))[0];
    rows->max[row + r] = max;
    Floats total = {};
    for (int j = 0; j < kPageBlock; j += kLanes) {
      const Floats e = Exp(Load(s[r] + j) - base);
      Store(s[r] + j, e);
      total += e;
    }
    rows->total[row + r] = rows->total[row + r] * scale[r] + ReduceSum(total);
  }
  for (int d = 0; d < value_dim; d += kLanes) {
    const int left = value_dim - d;
    Floats o[kRows];
    for (int r = 0; r < kRows; ++r) o[r] = Load(rows->output[row + r] + d) * scale[r];
    for (int j = 0; j < count; ++j) {
      const Floats v = left >= kLanes ? Load(values[j] + d) : LoadPartial(values[j] + d, left);
      for (int r = 0; r < kRows; ++r) o[r] += s[r][j] * v;
    }
    for (int r = 0; r < kRows; ++r) Store(rows->output[row + r] + d, o[r]);
  }
}

// A row of the output: `sums` and `total` are relative to exp(max).
template <typename T>
TF_OPS_INLINE void StorePageRow(const AttentionProblem& p, int64_t row, float max, float total,
                                const float* sums, T* output) {
  float factor = total == 0.0f ? 0.0f : 1.0f;
  if (p.sink) {
    const float sink = p.sink[row % p.heads], larger = sink > max ? sink : max;
    const float base = larger == -INFINITY ? 0.0f : larger;
    const Floats scale = Exp(Set(max - base));
    factor *= scale[0];
    total = total * scale[0] + Exp(Set(sink - base))[0];
  }
  const bool empty = factor == 0.0f;
  factor = empty ? 0.0f : factor / total;
  for (int d = 0; d < p.value_dim; d += kLanes) {
    const int left = int(p.value_dim) - d;
    const Floats x = empty ? Floats{} : Load(sums + d) * factor;
    T* const to = output + row * p.value_dim + d;
    left >= kLanes ? Store(to, x) : StorePartial(to, x, left);
  }
}

// Part `split` of the keys of a batch row and key head, for all queries.
template <typename T>
void PagedAttentionPart(const AttentionProblem& p, const KeyPages& pages, const DecodeParts& parts,
                        int64_t b, int64_t kv_head, int split, T* output) {
  PageRows rows;
  const int64_t group = p.heads / p.kv_heads;
  const VisibleKeys visible(p, b);
  for (int64_t i = 0; i < p.seq_q; ++i) {
    const int64_t first = visible.Begin(i), last = visible.End(i);
    const int64_t blocks = last > first ? (last - first + kPageBlock - 1) / kPageBlock : 0;
    const int64_t begin = first + blocks * split / parts.splits * kPageBlock;
    const int64_t part_end = first + blocks * (split + 1) / parts.splits * kPageBlock;
    const int64_t end = part_end < last ? part_end : last;
    for (int64_t h0 = 0; h0 < group; h0 += kPageRows) {
      const int count = int(group - h0 < kPageRows ? group - h0 : kPageRows);
      const int64_t output_row = (b * p.seq_q + i) * p.heads + kv_head * group + h0;
      for (int r = 0; r < count; ++r) {
        const T* const query = static_cast<const T*>(p.query) + (output_row + r) * p.head_dim;
        for (int d = 0; d < kMaxHeadDim; ++d) {
          rows.query[r][d] = d < p.head_dim ? float(query[d]) : 0.0f;
          rows.output[r][d] = 0.0f;
        }
        rows.max[r] = -INFINITY;
        rows.total[r] = 0.0f;
      }
      for (int64_t j0 = begin; j0 < end; j0 += kPageBlock) {
        const int keys = int(end - j0 < kPageBlock ? end - j0 : kPageBlock);
        const T *key[kPageBlock], *value[kPageBlock];
        for (int j = 0; j < keys; ++j) {
          const int64_t page = pages.table[b * pages.pages_per_row + (j0 + j) / pages.page_size];
          const int64_t row =
              (page * pages.page_size + (j0 + j) % pages.page_size) * p.kv_heads + kv_head;
          key[j] = static_cast<const T*>(p.key) + row * p.head_dim;
          value[j] = static_cast<const T*>(p.value) + row * p.value_dim;
        }
        int r = 0;
        for (; r + 4 <= count; r += 4) AttendToBlock<T, 4>(p, key, value, keys, r, &rows);
        for (; r < count; ++r) AttendToBlock<T, 1>(p, key, value, keys, r, &rows);
      }
      for (int r = 0; r < count; ++r) {
        const int64_t row = output_row + r;
        if (parts.splits == 1) {
          StorePageRow(p, row, rows.max[r], rows.total[r], rows.output[r], output);
          continue;
        }
        const int64_t at = split * parts.rows + row;
        parts.stats[2 * at] = rows.max[r];
        parts.stats[2 * at + 1] = rows.total[r];
        __builtin_memcpy(parts.sums + at * parts.stride, rows.output[r],
                         p.value_dim * sizeof(float));
      }
    }
  }
}

// A row of the output from its parts.
template <typename T>
void CombineParts(const AttentionProblem& p, const DecodeParts& parts, int64_t row, T* output) {
  float sums[kMaxHeadDim] = {};
  float max = -INFINITY, total = 0.0f;
  for (int s = 0; s < parts.splits; ++s) {
    const float x = parts.stats[2 * (s * parts.rows + row)];
    max = x > max ? x : max;
  }
  const float base = max == -INFINITY ? 0.0f : max;
  for (int s = 0; s < parts.splits; ++s) {
    const int64_t at = s * parts.rows + row;
    const float scale = Exp(Set(parts.stats[2 * at] - base))[0];
    total += scale * parts.stats[2 * at + 1];
    for (int d = 0; d < p.value_dim; ++d) sums[d] += scale * parts.sums[at * parts.stride + d];
  }
  StorePageRow(p, row, max, total, sums, output);
}
