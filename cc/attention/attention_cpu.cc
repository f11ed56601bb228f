// SPDX-License-Identifier: Apache-2.0
// How attention is divided among threads; the arithmetic is in attention_simd.h. Who does
// what depends on shapes alone and sums have a fixed order, so that results repeat.
#include <initializer_list>

#include "cc/attention/attention.h"
#include "cc/attention/attention_dropout.h"
#include "cc/common/cpu.h"

namespace tf_ops {
namespace {

constexpr int kPad = 16;          // the widest vector
constexpr int kMaxQueries = 64;   // of a tile of scores: four of the widest vectors
constexpr int kMaxKeys = 64;      // of a tile of scores: the bits of a word
constexpr int kMaxKeyBlocks = 3;  // of a task at once; more save little
constexpr int kScratch = 65536;   // floats on the stack of a task; the tiles fit a core's cache
constexpr int kFewestTasks = 16;  // below it sums are split, at the cost of memory
constexpr int64_t kPackedFloats = 1 << 24;  // at once, unless the tasks are too few
constexpr int kFewestReaders = 4;           // of a block of keys that is packed before

constexpr int Padded(int64_t size) { return int((size + kPad - 1) / kPad * kPad); }
constexpr int64_t AtMost(int64_t x, int64_t limit) { return x < limit ? x : limit; }
constexpr int64_t AtLeast(int64_t x, int64_t limit) { return x > limit ? x : limit; }
constexpr int64_t Blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// What a batch row allows: query i < queries sees keys j < keys, low <= j - i <= high.
struct AttentionRow {
  AttentionRow(const AttentionProblem& p, int64_t batch)
      : queries(Length(p.query_seq_lengths, batch, p.seq_q)),
        keys(Length(p.key_value_seq_lengths, batch, p.seq_k)) {
    const int64_t offset = p.bottom_right ? keys - queries : 0;
    low = p.window_left < 0 ? -queries : offset - p.window_left;
    high = p.window_right < 0 ? keys : offset + p.window_right;
  }
  static int64_t Length(const int32_t* lengths, int64_t batch, int64_t size) {
    return lengths ? AtLeast(AtMost(lengths[batch], size), 0) : size;
  }
  int64_t queries, keys, low, high;
};

// How many queries and keys a tile has, and how many such blocks of keys a task holds at once.
struct AttentionBlocks {
  int queries, keys, key_blocks;
};

// Blocks of keys and values as the forward tasks want them, [key_heads, blocks, block_size], for
// key_heads of all [batch, kv_heads] at a time, from first_key_head on. Without memory, where
// few tasks share them, each task packs them for itself.
struct PackedKeys {
  int64_t blocks, block_size, key_heads, first_key_head;
  float* memory;
};

struct AttentionGradients {
  const void *doutput, *output;
  const float *dlse, *lse;  // dlse may be null
  AttentionBlocks blocks;
  float* dquery;             // [parts, batch, heads, seq_q, Padded(head_dim)], without the scale
  int64_t parts, part_keys;  // the keys are split in so many parts of so many
  // Blocks of queries as the tasks want them, for key_heads of all [batch, kv_heads] at a time,
  // from first_key_head on: [key_heads, heads / kv_heads, query_blocks, query_block_size].
  float* queries;
  int64_t query_blocks, query_block_size, key_heads, first_key_head;
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
  return {queries, keys, 1};
}

PackedKeys DivideKeys(const AttentionProblem& p, AttentionBlocks blocks) {
  PackedKeys packed{};
  packed.key_heads = p.batch * p.kv_heads;
  const int64_t readers =
      p.kv_heads > 0 ? p.heads / p.kv_heads * Blocks(p.seq_q, blocks.queries) : 0;
  if (readers < kFewestReaders || p.seq_q < kMaxQueries) return packed;
  packed.blocks = Blocks(p.seq_k, blocks.keys);
  packed.block_size = blocks.keys * (Padded(p.head_dim) + Padded(p.value_dim)) + kPad;
  const int64_t size = AtLeast(packed.blocks * packed.block_size, 1);
  packed.key_heads =
      AtMost(AtLeast(kPackedFloats / size, Blocks(kFewestTasks, readers)), packed.key_heads);
  return packed;
}

// The gradients hold two operands and two sums for each block of keys, and three tiles.
AttentionBlocks GradBlocks(int64_t head_dim, int64_t value_dim) {
  const int dims = Padded(head_dim) + Padded(value_dim);
  const int room = kScratch / (2 * dims + 3 * kMaxQueries) / kPad * kPad;
  const int keys = room < kMaxKeys ? room : kMaxKeys;
  const int blocks = (kScratch - 3 * keys * kMaxQueries) / (2 * keys * dims + 1);
  return {kMaxQueries, keys, blocks < kMaxKeyBlocks ? blocks : kMaxKeyBlocks};
}

// The bias gradient holds two operands, a block of queries, and four tiles.
AttentionBlocks BiasGradBlocks(int64_t head_dim, int64_t value_dim) {
  const int dims = Padded(head_dim) + Padded(value_dim);
  const int keys = dims <= 256 ? kMaxKeys : kMaxKeys / 2;
  const int queries = (kScratch - keys * dims - kPad) / (2 * dims + 4 * keys + 2) / kPad * kPad;
  return {queries < kMaxQueries ? queries : kMaxQueries, keys, 1};
}

// The floats of a packed block of queries.
int64_t QueryBlockSize(int64_t rows, int64_t head_dim, int64_t value_dim) {
  return rows * (Padded(head_dim) + Padded(value_dim)) + Padded(rows) * (head_dim + value_dim + 2) +
         kPad;
}

// Into how many parts to divide `size` pieces of each of `tasks`.
int64_t Parts(int64_t tasks, int64_t size) {
  return AtLeast(AtMost(Blocks(kFewestTasks, AtLeast(tasks, 1)), size), 1);
}

bool HaveRankFour(std::initializer_list<TensorView> views) {
  for (const TensorView& view : views) {
    if (view.rank != 4) return false;
  }
  return true;
}

// The division of the gradients, from shapes alone; the rest is left empty.
AttentionGradients DivideGradients(const TensorView& query, const TensorView& key,
                                   const TensorView& value) {
  const int64_t seq_q = query.dims[1], seq_k = key.dims[1];
  const int64_t key_heads = key.dims[0] * key.dims[2];
  AttentionGradients g{};
  g.blocks = GradBlocks(query.dims[3], value.dims[3]);
  const int64_t blocks = Blocks(seq_k, g.blocks.keys);
  g.part_keys = AtLeast(Blocks(blocks, Parts(key_heads, blocks)), 1) * g.blocks.keys;
  g.parts = AtLeast(Blocks(seq_k, g.part_keys), 1);
  g.query_blocks = Blocks(seq_q, g.blocks.queries);
  g.query_block_size =
      QueryBlockSize(AtMost(seq_q, g.blocks.queries), query.dims[3], value.dims[3]);
  const int64_t group = key.dims[2] > 0 ? query.dims[2] / key.dims[2] : 0;
  const int64_t size = AtLeast(group * g.query_blocks * g.query_block_size, 1);
  g.key_heads = AtMost(AtLeast(kPackedFloats / size, Blocks(kFewestTasks, g.parts)), key_heads);
  return g;
}

float* TakeKeys(const PackedKeys& packed, Workspace* workspace) {
  return workspace->Take<float>("keys", {packed.key_heads, packed.blocks, packed.block_size});
}

void TakeQueries(const TensorView& query, int64_t kv_heads, Workspace* workspace,
                 AttentionGradients* g) {
  const int64_t batch = query.dims[0], seq_q = query.dims[1], heads = query.dims[2];
  g->dquery =
      workspace->Take<float>("dquery", {g->parts, batch, heads, seq_q, Padded(query.dims[3])});
  const int64_t group = kv_heads > 0 ? heads / kv_heads : 0;
  g->queries = workspace->Take<float>("queries",
                                      {g->key_heads, group, g->query_blocks, g->query_block_size});
}

float* TakePartial(const BiasTiles& tiles, const AttentionBlocks& blocks, Workspace* workspace) {
  const int64_t parts = tiles.parts > 1 ? tiles.parts : 0;
  return workspace->Take<float>("partial", {tiles.tiles, parts, blocks.keys, blocks.queries});
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
  const double window = double(p.window_left < 0 ? keys : p.window_left) +
                        double(p.window_right < 0 ? keys : p.window_right) + double(queries);
  const double seen = p.is_causal && p.window_left < 0 ? double(keys) / 2 : double(keys);
  return int64_t(double(queries) * (seen < window ? seen : window) * double(dims + 32) / 16) + 1000;
}

void SetGradients(const TensorView& doutput, const TensorView& dlse, const TensorView& output,
                  const TensorView& lse, AttentionGradients* g) {
  g->doutput = doutput.data;
  g->output = output.data;
  g->dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  g->lse = lse.as<const float>();
}

}  // namespace

Status DotProductAttention(Cpu cpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, Workspace* workspace) {
  AttentionProblem p;
  if (Status s =
          DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                            sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                            window_right, dropout_rate, output, lse, &p);
      !s.ok()) {
    return s;
  }
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto pack = TF_OPS_SIMD(PackKeysTask<T>);
    const auto task = TF_OPS_SIMD(ForwardTask<T>);
    const AttentionBlocks blocks = ForwardBlocks(p);
    PackedKeys packed = DivideKeys(p, blocks);
    packed.memory = TakeKeys(packed, workspace);
    const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
    const int64_t dims = p.head_dim + p.value_dim;
    for (int64_t all = p.batch * p.kv_heads; packed.first_key_head < all;
         packed.first_key_head += packed.key_heads) {
      const int64_t key_heads = AtMost(all - packed.first_key_head, packed.key_heads);
      cpu.ParallelFor(key_heads * packed.blocks, packed.block_size / 2,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) pack(p, blocks, packed, i);
                      });
      cpu.ParallelFor(key_heads * group * Blocks(p.seq_q, blocks.queries),
                      Cycles(p, AtMost(p.seq_q, blocks.queries), p.seq_k, dims),
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) {
                          task(p, blocks, packed, i, output.as<T>(), lse.as<float>());
                        }
                      });
    }
    return Ok();
  });
}

void DotProductAttentionCpuWorkspace(TensorView query, TensorView key, TensorView value, TensorView,
                                     TensorView, TensorView, TensorView, TensorView, TensorView,
                                     float, float, bool, bool, int64_t, int64_t, float,
                                     Workspace* workspace) {
  if (!HaveRankFour({query, key, value})) return;
  if (query.dims[3] > kMaxHeadDim || value.dims[3] > kMaxHeadDim) return;
  AttentionProblem p{};
  p.batch = query.dims[0];
  p.heads = query.dims[2];
  p.kv_heads = key.dims[2];
  p.seq_q = query.dims[1];
  p.seq_k = key.dims[1];
  p.head_dim = query.dims[3];
  p.value_dim = value.dims[3];
  TakeKeys(DivideKeys(p, ForwardBlocks(p)), workspace);
}

Status DotProductAttentionGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView sink, TensorView seed, TensorView output, TensorView lse,
                               float scale, float soft_cap, bool is_causal, bool bottom_right,
                               int64_t window_left, int64_t window_right, float dropout_rate,
                               TensorView dquery, TensorView dkey, TensorView dvalue,
                               TensorView dsink, Workspace* workspace) {
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
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    AttentionGradients g = DivideGradients(query, key, value);
    SetGradients(doutput, dlse, output, lse, &g);
    TakeQueries(query, p.kv_heads, workspace, &g);
    const auto pack = TF_OPS_SIMD(PackTask<T>);
    const auto task = TF_OPS_SIMD(GradTask<T>);
    const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
    for (int64_t all = p.batch * p.kv_heads; g.first_key_head < all;
         g.first_key_head += g.key_heads) {
      const int64_t key_heads = AtMost(all - g.first_key_head, g.key_heads);
      cpu.ParallelFor(key_heads * group * g.query_blocks, g.query_block_size / 2,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) pack(p, g, i);
                      });
      cpu.ParallelFor(key_heads * g.parts,
                      Cycles(p, p.seq_q * group, g.part_keys, 3 * p.head_dim + 2 * p.value_dim),
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) {
                          task(p, g, i, dkey.as<T>(), dvalue.as<T>());
                        }
                      });
    }
    const auto sum = TF_OPS_SIMD(SumQueryParts<T>);
    cpu.ParallelFor(p.batch * p.seq_q * p.heads, g.parts * p.head_dim / 4 + 20,
                    [&](int64_t begin, int64_t end) { sum(p, g, begin, end, dquery.as<T>()); });
    if (!p.sink) return Ok();
    const auto sink_task = TF_OPS_SIMD(SinkGradTask<T>);
    cpu.ParallelFor(p.heads, p.batch * p.seq_q * (4 * p.value_dim + 100),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t head = begin; head < end; ++head) {
                        dsink.as<float>()[head] = sink_task(p, g, head);
                      }
                    });
    return Ok();
  });
}

void DotProductAttentionGradCpuWorkspace(TensorView, TensorView, TensorView query, TensorView key,
                                         TensorView value, TensorView, TensorView, TensorView,
                                         TensorView, TensorView, TensorView, TensorView, TensorView,
                                         float, float, bool, bool, int64_t, int64_t, float,
                                         Workspace* workspace) {
  if (!HaveRankFour({query, key, value})) return;
  if (query.dims[3] > kMaxHeadDim || value.dims[3] > kMaxHeadDim) return;
  AttentionGradients g = DivideGradients(query, key, value);
  TakeQueries(query, key.dims[2], workspace, &g);
}

Status DotProductAttentionBiasGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, Workspace* workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, sink, seed, output,
                                       lse, scale, soft_cap, is_causal, bottom_right, window_left,
                                       window_right, dropout_rate, &p);
      !s.ok()) {
    return s;
  }
  if (!dbias.SameShapeAndDType(bias)) {
    return InvalidArgument("dot_product_attention: dbias must have the shape of bias");
  }
  if (!bias.present() || dbias.size() == 0) return Ok();
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    AttentionGradients g{};
    g.blocks = BiasGradBlocks(p.head_dim, p.value_dim);
    g.query_block_size = QueryBlockSize(g.blocks.queries, p.head_dim, p.value_dim);
    SetGradients(doutput, dlse, output, lse, &g);
    BiasTiles tiles = DivideBias(query, key, bias, g.blocks);
    tiles.partial = TakePartial(tiles, g.blocks, workspace);
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

void DotProductAttentionBiasGradCpuWorkspace(TensorView, TensorView, TensorView query,
                                             TensorView key, TensorView value, TensorView bias,
                                             TensorView, TensorView, TensorView, TensorView,
                                             TensorView, TensorView, TensorView, float, float, bool,
                                             bool, int64_t, int64_t, float, Workspace* workspace) {
  if (!HaveRankFour({query, key, value, bias})) return;
  if (query.dims[3] > kMaxHeadDim || value.dims[3] > kMaxHeadDim) return;
  const AttentionBlocks blocks = BiasGradBlocks(query.dims[3], value.dims[3]);
  TakePartial(DivideBias(query, key, bias, blocks), blocks, workspace);
}

}  // namespace tf_ops
