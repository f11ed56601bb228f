// SPDX-License-Identifier: Apache-2.0
// Attention for one instruction set; attention_cpu.cc says how the work is divided.
//
// A tile of scores is transposed: a row per key, a lane per query. The softmax then reduces
// over rows, never across lanes, and neither keys nor values have to be transposed, only the
// queries, once per block. Everything in scratch is float32; rows have a multiple of kPad
// columns, zeros beyond the tensor's.
#include "cc/common/matmul_simd.h"

// Rows of a tensor of one head, a factor of a matrix product, widened into a block. A weight
// of 0, which is what an invisible pair has, must take nothing from it, and 0 * NaN is NaN: so
// the product is that of the finite elements, and the others are added by themselves, where
// the weight is not 0.
template <typename T>
struct Operand {
  const T* source;
  int64_t stride;  // of the source's rows
  int rows, columns;
  float factor;
  float* block;
  int ld;
  bool finite;
};

template <typename T>
void Pack(Operand<T>* operand) {
  const int columns = operand->columns, whole = columns / kLanes * kLanes, ld = operand->ld;
  const T* from = operand->source;
  float* to = operand->block;
  UInts largest{};  // magnitude, as bits: those of Inf and NaN are the largest of all
  const auto put = [&](int c, Floats x) __attribute__((always_inline)) {
    x *= operand->factor;
    const UInts magnitude = (UInts)x & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
    Store(to + c, x);
  };
  for (int r = 0; r < operand->rows; ++r, from += operand->stride, to += ld) {
    for (int c = 0; c < whole; c += kLanes) put(c, Load(from + c));
    if (whole == ld) continue;
    put(whole, whole < columns ? LoadPartial(from + whole, columns - whole) : Floats{});
    for (int c = whole + kLanes; c < ld; c += kLanes) Store(to + c, Floats{});
  }
  operand->finite = true;
  for (int i = 0; i < kLanes; ++i) operand->finite &= largest[i] < 0x7f800000;
}

template <typename T>
void DropNonFinite(Operand<T>* operand) {
  if (operand->finite) return;
  for (int64_t i = 0; i < int64_t{operand->rows} * operand->ld; i += kLanes) {
    const Floats x = Load(operand->block + i);
    Store(operand->block + i, x - x == 0.0f ? x : Floats{});
  }
}

// MatMul(a, b) after DropNonFinite(b). a is [rows, b.rows] or, transposed, [b.rows, rows].
template <bool kTransposed, typename T>
void MatMulWeights(Update update, int rows, const float* a, int64_t lda, const Operand<T>& b,
                   float* c, const float* scale = nullptr) {
  MatMul<kTransposed>(update, rows, b.ld, b.rows, a, lda, b.block, b.ld, c, b.ld, scale);
  if (b.finite) return;
  for (int k = 0; k < b.rows; ++k) {
    for (int column = 0; column < b.columns; ++column) {
      const float x = float(b.source[k * b.stride + column]) * b.factor;
      if (x - x == 0.0f) continue;
      for (int r = 0; r < rows; ++r) {
        const float weight = kTransposed ? a[k * lda + r] : a[r * lda + k];
        if (weight != 0.0f) c[int64_t{r} * b.ld + column] += weight * x;
      }
    }
  }
}

// A tile of scores: keys [key, key + keys) of queries [query, query + rows), in the batch row
// and head; lanes is rows rounded up to kPad.
struct ScoreTile {
  int64_t batch, head, query, key;
  int rows, keys, lanes;
};

enum Visible { kNone, kSome, kAll };

// A bit for each key and query of a tile.
typedef uint32_t KeyBits[2][kMaxQueries];
typedef uint64_t ULongs __attribute__((vector_size(4 * kLanes)));

// A bit per key for keys [0, count) of a row of the mask; count <= 64.
inline uint64_t MaskBits(const bool* mask, int64_t stride, int count) {
  if (stride == 0) return *mask ? ~uint64_t{0} : 0;
  uint64_t bits = 0;
  for (int i = 0; i < count; i += 8) {
    uint64_t bytes = 0;
    __builtin_memcpy(&bytes, mask + i, count - i < 8 ? count - i : 8);
    bits |= (bytes * 0x0102040810204080u >> 56) << i;  // gathers the lowest bit of each byte
  }
  return bits;
}

// The lowest `count` bits, of which there are 64.
inline uint64_t LowBits(int64_t count) {
  return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : ~(~uint64_t{0} << count);
}

// Which keys of the tile each query sees: bit j of seen[w][lane] is for key 32 w + j. Set only
// where the answer is kSome.
inline Visible FindVisible(const AttentionProblem& p, const AttentionRow& row,
                           const ScoreTile& tile, KeyBits seen) {
  const int64_t diagonal = tile.query - tile.key, last = diagonal + tile.rows - 1;
  if (last + row.high < 0 || diagonal + row.low >= tile.keys) return kNone;
  if (diagonal + row.high >= tile.keys - 1 && last + row.low <= 0 && !p.mask) return kAll;
  const uint64_t every = LowBits(tile.keys);
  const int64_t (&strides)[4] = p.mask_strides;
  const int64_t at = tile.batch * strides[0] + tile.head * strides[1] + tile.query * strides[2] +
                     tile.key * strides[3];
  uint64_t mask = every, any = 0, all = every;
  for (int r = 0; r < tile.rows; ++r) {
    if (p.mask && (r == 0 || strides[2] != 0)) {
      mask = MaskBits(p.mask + at + r * strides[2], strides[3], tile.keys) & every;
    }
    const int64_t before = diagonal + r + row.low, up_to = diagonal + r + row.high + 1;
    const uint64_t bits = mask & LowBits(up_to) & ~LowBits(before);
    seen[0][r] = uint32_t(bits);
    seen[1][r] = uint32_t(bits >> 32);
    any |= bits;
    all &= bits;
  }
  for (int r = tile.rows; r < tile.lanes; ++r) seen[0][r] = seen[1][r] = 0;
  return any == 0 ? kNone : all == every ? kAll : kSome;
}

// The high halves of x * y go to `high`, the low ones are returned.
TF_OPS_INLINE UInts MultiplyWide(UInts x, uint32_t y, UInts* high) {
  const ULongs even = ((ULongs)x & 0xffffffff) * y, odd = ((ULongs)x >> 32) * y;
  *high = (UInts)((even >> 32) | (odd & ~ULongs{0} << 32));
  return x * y;
}

// Which keys of the tile dropout leaves to each query: one generator for each lane, whose four
// words are those of four keys.
inline void FindKept(const AttentionProblem& p, const ScoreTile& tile, KeyBits kept) {
  const DropoutKey key = DropoutKeyOf(p.seed);
  const uint32_t head = uint32_t(tile.batch * p.heads + tile.head);
  UInts lane{};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int v = 0; v < tile.lanes; v += kLanes) {
    UInts bits[2] = {};
    for (int j = 0; j < tile.keys; j += 4) {
      UInts c0 = UInts{} + uint32_t((tile.key + j) / 4), c1 = lane + uint32_t(tile.query + v);
      UInts c2 = UInts{} + head, c3 = UInts{} + key.salt;
      uint32_t key0 = key.key[0], key1 = key.key[1];
      for (int round = 0; round < kPhiloxRounds; ++round) {
        UInts high0, high1;
        const UInts low0 = MultiplyWide(c0, kPhiloxMultipliers[0], &high0);
        const UInts low1 = MultiplyWide(c2, kPhiloxMultipliers[1], &high1);
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += kPhiloxWeyl[0];
        key1 += kPhiloxWeyl[1];
      }
      const UInts words[4] = {c0, c1, c2, c3};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const UInts keep = words[i] >= p.dropout_threshold ? UInts{} + 1 : UInts{};
        bits[j / 32] |= keep << ((j + i) % 32);
      }
    }
    __builtin_memcpy(kept[0] + v, &bits[0], sizeof bits[0]);
    __builtin_memcpy(kept[1] + v, &bits[1], sizeof bits[1]);
  }
}

// Multiplies x [keys, lanes] of the tile by w of the contract.
inline void Drop(const AttentionProblem& p, const ScoreTile& tile, const KeyBits kept, float* x) {
  for (int j = 0; j < tile.keys; ++j) {
    for (int v = 0; v < tile.lanes; v += kLanes) {
      UInts bits;
      __builtin_memcpy(&bits, kept[j / 32] + v, sizeof bits);
      float* at = x + j * tile.lanes + v;
      Store(at, (bits >> (j % 32) & 1) != 0 ? Load(at) * p.keep_scale : Floats{});
    }
  }
}

// scores [keys, lanes] of the tile from keys k [keys, ld] and transposed queries qt [head_dim,
// lanes], which carry the scale; -inf where invisible. slope, unless null, becomes the
// derivative of the soft cap.
template <typename T>
void Scores(const AttentionProblem& p, const ScoreTile& tile, const float* qt, const float* k,
            int64_t ld, Visible visible, const KeyBits seen, float* scores, float* slope) {
  const int lanes = tile.lanes, size = tile.keys * lanes;
  MatMul<false>(kSet, tile.keys, lanes, int(p.head_dim), k, ld, qt, lanes, scores, lanes);
  if (p.soft_cap > 0.0f) {
    for (int i = 0; i < size; i += kLanes) {
      const Floats t = Tanh(Load(scores + i) / p.soft_cap);
      Store(scores + i, t * p.soft_cap);
      if (slope) Store(slope + i, 1.0f - t * t);
    }
  }
  if (p.bias) {
    const int64_t (&strides)[4] = p.bias_strides;
    const T* bias = static_cast<const T*>(p.bias) + tile.batch * strides[0] +
                    tile.head * strides[1] + tile.query * strides[2] + tile.key * strides[3];
    if (strides[2] == 0) {
      for (int j = 0; j < tile.keys; ++j) {
        const Floats x = Set(float(bias[j * strides[3]]));
        for (int v = j * lanes; v < (j + 1) * lanes; v += kLanes)
          Store(scores + v, Load(scores + v) + x);
      }
    } else if (strides[3] == 0) {
      alignas(64) float column[kMaxQueries] = {};
      for (int r = 0; r < tile.rows; ++r) column[r] = float(bias[r * strides[2]]);
      for (int j = 0; j < tile.keys; ++j) {
        for (int v = 0; v < lanes; v += kLanes) {
          Store(scores + j * lanes + v, Load(scores + j * lanes + v) + Load(column + v));
        }
      }
    } else {
      const int keys = tile.keys;
      ForTransposed(bias, strides[2], tile.rows, keys, [=](int r, int j, Floats(&x)[kLanes]) {
        float* corner = scores + j * lanes + r;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          if (j + i < keys) Store(corner + i * lanes, Load(corner + i * lanes) + x[i]);
        }
      });
    }
  }
  if (visible == kAll) return;
  for (int j = 0; j < tile.keys; ++j) {
    for (int v = 0; v < lanes; v += kLanes) {
      UInts bits;
      __builtin_memcpy(&bits, seen[j / 32] + v, sizeof bits);
      float* score = scores + j * lanes + v;
      Store(score, (bits >> (j % 32) & 1) != 0 ? Load(score) : Set(-__builtin_inff()));
    }
  }
}

// Takes a tile of scores into the softmax of its queries, of which peak is the largest score
// so far and total the sum of exp(score - peak). The scores become weights relative to the
// new peak, and what was summed before must be scaled by `shrink`.
inline void UpdateSoftmax(const ScoreTile& tile, float* scores, float* peak, float* total,
                          float* shrink) {
  const int lanes = tile.lanes;
  for (int v = 0; v < lanes; v += kLanes) {
    const Floats before = Load(peak + v);
    Floats top = before, other = before;
    int j = 0;
    for (; j + 1 < tile.keys; j += 2) {
      top = Max(Load(scores + j * lanes + v), top);
      other = Max(Load(scores + (j + 1) * lanes + v), other);
    }
    if (j < tile.keys) top = Max(Load(scores + j * lanes + v), top);
    top = Max(other, top);
    // While nothing is visible: exp(-inf - 0) is 0 and exp(-inf + inf) would be NaN.
    const Floats base = top == -__builtin_inff() ? Floats{} : top;
    Floats sum{};
    for (j = 0; j < tile.keys; ++j) {
      const Floats weight = Weight(Load(scores + j * lanes + v) - base);
      sum += weight;
      Store(scores + j * lanes + v, weight);
    }
    const Floats scale = Weight(before - base);
    Store(peak + v, top);
    Store(total + v, Load(total + v) * scale + sum);
    Store(shrink + v, scale);
  }
}

template <typename T>
void StoreRow(const float* from, float factor, int columns, T* to) {
  int c = 0;
  for (; c + kLanes <= columns; c += kLanes) Store(to + c, Load(from + c) * factor);
  if (c < columns) StorePartial(to + c, Load(from + c) * factor, columns - c);
}

// Hands out aligned parts of a scratch array.
struct Scratch {
  float* next;
  float* Take(int64_t size) {
    float* part = next;
    next += Padded(size);
    return part;
  }
};

// Room for a block of keys or values.
template <typename T>
Operand<T> KeyOperand(const AttentionProblem& p, int rows, int columns, Scratch* scratch) {
  const int ld = Padded(columns);
  return {nullptr, p.kv_heads * columns, 0, columns, 1.0f, scratch->Take(rows * ld), ld};
}

// Rows [key, key + keys) of a key head, to be packed into k and v.
template <typename T>
void LocateKeys(const AttentionProblem& p, int64_t batch, int64_t kv_head, int64_t key, int keys,
                Operand<T>* k, Operand<T>* v) {
  const int64_t at = (batch * p.seq_k + key) * p.kv_heads + kv_head;
  k->source = static_cast<const T*>(p.key) + at * p.head_dim;
  v->source = static_cast<const T*>(p.value) + at * p.value_dim;
  k->rows = v->rows = keys;
}

// Packs block `index` of [key_heads, blocks] for all tasks that read it.
template <typename T>
void PackKeysTask(const AttentionProblem& p, const AttentionBlocks& blocks,
                  const PackedKeys& packed, int64_t index) {
  const int64_t key_head = packed.first_key_head + index / packed.blocks;
  const int64_t key = index % packed.blocks * blocks.keys, batch = key_head / p.kv_heads;
  const int keys = int(AtMost(AttentionRow(p, batch).keys - key, blocks.keys));
  if (keys <= 0) return;
  Scratch scratch{packed.memory + index * packed.block_size};
  Operand<T> k = KeyOperand<T>(p, blocks.keys, int(p.head_dim), &scratch);
  Operand<T> v = KeyOperand<T>(p, blocks.keys, int(p.value_dim), &scratch);
  LocateKeys(p, batch, key_head % p.kv_heads, key, keys, &k, &v);
  Pack(&k);
  Pack(&v);
  DropNonFinite(&v);
  *scratch.Take(1) = v.finite;
}

// One block of queries of one head. Every kMaxQueries of them, a group, have a tile of scores;
// the groups share the packed keys and values.
template <typename T>
void ForwardTask(const AttentionProblem& p, AttentionBlocks blocks, const PackedKeys& packed,
                 int64_t task, T* output, float* lse) {
  const int64_t query_blocks = (p.seq_q + blocks.queries - 1) / blocks.queries;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t all_heads = packed.first_key_head * group + task / query_blocks;
  const int64_t batch = all_heads / p.heads, head = all_heads % p.heads, kv_head = head / group;
  // The last block first: it sees the most under is_causal.
  const int64_t query = (query_blocks - 1 - task % query_blocks) * blocks.queries;
  const AttentionRow row(p, batch);
  const int size = int(AtMost(p.seq_q - query, blocks.queries));
  const int rows = int(AtLeast(AtMost(row.queries - query, size), 0));
  const int value_ld = Padded(p.value_dim);

  alignas(64) float memory[kScratch];
  Scratch scratch{memory};
  float* qt = scratch.Take(blocks.queries * p.head_dim);
  float* sum = scratch.Take(blocks.queries * value_ld);
  float* scores = scratch.Take(blocks.keys * kMaxQueries);
  float* peak = scratch.Take(blocks.queries);
  float* total = scratch.Take(blocks.queries);
  float* shrink = scratch.Take(kMaxQueries);
  Operand<T> k = KeyOperand<T>(p, blocks.keys, int(p.head_dim), &scratch);
  Operand<T> v = KeyOperand<T>(p, blocks.keys, int(p.value_dim), &scratch);

  const int64_t stride = p.heads * p.head_dim;
  const T* q =
      static_cast<const T*>(p.query) + (batch * p.seq_q + query) * stride + head * p.head_dim;
  for (int g = 0; g < rows; g += kMaxQueries) {
    const int group_rows = int(AtMost(rows - g, kMaxQueries));
    PackTransposed(q + g * stride, stride, group_rows, int(p.head_dim), p.scale,
                   qt + g * p.head_dim, Padded(group_rows));
  }
  for (int i = 0; i < size * value_ld; i += kLanes) Store(sum + i, Floats{});
  const float inf = __builtin_inff(), sink = p.sink ? p.sink[head] : -inf;
  for (int r = 0; r < blocks.queries; r += kLanes) {
    // The sink is one more key, without a value.
    Store(peak + r, Set(sink));
    Store(total + r, Set(sink == -inf ? 0.0f : 1.0f));
  }

  const int64_t begin = AtLeast(query + row.low, 0) / blocks.keys * blocks.keys;
  const int64_t end = rows == 0 ? 0 : AtMost(row.keys, query + rows + row.high);
  for (int64_t key = begin; key < end; key += blocks.keys) {
    const int keys = int(AtMost(end - key, blocks.keys));
    LocateKeys(p, batch, kv_head, key, keys, &k, &v);
    bool ready = packed.memory;
    if (ready) {
      const int64_t index = (all_heads / group - packed.first_key_head) * packed.blocks;
      Scratch block{packed.memory + (index + key / blocks.keys) * packed.block_size};
      k.block = block.Take(blocks.keys * k.ld);
      v.block = block.Take(blocks.keys * v.ld);
      v.finite = *block.Take(1) != 0.0f;
    }
    for (int g = 0; g < rows; g += kMaxQueries) {
      const int group_rows = int(AtMost(rows - g, kMaxQueries));
      const ScoreTile tile{batch, head, query + g, key, group_rows, keys, Padded(group_rows)};
      KeyBits seen;
      const Visible visible = FindVisible(p, row, tile, seen);
      if (visible == kNone) continue;
      if (!ready) {
        Pack(&k);
        Pack(&v);
        DropNonFinite(&v);
        ready = true;
      }
      Scores<T>(p, tile, qt + g * p.head_dim, k.block, k.ld, visible, seen, scores, nullptr);
      UpdateSoftmax(tile, scores, peak + g, total + g, shrink);
      if (p.dropout_threshold) {
        KeyBits kept;
        FindKept(p, tile, kept);
        Drop(p, tile, kept, scores);
      }
      MatMulWeights<true>(kScaleAndAdd, group_rows, scores, tile.lanes, v, sum + g * value_ld,
                          shrink);
    }
  }

  for (int r = 0; r < size; ++r) {
    T* to = output + ((batch * p.seq_q + query + r) * p.heads + head) * p.value_dim;
    const bool empty = r >= rows || total[r] == 0.0f;
    StoreRow(sum + int64_t{r} * value_ld, empty ? 0.0f : 1.0f / total[r], int(p.value_dim), to);
    lse[(batch * p.heads + head) * p.seq_q + query + r] =
        empty ? sink : peak[r] + __builtin_logf(total[r]);
  }
}

#include "cc/attention/attention_grad_simd.h"
