// SPDX-License-Identifier: Apache-2.0
// Attention for one instruction set; attention_cpu.cc says how the work is divided.
//
// A tile of scores is transposed: a row per key, a lane per query. The softmax then reduces
// over rows, never across lanes, and neither keys nor values have to be transposed, only the
// queries, once per block. Everything in scratch is float32; rows have a multiple of kPad
// columns, zeros beyond the tensor's.

// The tile of a matrix product that is held in registers.
constexpr int kTileRows = TF_OPS_ISA == 1 ? 4 : 6, kTileVectors = TF_OPS_ISA == 3 ? 4 : 2;
static_assert(kPad % (TF_OPS_ISA == 3 ? kLanes : kTileVectors * kLanes) == 0,
              "a row is a whole number of vectors");

// What becomes of c in a matrix product with result ab.
enum Update { kSet, kAdd, kScaleAndAdd };  // ab, c + ab, c scale[row] + ab

// c = ab, where b and c have rows of kVectors vectors; a is transposed in memory under
// kTransposed. Each element is summed over k in order, starting from 0, whatever the tile:
// the gradients repeat the scores of the forward pass bit for bit.
template <int kRows, int kVectors, bool kTransposed>
void Tile(Update update, int depth, const float* a, int64_t lda, const float* b, int64_t ldb,
          float* c, int64_t ldc, const float* scale) {
  Floats sum[kRows][kVectors] = {};
  for (int k = 0; k < depth; ++k) {
    Floats row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = Load(b + k * ldb + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats x = Set(kTransposed ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x * row[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * ldc + v * kLanes;
      if (update == kAdd) sum[r][v] += Load(to);
      if (update == kScaleAndAdd) sum[r][v] += Load(to) * scale[r];
      Store(to, sum[r][v]);
    }
  }
}

// The last, fewer than kTileRows, rows.
template <int kRows, int kVectors, bool kTransposed, typename... Args>
void LastRows(int rows, Args... args) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Tile<kRows, kVectors, kTransposed>(args...);
    LastRows<kRows - 1, kVectors, kTransposed>(rows, args...);
  }
}

template <int kVectors, bool kTransposed>
void Columns(Update update, int rows, int depth, const float* a, int64_t lda, const float* b,
             int64_t ldb, float* c, int64_t ldc, const float* scale) {
  const int64_t step = kTileRows * (kTransposed ? 1 : lda);
  for (; rows >= kTileRows; rows -= kTileRows) {
    Tile<kTileRows, kVectors, kTransposed>(update, depth, a, lda, b, ldb, c, ldc, scale);
    a += step;
    c += kTileRows * ldc;
    scale += kTileRows;
  }
  LastRows<kTileRows - 1, kVectors, kTransposed>(rows, update, depth, a, lda, b, ldb, c, ldc,
                                                 scale);
}

// c [rows, columns] = a [rows, depth] b [depth, columns], columns a multiple of kPad.
template <bool kTransposed>
void MatMul(Update update, int rows, int columns, int depth, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, const float* scale = nullptr) {
  constexpr int kStep = kTileVectors * kLanes;
  for (; columns >= kStep; columns -= kStep, b += kStep, c += kStep) {
    Columns<kTileVectors, kTransposed>(update, rows, depth, a, lda, b, ldb, c, ldc, scale);
  }
  if constexpr (TF_OPS_ISA == 3) {
    const int vectors = columns / kLanes;
    if (vectors == 3) Columns<3, kTransposed>(update, rows, depth, a, lda, b, ldb, c, ldc, scale);
    if (vectors == 2) Columns<2, kTransposed>(update, rows, depth, a, lda, b, ldb, c, ldc, scale);
    if (vectors == 1) Columns<1, kTransposed>(update, rows, depth, a, lda, b, ldb, c, ldc, scale);
  }
}

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
  const int columns = operand->columns, whole = columns / kLanes * kLanes;
  UInts largest{};  // magnitude, as bits: those of Inf and NaN are the largest of all
  for (int r = 0; r < operand->rows; ++r) {
    const T* from = operand->source + r * operand->stride;
    float* to = operand->block + int64_t{r} * operand->ld;
    for (int c = 0; c < operand->ld; c += kLanes) {
      Floats x{};
      if (c < whole) {
        x = Load(from + c) * operand->factor;
      } else if (c < columns) {
        x = LoadPartial(from + c, columns - whole) * operand->factor;
      }
      const UInts magnitude = (UInts)x & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      Store(to + c, x);
    }
  }
  operand->finite = true;
  for (int i = 0; i < kLanes; ++i) operand->finite &= largest[i] < 0x7f800000;
}

// Asks for rows [begin, end) of the block that follows: those of one head are far apart.
template <typename T>
void PrefetchNext(const Operand<T>& operand, int begin, int end) {
  for (int r = begin; r < end; ++r) {
    const T* row = operand.source + (operand.rows + r) * operand.stride;
    for (int c = 0; c < operand.columns; c += int(64 / sizeof(T)))
      __builtin_prefetch(row + c, 0, 2);
  }
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

template <int kDistance>
TF_OPS_INLINE void ExchangeBlocks(Floats (&x)[kLanes]) {
  Ints low{}, high{};
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i & kDistance ? kLanes + i - kDistance : i;
    high[i] = i & kDistance ? kLanes + i : i + kDistance;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kDistance) continue;
    const Floats a = x[i], b = x[i + kDistance];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + kDistance] = __builtin_shuffle(a, b, high);
  }
}

TF_OPS_INLINE void Transpose(Floats (&x)[kLanes]) {
  ExchangeBlocks<1>(x);
  ExchangeBlocks<2>(x);
  if constexpr (kLanes >= 8) ExchangeBlocks<4>(x);
  if constexpr (kLanes >= 16) ExchangeBlocks<8>(x);
}

// Calls f(row, column, x) for each kLanes x kLanes tile of [rows, columns], transposed: lane r
// of x[c] is the element of row + r and column + c, 0 outside.
template <typename T, typename F>
TF_OPS_INLINE void ForTransposed(const T* from, int64_t stride, int rows, int columns, F f) {
  for (int row = 0; row < rows; row += kLanes) {
    for (int column = 0; column < columns; column += kLanes) {
      const T* corner = from + row * stride + column;
      Floats x[kLanes];
      if (row + kLanes <= rows && column + kLanes <= columns) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) x[r] = Load(corner + r * stride);
      } else {
        const int width = columns - column < kLanes ? columns - column : kLanes;
        T lanes[kLanes * kLanes];
        __builtin_memset(lanes, 0, sizeof lanes);
        for (int r = 0; r < kLanes && row + r < rows; ++r) {
          __builtin_memcpy(lanes + r * kLanes, corner + r * stride, width * sizeof(T));
        }
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) x[r] = Load(lanes + r * kLanes);
      }
      Transpose(x);
      f(row, column, x);
    }
  }
}

// to [columns, lanes] = the transpose of `from` [rows, columns], zeros beyond the rows.
template <typename T>
void PackTransposed(const T* from, int64_t stride, int rows, int columns, float factor, float* to,
                    int lanes) {
  for (int row = (rows + kLanes - 1) / kLanes * kLanes; row < lanes; row += kLanes) {
    for (int c = 0; c < columns; ++c) Store(to + int64_t{c} * lanes + row, Floats{});
  }
  ForTransposed(from, stride, rows, columns, [=](int row, int column, Floats(&x)[kLanes]) {
    float* corner = to + int64_t{column} * lanes + row;
#pragma GCC unroll 16
    for (int c = 0; c < kLanes; ++c) {
      if (column + c < columns) Store(corner + int64_t{c} * lanes, x[c] * factor);
    }
  });
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

// exp(x) for x <= 0, cheaper than Exp: 2^n times a polynomial in the rest of x log2(e). The
// relative error grows with -x to a few ulp, as the weight shrinks beside the largest, 1.
TF_OPS_INLINE Floats Weight(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f,
               r = x * 1.44269504f - (shifted - 12582912.0f);
  Floats p = r * 1.53707101e-4f + 1.33998531e-3f;
  p = p * r + 9.61837326e-3f;
  p = p * r + 5.55032902e-2f;
  p = p * r + 2.40226485e-1f;
  p = p * r + 6.93147206e-1f;
  p = p * r + 1.0f;
  const Floats scaled = (Floats)((UInts)p + ((UInts)shifted << 23));
  return x < -87.3f ? Floats{} : scaled;
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

// One block of queries of one head. Every kMaxQueries of them, a group, have a tile of scores;
// the groups share the packed keys and values.
template <typename T>
void ForwardTask(const AttentionProblem& p, AttentionBlocks blocks, int64_t task, T* output,
                 float* lse) {
  const int64_t query_blocks = (p.seq_q + blocks.queries - 1) / blocks.queries;
  const int64_t batch = task / query_blocks / p.heads, head = task / query_blocks % p.heads;
  // The last block first: it sees the most under is_causal.
  const int64_t query = (query_blocks - 1 - task % query_blocks) * blocks.queries;
  const int64_t kv_head = head / (p.heads / p.kv_heads);
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
    bool packed = false;
    const int keys = int(AtMost(end - key, blocks.keys));
    for (int g = 0; g < rows; g += kMaxQueries) {
      const int group_rows = int(AtMost(rows - g, kMaxQueries));
      const ScoreTile tile{batch, head, query + g, key, group_rows, keys, Padded(group_rows)};
      KeyBits seen;
      const Visible visible = FindVisible(p, row, tile, seen);
      if (visible == kNone) continue;
      if (!packed) {
        const int64_t at = (batch * p.seq_k + key) * p.kv_heads + kv_head;
        k.source = static_cast<const T*>(p.key) + at * p.head_dim;
        v.source = static_cast<const T*>(p.value) + at * p.value_dim;
        k.rows = v.rows = keys;
        Pack(&k);
        Pack(&v);
        DropNonFinite(&v);
        packed = true;
      }
      Scores<T>(p, tile, qt + g * p.head_dim, k.block, k.ld, visible, seen, scores, nullptr);
      PrefetchNext(k, keys * g / rows, keys * (g + group_rows) / rows);
      PrefetchNext(v, keys * g / rows, keys * (g + group_rows) / rows);
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

// What the gradients read of a block of queries.
template <typename T>
struct QueryBlock {
  Operand<T> q, doutput;
  float *qt, *doutput_t;  // transposed
  float *lse, *delta;     // [lanes]
  float* finite;          // [2], of q and doutput, as 0 or 1
};

// The block of the tile's queries, of which one has `rows`, packed or to be packed in memory.
template <typename T>
QueryBlock<T> LocateQueries(const AttentionProblem& p, const AttentionGradients& g,
                            const ScoreTile& tile, int64_t rows, float* memory) {
  const int64_t at = (tile.batch * p.seq_q + tile.query) * p.heads + tile.head;
  Scratch scratch{memory};
  const auto operand = [&](const void* data, int64_t columns, float factor) {
    return Operand<T>{static_cast<const T*>(data) + at * columns,
                      p.heads * columns,
                      tile.rows,
                      int(columns),
                      factor,
                      scratch.Take(rows * Padded(columns)),
                      Padded(columns)};
  };
  const int64_t lanes = Padded(rows);
  return {operand(p.query, p.head_dim, p.scale),
          operand(g.doutput, p.value_dim, 1.0f),
          scratch.Take(lanes * p.head_dim),
          scratch.Take(lanes * p.value_dim),
          scratch.Take(lanes),
          scratch.Take(lanes),
          scratch.Take(2)};
}

// Where one tile has all keys of a query, delta is the weighted mean of do . v in it: it has the
// rounding of what it is subtracted from, and the difference may be small.
inline bool DeltaFromTile(const AttentionProblem& p, const AttentionGradients& g) {
  return p.seq_k <= g.blocks.keys;
}

template <typename T>
void PackQueries(const AttentionProblem& p, const AttentionGradients& g, const ScoreTile& tile,
                 QueryBlock<T>* block) {
  Operand<T>&q = block->q, &dy = block->doutput;
  Pack(&q);
  Pack(&dy);
  PackTransposed(q.block, q.ld, q.rows, q.columns, 1.0f, block->qt, tile.lanes);
  PackTransposed(dy.block, dy.ld, dy.rows, dy.columns, 1.0f, block->doutput_t, tile.lanes);
  DropNonFinite(&q);
  DropNonFinite(&dy);
  block->finite[0] = q.finite;
  block->finite[1] = dy.finite;

  const int64_t row = (tile.batch * p.heads + tile.head) * p.seq_q + tile.query;
  const T* output =
      static_cast<const T*>(g.output) + (dy.source - static_cast<const T*>(g.doutput));
  for (int v = 0; v < tile.lanes; v += kLanes) {
    Floats sum{};
    if (!DeltaFromTile(p, g) && v < dy.rows) {
      // In the order of `Tile`: a row that sees one key has ds of exactly 0.
      alignas(64) float output_t[kMaxHeadDim * kLanes];
      const int rows = dy.rows - v < kLanes ? dy.rows - v : kLanes;
      PackTransposed(output + v * dy.stride, dy.stride, rows, dy.columns, 1.0f, output_t, kLanes);
      for (int c = 0; c < dy.columns; ++c) {
        sum += Load(block->doutput_t + c * tile.lanes + v) * Load(output_t + c * kLanes);
      }
    }
    Store(block->delta + v, sum);
  }
  for (int r = 0; r < tile.lanes; ++r) {
    if (r < tile.rows && g.dlse) block->delta[r] -= g.dlse[row + r];
    // Of a query without keys, and beyond the last one: exp(score - inf) is 0.
    const float inf = __builtin_inff();
    block->lse[r] = r < tile.rows && g.lse[row + r] != -inf ? g.lse[row + r] : inf;
  }
}

// Where packed block `index` of [key_heads, heads / kv_heads, query_blocks] is.
template <typename T>
QueryBlock<T> PackedQueries(const AttentionProblem& p, const AttentionGradients& g,
                            const ScoreTile& tile, int64_t index) {
  return LocateQueries<T>(p, g, tile, AtMost(p.seq_q, g.blocks.queries),
                          g.queries + index * g.query_block_size);
}

// Packs that block, which every task of its key head reads.
template <typename T>
void PackTask(const AttentionProblem& p, const AttentionGradients& g, int64_t index) {
  const int64_t query = index % g.query_blocks * g.blocks.queries;
  const int64_t row = g.first_key_head * (p.heads / p.kv_heads) + index / g.query_blocks;
  const int64_t batch = row / p.heads;
  const int rows = int(AtMost(AttentionRow(p, batch).queries - query, g.blocks.queries));
  if (rows <= 0) return;
  const ScoreTile tile{batch, row % p.heads, query, 0, rows, 0, Padded(rows)};
  QueryBlock<T> block = PackedQueries<T>(p, g, tile, index);
  PackQueries(p, g, tile, &block);
}

// weights [keys, lanes] and dscores [keys, lanes] of the tile: w p and ds of the contract, or,
// with a slope, what goes on to the product of query and key.
template <typename T>
void ScoreGradients(const AttentionProblem& p, const AttentionGradients& g, const ScoreTile& tile,
                    const QueryBlock<T>& queries, const Operand<T>& k, const Operand<T>& v,
                    Visible which, const KeyBits seen, float* weights, float* dscores,
                    float* slope) {
  const int lanes = tile.lanes;
  const bool mean = DeltaFromTile(p, g);
  // The only key of a query has no gradient, though under dropout its output is rounded.
  const bool settled = p.dropout_threshold && !g.dlse;
  Scores<T>(p, tile, queries.qt, k.block, k.ld, which, seen, weights, slope);
  MatMul<false>(kSet, tile.keys, lanes, int(p.value_dim), v.block, v.ld, queries.doutput_t, lanes,
                dscores, lanes);
  KeyBits kept;
  if (p.dropout_threshold) {
    FindKept(p, tile, kept);
    Drop(p, tile, kept, dscores);
  }
  for (int r = 0; r < lanes; r += kLanes) {
    const Floats lse = Load(queries.lse + r);
    Floats delta = Load(queries.delta + r);
    if (mean) {
      Floats sum{}, total = p.sink ? Weight(p.sink[tile.head] - lse) : Floats{};
      for (int i = r; i < tile.keys * lanes; i += lanes) {
        const Floats score = Load(weights + i), weight = Weight(score - lse);
        const auto visible = score != -__builtin_inff();
        sum += visible ? weight * Load(dscores + i) : Floats{};
        total += visible ? weight : Floats{};
      }
      delta += total == 0.0f ? Floats{} : sum / total;
    }
    for (int i = r; i < tile.keys * lanes; i += lanes) {
      const Floats score = Load(weights + i), weight = Weight(score - lse);
      const auto visible = score != -__builtin_inff();  // elsewhere the rest may be NaN
      Floats ds = weight * (Load(dscores + i) - delta);
      if (slope) ds *= Load(slope + i);
      if (settled) ds = weight == 1.0f ? Floats{} : ds;
      Store(weights + i, visible ? weight : Floats{});
      Store(dscores + i, visible ? ds : Floats{});
    }
  }
  if (p.dropout_threshold) Drop(p, tile, kept, weights);
}

// dkey and dvalue of one part of the keys of one key head, and that part's share of dquery,
// summed over keys in order.
template <typename T>
void GradTask(const AttentionProblem& p, const AttentionGradients& g, int64_t task, T* dkey,
              T* dvalue) {
  const AttentionBlocks blocks = g.blocks;
  const int64_t local_head = task / g.parts, part = task % g.parts;
  const int64_t batch = (g.first_key_head + local_head) / p.kv_heads;
  const int64_t kv_head = (g.first_key_head + local_head) % p.kv_heads;
  const int64_t group = p.heads / p.kv_heads;
  const AttentionRow row(p, batch);
  const int ld = Padded(p.head_dim), value_ld = Padded(p.value_dim);
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);

  alignas(64) float memory[kScratch];
  Scratch scratch{memory};
  Operand<T> k = KeyOperand<T>(p, blocks.keys, head_dim, &scratch);
  Operand<T> v = KeyOperand<T>(p, blocks.keys, value_dim, &scratch);
  float* dk = scratch.Take(blocks.keys * ld);
  float* dv = scratch.Take(blocks.keys * value_ld);
  float* weights = scratch.Take(blocks.keys * blocks.queries);
  float* dscores = scratch.Take(blocks.keys * blocks.queries);
  float* slope = p.soft_cap > 0.0f ? scratch.Take(blocks.keys * blocks.queries) : nullptr;

  const int64_t head_size = p.seq_q * ld;
  float* dquery = g.dquery + ((part * p.batch + batch) * p.heads + kv_head * group) * head_size;

  const int64_t key_begin = part * g.part_keys, key_end = AtMost(key_begin + g.part_keys, p.seq_k);
  for (int64_t key = key_begin; key < key_end || key == key_begin; key += blocks.keys) {
    const bool set = key == key_begin;  // dquery, of all queries; later blocks add to it
    const int size = int(AtMost(key_end - key, blocks.keys));
    const int keys = int(AtLeast(AtMost(row.keys - key, size), 0));
    const int64_t at = (batch * p.seq_k + key) * p.kv_heads + kv_head;
    k.source = static_cast<const T*>(p.key) + at * head_dim;
    v.source = static_cast<const T*>(p.value) + at * value_dim;
    k.rows = v.rows = keys;
    Pack(&k);
    Pack(&v);
    for (int i = 0; i < size * ld; i += kLanes) Store(dk + i, Floats{});
    for (int i = 0; i < size * value_ld; i += kLanes) Store(dv + i, Floats{});

    const int64_t first = set ? 0 : AtLeast(key - row.high, 0) / blocks.queries * blocks.queries;
    const int64_t last = set         ? p.seq_q
                         : keys == 0 ? first
                                     : AtMost(row.queries, key + keys - row.low);
    for (int64_t h = 0; h < group; ++h) {
      for (int64_t query = first; query < last; query += blocks.queries) {
        const int rows = int(AtLeast(AtMost(row.queries - query, blocks.queries), 0));
        k.rows = int(AtLeast(AtMost(keys, query + rows + row.high - key), 0));
        const ScoreTile tile{batch, kv_head * group + h, query, key, rows, k.rows, Padded(rows)};
        KeyBits seen;
        const Visible visible = rows > 0 && k.rows > 0 ? FindVisible(p, row, tile, seen) : kNone;
        float* dq = dquery + h * head_size + query * ld;
        if (set) {
          const int64_t end = AtMost(p.seq_q - query, blocks.queries) * ld;
          for (int64_t i = visible == kNone ? 0 : rows * ld; i < end; i += kLanes) {
            Store(dq + i, Floats{});
          }
        }
        if (visible == kNone) continue;
        const int64_t index = (local_head * group + h) * g.query_blocks + query / blocks.queries;
        QueryBlock<T> block = PackedQueries<T>(p, g, tile, index);
        block.q.finite = block.finite[0] != 0.0f;
        block.doutput.finite = block.finite[1] != 0.0f;
        ScoreGradients(p, g, tile, block, k, v, visible, seen, weights, dscores, slope);
        MatMulWeights<false>(kAdd, k.rows, weights, tile.lanes, block.doutput, dv);
        MatMulWeights<false>(kAdd, k.rows, dscores, tile.lanes, block.q, dk);
        DropNonFinite(&k);
        MatMulWeights<true>(set ? kSet : kAdd, rows, dscores, tile.lanes, k, dq);
        if (!k.finite) {
          k.rows = keys;
          Pack(&k);
        }
      }
    }
    for (int r = 0; r < size; ++r) {
      StoreRow(dk + r * ld, 1.0f, head_dim, dkey + (at + r * p.kv_heads) * head_dim);
      StoreRow(dv + r * value_ld, 1.0f, value_dim, dvalue + (at + r * p.kv_heads) * value_dim);
    }
  }
}

// dquery of rows [begin, end) of [batch, seq_q, heads]: the sum of the parts, in order.
template <typename T>
void SumQueryParts(const AttentionProblem& p, const AttentionGradients& g, int64_t begin,
                   int64_t end, T* dquery) {
  const int ld = Padded(p.head_dim);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head = i % p.heads, query = i / p.heads % p.seq_q, batch = i / p.heads / p.seq_q;
    alignas(64) float sum[kMaxHeadDim];
    for (int c = 0; c < ld; c += kLanes) {
      Floats x{};
      for (int64_t part = 0; part < g.parts; ++part) {
        x += Load(g.dquery + (((part * p.batch + batch) * p.heads + head) * p.seq_q + query) * ld +
                  c);
      }
      Store(sum + c, x);
    }
    StoreRow(sum, p.scale, int(p.head_dim), dquery + i * p.head_dim);
  }
}

// dsink of a head, summed over rows in order.
template <typename T>
float SinkGradTask(const AttentionProblem& p, const AttentionGradients& g, int64_t head) {
  const int columns = int(p.value_dim);
  double sum = 0.0;
  for (int64_t i = 0; i < p.batch * p.seq_q; ++i) {
    const int64_t at = (i / p.seq_q * p.heads + head) * p.seq_q + i % p.seq_q;
    if (g.lse[at] == -__builtin_inff()) continue;
    const T* dy = static_cast<const T*>(g.doutput) + (i * p.heads + head) * columns;
    const T* y = static_cast<const T*>(g.output) + (i * p.heads + head) * columns;
    Floats products{};
    for (int c = 0; c < columns; c += kLanes) {
      const bool whole = c + kLanes <= columns;
      const Floats a = whole ? Load(dy + c) : LoadPartial(dy + c, columns - c);
      const Floats b = whole ? Load(y + c) : LoadPartial(y + c, columns - c);
      products += b == 0.0f ? Floats{} : a * b;  // NaN where nothing is seen has no say
    }
    const float delta = ReduceSum(products) - (g.dlse ? g.dlse[at] : 0.0f);
    sum -= double(__builtin_expf(p.sink[head] - g.lse[at])) * delta;
  }
  return float(sum);
}

// Writes a tile of dbias, sums [keys, blocks.queries], which begins at (query, key).
template <typename T>
void StoreBiasTile(const AttentionProblem& p, const AttentionGradients& g, int64_t at, int rows,
                   int keys, const float* sums, T* dbias) {
  const int ld = g.blocks.queries;
  const int64_t query_stride = p.bias_strides[2], key_stride = p.bias_strides[3];
  if (query_stride == 0) {
    float all = 0.0f;
    for (int j = 0; j < keys; ++j) {
      Floats sum{};
      for (int v = 0; v < ld; v += kLanes) sum += Load(sums + j * ld + v);
      const float total = ReduceSum(sum);
      if (key_stride != 0) dbias[at + j] = T(total);
      all += total;
    }
    if (key_stride == 0) dbias[at] = T(all);
    return;
  }
  if (key_stride == 0) {
    for (int r = 0; r < rows; ++r) {
      float total = 0.0f;
      for (int j = 0; j < keys; ++j) total += sums[j * ld + r];
      dbias[at + r * query_stride] = T(total);
    }
    return;
  }
  ForTransposed(sums, ld, keys, rows, [=](int j, int r, Floats(&x)[kLanes]) {
    for (int i = 0; i < kLanes && r + i < rows; ++i) {
      StoreRow(reinterpret_cast<const float*>(&x[i]), 1.0f, keys - j < kLanes ? keys - j : kLanes,
               dbias + at + (r + i) * query_stride + j);
    }
  });
}

// One tile of dbias, or one part of the sum over the tiles that the bias broadcasts to.
template <typename T>
void BiasGradTask(const AttentionProblem& p, const AttentionGradients& g, const BiasTiles& tiles,
                  int64_t task, T* dbias) {
  const AttentionBlocks blocks = g.blocks;
  const int head_dim = int(p.head_dim), value_dim = int(p.value_dim);
  alignas(64) float memory[kScratch];
  Scratch scratch{memory};
  Operand<T> k = KeyOperand<T>(p, blocks.keys, head_dim, &scratch);
  Operand<T> v = KeyOperand<T>(p, blocks.keys, value_dim, &scratch);
  const int size = blocks.keys * blocks.queries;
  float* weights = scratch.Take(size);
  float* dscores = scratch.Take(size);
  float* sums = scratch.Take(size);
  float* queries = scratch.Take(g.query_block_size);
  float* lost = scratch.Take(size);  // what rounding took from the sums, as Kahan has it
  for (int i = 0; i < size; i += kLanes) {
    Store(sums + i, Floats{});
    Store(lost + i, Floats{});
  }

  const int64_t part = task % tiles.parts;
  const int64_t first = tiles.terms / tiles.parts * part + AtMost(tiles.terms % tiles.parts, part);
  const int64_t last = first + tiles.terms / tiles.parts + (part < tiles.terms % tiles.parts);
  for (int64_t term = first; term < last; ++term) {
    int64_t index[4];
    tiles.Locate(task / tiles.parts, term, index);
    const AttentionRow row(p, index[0]);
    const int64_t query = index[2] * blocks.queries, key = index[3] * blocks.keys;
    const int rows = int(AtMost(row.queries - query, blocks.queries));
    const int keys = int(AtMost(row.keys - key, blocks.keys));
    if (rows <= 0 || keys <= 0) continue;
    const ScoreTile tile{index[0], index[1], query, key, rows, keys, Padded(rows)};
    KeyBits seen;
    const Visible visible = FindVisible(p, row, tile, seen);
    if (visible == kNone) continue;
    const int64_t at =
        (tile.batch * p.seq_k + key) * p.kv_heads + tile.head / (p.heads / p.kv_heads);
    k.source = static_cast<const T*>(p.key) + at * head_dim;
    v.source = static_cast<const T*>(p.value) + at * value_dim;
    k.rows = v.rows = keys;
    Pack(&k);
    Pack(&v);
    QueryBlock<T> block = LocateQueries<T>(p, g, tile, blocks.queries, queries);
    PackQueries(p, g, tile, &block);
    ScoreGradients(p, g, tile, block, k, v, visible, seen, weights, dscores, nullptr);
    for (int j = 0; j < keys; ++j) {
      for (int i = 0; i < rows; i += kLanes) {
        const float* from = dscores + j * tile.lanes + i;
        float* to = sums + j * blocks.queries + i;
        float* rest = lost + j * blocks.queries + i;
        const Floats ds = i + kLanes <= rows ? Load(from) : LoadPartial(from, rows - i);
        const Floats x = ds - Load(rest);
        const Floats before = Load(to), after = before + x, error = (after - before) - x;
        Store(to, after);
        Store(rest, error == error ? error : Floats{});
      }
    }
  }
  if (tiles.parts > 1) {
    __builtin_memcpy(tiles.partial + task * size, sums, size * sizeof(float));
  } else {
    int64_t at;
    int rows, keys;
    tiles.Place(p, g, task, &at, &rows, &keys);
    StoreBiasTile(p, g, at, rows, keys, sums, dbias);
  }
}

// Adds the parts of a tile of dbias, in order.
template <typename T>
void SumBiasParts(const AttentionProblem& p, const AttentionGradients& g, const BiasTiles& tiles,
                  int64_t task, T* dbias) {
  const int size = g.blocks.keys * g.blocks.queries;
  alignas(64) float sums[kMaxKeys * kMaxQueries];
  for (int i = 0; i < size; i += kLanes) {
    Floats sum{};
    for (int64_t part = 0; part < tiles.parts; ++part) {
      sum += Load(tiles.partial + (task * tiles.parts + part) * size + i);
    }
    Store(sums + i, sum);
  }
  int64_t at;
  int rows, keys;
  tiles.Place(p, g, task, &at, &rows, &keys);
  StoreBiasTile(p, g, at, rows, keys, sums, dbias);
}
