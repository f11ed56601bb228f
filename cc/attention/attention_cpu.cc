// SPDX-License-Identifier: Apache-2.0
// How attention is divided among threads; the arithmetic is in attention_simd.h. Who does
// what depends on shapes alone and sums have a fixed order, so that results repeat.
#include <initializer_list>
#include <limits>

#include "cc/attention/attention.h"
#include "cc/common/cpu.h"

namespace tf_ops {
namespace {

constexpr int kPad = 16;          // the widest vector
constexpr int kMaxQueries = 64;   // of a tile of scores: four of the widest vectors
constexpr int kMaxKeys = 64;      // of a tile of scores
constexpr int kScratch = 61440;   // floats on the stack of a task; the tiles fit a core's cache
constexpr int kFewestTasks = 32;  // below it sums are split, at the cost of memory

constexpr int Padded(int64_t size) { return int((size + kPad - 1) / kPad * kPad); }
constexpr int64_t AtMost(int64_t x, int64_t limit) { return x < limit ? x : limit; }
constexpr int64_t AtLeast(int64_t x, int64_t limit) { return x > limit ? x : limit; }
constexpr int64_t Blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// What a batch row allows: query i < queries sees keys j < keys, j <= i + diagonal.
struct AttentionRow {
  AttentionRow(const AttentionProblem& p, int64_t batch)
      : queries(Length(p.query_seq_lengths, batch, p.seq_q)),
        keys(Length(p.key_value_seq_lengths, batch, p.seq_k)),
        diagonal(!p.is_causal     ? keys
                 : p.bottom_right ? keys - queries
                                  : 0) {}
  static int64_t Length(const int32_t* lengths, int64_t batch, int64_t size) {
    return lengths ? AtLeast(AtMost(lengths[batch], size), 0) : size;
  }
  int64_t queries, keys, diagonal;
};

// How many queries and keys a task holds at once.
struct AttentionBlocks {
  int queries, keys;
};

struct AttentionGradients {
  const void *doutput, *output;
  const float *dlse, *lse;  // dlse may be null
  float* delta;             // [batch, heads, seq_q]
  float* dquery;            // [parts, batch, heads, seq_q, Padded(head_dim)], without the scale
  AttentionBlocks blocks;
  int64_t parts, part_keys;  // the keys are split in so many parts of so many
};

// A tile of dbias is the sum of `terms` tiles of ds, split in `parts`; where the bias
// broadcasts along batch, heads, queries or keys, there is one tile and there are more terms.
struct BiasTiles {
  int64_t tiles, terms, parts;
  int64_t counts[4];  // of batch rows, heads, blocks of queries and of keys
  bool broadcast[4];
  float* partial;  // [tiles, parts, blocks.keys, blocks.queries]

  // The batch row, head and blocks of one term.
  void Locate(int64_t tile, int64_t term, int64_t (&index)[4]) const {
    for (int i = 3; i >= 0; --i) {
      int64_t& rest = broadcast[i] ? term : tile;
      index[i] = rest % counts[i];
      rest /= counts[i];
    }
  }

  // Where the tile begins in dbias and how large it is.
  void Place(const AttentionProblem& p, const AttentionGradients& g, int64_t tile, int64_t* at,
             int* rows, int* keys) const {
    int64_t index[4] = {};
    for (int i = 3; i >= 0; --i) {
      if (broadcast[i]) continue;
      index[i] = tile % counts[i];
      tile /= counts[i];
    }
    index[2] *= g.blocks.queries;
    index[3] *= g.blocks.keys;
    *rows = int(AtMost(p.seq_q - index[2], g.blocks.queries));
    *keys = int(AtMost(p.seq_k - index[3], g.blocks.keys));
    *at = 0;
    for (int i = 0; i < 4; ++i) *at += index[i] * p.bias_strides[i];
  }
};

}  // namespace
}  // namespace tf_ops

#define TF_OPS_SIMD_FILE "cc/attention/attention_simd.h"
#include "cc/common/foreach_isa.h"

namespace tf_ops {
namespace {

AttentionBlocks ForwardBlocks(const AttentionProblem& p) {
  const int dims = Padded(p.head_dim) + Padded(p.value_dim);
  const int keys = dims <= 256 ? kMaxKeys : kMaxKeys / 2;
  const int room = kScratch - keys * (dims + kMaxQueries) - kMaxQueries;
  // The more queries share a block of keys, the better, while there are tasks enough.
  int queries = 4 * kMaxQueries;
  while (queries > kMaxQueries && (queries * (dims + 2) > room ||
                                   p.batch * p.heads * Blocks(p.seq_q, queries) < kFewestTasks)) {
    queries /= 2;
  }
  return {queries, keys};
}

AttentionBlocks GradBlocks(int64_t head_dim, int64_t value_dim) {
  const int dims = Padded(head_dim) + Padded(value_dim);
  const int keys = dims <= 256 ? kMaxKeys : kMaxKeys / 2;
  int queries = kMaxQueries;
  while (2 * keys * dims + queries * (2 * dims + 3 * keys + 2) > kScratch) queries -= kPad;
  return {queries, keys};
}

// Into how many parts to divide `size` pieces of each of `tasks`.
int64_t Parts(int64_t tasks, int64_t size) {
  return AtLeast(AtMost(Blocks(kFewestTasks, AtLeast(tasks, 1)), size), 1);
}

// The bytes of so many floats, a multiple of 64, or the largest number.
int64_t FloatBytes(std::initializer_list<int64_t> dims) {
  int64_t bytes = sizeof(float);
  bool huge = false;
  for (int64_t dim : dims) {
    if (dim <= 0) return 0;
    huge |= __builtin_mul_overflow(bytes, dim, &bytes);
  }
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return huge || bytes > kMost - 63 ? kMost : (bytes + 63) / 64 * 64;
}

int64_t Sum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

bool HaveRankFour(std::initializer_list<TensorView> views) {
  for (const TensorView& view : views) {
    if (view.rank != 4) return false;
  }
  return true;
}

// Sets parts and part_keys.
void DivideKeys(int64_t batch, int64_t kv_heads, int64_t seq_k, AttentionGradients* g) {
  const int64_t blocks = Blocks(seq_k, g->blocks.keys);
  g->part_keys = AtLeast(Blocks(blocks, Parts(batch * kv_heads, blocks)), 1) * g->blocks.keys;
  g->parts = AtLeast(Blocks(seq_k, g->part_keys), 1);
}

BiasTiles DivideBias(const TensorView& query, const TensorView& key, const TensorView& bias,
                     AttentionBlocks blocks) {
  BiasTiles tiles{};
  tiles.tiles = tiles.terms = 1;
  const int64_t counts[4] = {query.dims[0], query.dims[2], Blocks(query.dims[1], blocks.queries),
                             Blocks(key.dims[1], blocks.keys)};
  for (int i = 0; i < 4; ++i) {
    tiles.counts[i] = counts[i];
    tiles.broadcast[i] = bias.dims[i] == 1;
    (tiles.broadcast[i] ? tiles.terms : tiles.tiles) *= counts[i];
  }
  tiles.parts = Parts(tiles.tiles, tiles.terms);
  return tiles;
}

// Cycles for matrix products over [queries, keys], `dims` multiply-adds for each pair.
int64_t Cycles(const AttentionProblem& p, int64_t queries, int64_t keys, int64_t dims) {
  const double cycles = double(queries) * double(keys) * double(dims + 32) / 16;
  return int64_t(cycles / (p.is_causal ? 2 : 1)) + 1000;
}

AttentionGradients DescribeGradients(const AttentionProblem& p, const TensorView& doutput,
                                     const TensorView& dlse, const TensorView& output,
                                     const TensorView& lse, const TensorView& workspace) {
  AttentionGradients g{};
  g.doutput = doutput.data;
  g.output = output.data;
  g.dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  g.lse = lse.as<const float>();
  g.delta = workspace.as<float>();
  g.blocks = GradBlocks(p.head_dim, p.value_dim);
  return g;
}

// What follows the row sums in the workspace.
float* AfterDelta(const AttentionProblem& p, const AttentionGradients& g) {
  return g.delta + FloatBytes({p.batch, p.heads, p.seq_q}) / sizeof(float);
}

Status CheckServed(const AttentionProblem& p) {
  if (p.window_left < 0 && p.window_right <= 0 && !p.sink && !p.dropout_threshold) return Ok();
  return InvalidArgument(
      "dot_product_attention: a window, a sink and dropout are not implemented on the CPU yet");
}

template <typename T>
void ComputeDelta(const Cpu& cpu, const AttentionProblem& p, const AttentionGradients& g) {
  const auto delta = TF_OPS_SIMD(Delta<T>);
  cpu.ParallelFor(p.batch * p.seq_q * p.heads, p.value_dim / 4 + 20,
                  [&](int64_t begin, int64_t end) { delta(p, g, begin, end); });
}

}  // namespace

Status DotProductAttention(Cpu cpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, TensorView workspace) {
  AttentionProblem p;
  if (Status s =
          DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                            sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                            window_right, dropout_rate, output, lse, &p);
      !s.ok()) {
    return s;
  }
  if (Status s = CheckServed(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto task = TF_OPS_SIMD(ForwardTask<T>);
    const AttentionBlocks blocks = ForwardBlocks(p);
    const int64_t rows = AtMost(p.seq_q, blocks.queries);
    cpu.ParallelFor(p.batch * p.heads * Blocks(p.seq_q, blocks.queries),
                    Cycles(p, rows, p.seq_k, p.head_dim + p.value_dim),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                        task(p, blocks, i, output.as<T>(), lse.as<float>());
                      }
                    });
    return Ok();
  });
}

Status DotProductAttentionGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView sink, TensorView seed, TensorView output, TensorView lse,
                               float scale, float soft_cap, bool is_causal, bool bottom_right,
                               int64_t window_left, int64_t window_right, float dropout_rate,
                               TensorView dquery, TensorView dkey, TensorView dvalue,
                               TensorView dsink, TensorView workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, sink, seed, output,
                                       lse, scale, soft_cap, is_causal, bottom_right, window_left,
                                       window_right, dropout_rate, &p);
      !s.ok()) {
    return s;
  }
  if (!dsink.SameShapeAndDType(sink)) {
    return InvalidArgument("dot_product_attention: the gradient of sink must be as sink is");
  }
  if (Status s = CheckServed(p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    AttentionGradients g = DescribeGradients(p, doutput, dlse, output, lse, workspace);
    g.dquery = AfterDelta(p, g);
    DivideKeys(p.batch, p.kv_heads, p.seq_k, &g);
    ComputeDelta<T>(cpu, p, g);
    const auto task = TF_OPS_SIMD(GradTask<T>);
    const int64_t queries = p.kv_heads > 0 ? p.seq_q * (p.heads / p.kv_heads) : 0;
    cpu.ParallelFor(p.batch * p.kv_heads * g.parts,
                    Cycles(p, queries, g.part_keys, 3 * p.head_dim + 2 * p.value_dim),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                        task(p, g, i, dkey.as<T>(), dvalue.as<T>());
                      }
                    });
    const auto sum = TF_OPS_SIMD(SumQueryParts<T>);
    cpu.ParallelFor(p.batch * p.seq_q * p.heads, g.parts * p.head_dim / 4 + 20,
                    [&](int64_t begin, int64_t end) { sum(p, g, begin, end, dquery.as<T>()); });
    return Ok();
  });
}

int64_t DotProductAttentionGradCpuWorkspace(TensorView, TensorView, TensorView query,
                                            TensorView key, TensorView value, TensorView,
                                            TensorView, TensorView, TensorView, TensorView,
                                            TensorView, TensorView, TensorView, float, float, bool,
                                            bool, int64_t, int64_t, float) {
  if (!HaveRankFour({query, key, value})) return 0;
  const int64_t batch = query.dims[0], seq_q = query.dims[1], heads = query.dims[2];
  const int64_t head_dim = query.dims[3], value_dim = value.dims[3];
  if (head_dim > kMaxHeadDim || value_dim > kMaxHeadDim) return 0;
  AttentionGradients g{};
  g.blocks = GradBlocks(head_dim, value_dim);
  DivideKeys(batch, key.dims[2], key.dims[1], &g);
  return Sum(FloatBytes({batch, heads, seq_q}),
             FloatBytes({g.parts, batch, heads, seq_q, Padded(head_dim)}));
}

Status DotProductAttentionBiasGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, TensorView workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, sink, seed, output,
                                       lse, scale, soft_cap, is_causal, bottom_right, window_left,
                                       window_right, dropout_rate, &p);
      !s.ok()) {
    return s;
  }
  if (Status s = CheckServed(p); !s.ok()) return s;
  if (!dbias.SameShapeAndDType(bias)) {
    return InvalidArgument("dot_product_attention: dbias must have the shape of bias");
  }
  if (!bias.present() || dbias.size() == 0) return Ok();
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    AttentionGradients g = DescribeGradients(p, doutput, dlse, output, lse, workspace);
    BiasTiles tiles = DivideBias(query, key, bias, g.blocks);
    tiles.partial = AfterDelta(p, g);
    ComputeDelta<T>(cpu, p, g);
    const auto task = TF_OPS_SIMD(BiasGradTask<T>);
    const int64_t dims = p.head_dim + p.value_dim, terms = tiles.terms / tiles.parts + 1;
    cpu.ParallelFor(tiles.tiles * tiles.parts,
                    terms * Cycles(p, g.blocks.queries, g.blocks.keys, dims),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) task(p, g, tiles, i, dbias.as<T>());
                    });
    if (tiles.parts == 1) return Ok();
    const auto sum = TF_OPS_SIMD(SumBiasParts<T>);
    cpu.ParallelFor(tiles.tiles, tiles.parts * 1000, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sum(p, g, tiles, i, dbias.as<T>());
    });
    return Ok();
  });
}

int64_t DotProductAttentionBiasGradCpuWorkspace(TensorView, TensorView, TensorView query,
                                                TensorView key, TensorView value, TensorView bias,
                                                TensorView, TensorView, TensorView, TensorView,
                                                TensorView, TensorView, TensorView, float, float,
                                                bool, bool, int64_t, int64_t, float) {
  if (!HaveRankFour({query, key, value, bias})) return 0;
  const int64_t head_dim = query.dims[3], value_dim = value.dims[3];
  if (head_dim > kMaxHeadDim || value_dim > kMaxHeadDim) return 0;
  const AttentionBlocks blocks = GradBlocks(head_dim, value_dim);
  const BiasTiles tiles = DivideBias(query, key, bias, blocks);
  const int64_t parts = tiles.parts > 1 ? tiles.parts : 0;
  return Sum(FloatBytes({query.dims[0], query.dims[2], query.dims[1]}),
             FloatBytes({tiles.tiles, parts, blocks.keys, blocks.queries}));
}

}  // namespace tf_ops
