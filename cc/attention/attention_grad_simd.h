// SPDX-License-Identifier: Apache-2.0
// The gradients of attention for one instruction set: the second part of attention_simd.h.

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
  const bool plain = which == kAll && !p.bias && !slope && !p.dropout_threshold && !mean;
  for (int r = 0; r < lanes; r += kLanes) {
    const Floats lse = Load(queries.lse + r);
    Floats delta = Load(queries.delta + r);
    if (plain) {
      for (int i = r; i < tile.keys * lanes; i += lanes) {
        const Floats weight = Weight(Load(weights + i) - lse);
        Store(weights + i, weight);
        Store(dscores + i, weight * (Load(dscores + i) - delta));
      }
      continue;
    }
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

// Keys and values in use, and the sums of their gradients.
template <typename T>
struct KeyBlock {
  Operand<T> k, v;
  float *dk, *dv;
  int64_t key;     // the first
  int size, keys;  // of which so many are of the batch row
};

// dkey and dvalue of one part of the keys of one key head, and that part's share of dquery,
// summed over keys in order. Several blocks of keys share what they read of a block of queries.
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
  KeyBlock<T> held[kMaxKeyBlocks];
  for (int i = 0; i < blocks.key_blocks; ++i) {
    held[i] = {KeyOperand<T>(p, blocks.keys, head_dim, &scratch),
               KeyOperand<T>(p, blocks.keys, value_dim, &scratch), scratch.Take(blocks.keys * ld),
               scratch.Take(blocks.keys * value_ld)};
  }
  float* weights = scratch.Take(blocks.keys * blocks.queries);
  float* dscores = scratch.Take(blocks.keys * blocks.queries);
  float* slope = p.soft_cap > 0.0f ? scratch.Take(blocks.keys * blocks.queries) : nullptr;

  const int64_t head_size = p.seq_q * ld;
  float* dquery = g.dquery + ((part * p.batch + batch) * p.heads + kv_head * group) * head_size;
  const int64_t begin = part * g.part_keys, end = AtMost(begin + g.part_keys, p.seq_k);
  for (int64_t key = begin; key < end || key == begin; key += blocks.keys * blocks.key_blocks) {
    int64_t key_end = key;
    int count = 0;
    for (; count < blocks.key_blocks && (key_end < end || key_end == begin); ++count) {
      KeyBlock<T>& b = held[count];
      b.key = key_end;
      b.size = int(AtMost(end - key_end, blocks.keys));
      b.keys = int(AtLeast(AtMost(row.keys - key_end, b.size), 0));
      const int64_t at = (batch * p.seq_k + key_end) * p.kv_heads + kv_head;
      b.k.source = static_cast<const T*>(p.key) + at * head_dim;
      b.v.source = static_cast<const T*>(p.value) + at * value_dim;
      b.k.rows = b.v.rows = b.keys;
      Pack(&b.k);
      Pack(&b.v);
      for (int i = 0; i < b.size * ld; i += kLanes) Store(b.dk + i, Floats{});
      for (int i = 0; i < b.size * value_ld; i += kLanes) Store(b.dv + i, Floats{});
      key_end += blocks.keys;
    }

    const bool first = key == begin;  // sets dquery, of all queries; later blocks add to it
    const int64_t query_begin =
        first ? 0 : AtLeast(key - row.high, 0) / blocks.queries * blocks.queries;
    const int64_t query_end =
        first ? p.seq_q : AtMost(row.queries, AtMost(row.keys, key_end) - row.low);
    for (int64_t h = 0; h < group; ++h) {
      for (int64_t query = query_begin; query < query_end; query += blocks.queries) {
        const int rows = int(AtLeast(AtMost(row.queries - query, blocks.queries), 0));
        float* dq = dquery + h * head_size + query * ld;
        Update update = kAdd;
        if (first) {
          const int64_t size = AtMost(p.seq_q - query, blocks.queries) * ld;
          for (int64_t i = rows * ld; i < size; i += kLanes) Store(dq + i, Floats{});
          update = kSet;
        }
        for (int i = 0; i < count; ++i) {
          KeyBlock<T>& b = held[i];
          Operand<T>& k = b.k;
          k.rows = int(AtLeast(AtMost(b.keys, query + rows + row.high - b.key), 0));
          const ScoreTile tile{batch,  kv_head * group + h, query, b.key, rows,
                               k.rows, Padded(rows)};
          KeyBits seen;
          const Visible visible = rows > 0 && k.rows > 0 ? FindVisible(p, row, tile, seen) : kNone;
          if (visible == kNone) continue;
          const int64_t index = (local_head * group + h) * g.query_blocks + query / blocks.queries;
          QueryBlock<T> block = PackedQueries<T>(p, g, tile, index);
          block.q.finite = block.finite[0] != 0.0f;
          block.doutput.finite = block.finite[1] != 0.0f;
          ScoreGradients(p, g, tile, block, k, b.v, visible, seen, weights, dscores, slope);
          MatMulWeights<false>(kAdd, k.rows, weights, tile.lanes, block.doutput, b.dv);
          MatMulWeights<false>(kAdd, k.rows, dscores, tile.lanes, block.q, b.dk);
          DropNonFinite(&k);
          MatMulWeights<true>(update, rows, dscores, tile.lanes, k, dq);
          update = kAdd;
          if (!k.finite) {
            k.rows = b.keys;
            Pack(&k);
          }
        }
        if (update == kSet) {
          for (int64_t i = 0; i < rows * ld; i += kLanes) Store(dq + i, Floats{});
        }
      }
    }
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < held[i].size; ++r) {
        const int64_t at = (batch * p.seq_k + held[i].key + r) * p.kv_heads + kv_head;
        StoreRow(held[i].dk + r * ld, 1.0f, head_dim, dkey + at * head_dim);
        StoreRow(held[i].dv + r * value_ld, 1.0f, value_dim, dvalue + at * value_dim);
      }
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
    double delta = g.dlse ? -double(g.dlse[at]) : 0.0;
    for (int c = 0; c < columns; ++c) {
      const double b = double(float(y[c]));
      if (b != 0.0) delta += double(float(dy[c])) * b;  // NaN where nothing is seen has no say
    }
    sum -= __builtin_exp(double(p.sink[head]) - double(g.lse[at])) * delta;
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
