// SPDX-License-Identifier: Apache-2.0
// Small matrix products and transposes in float32 for one instruction set; a family's SIMD file
// includes it, and as such it has no include guard and no namespace.

// The tile of a matrix product that is held in registers.
constexpr int kTileRows = TF_OPS_ISA == 1 ? 4 : 6, kTileVectors = TF_OPS_ISA == 3 ? 4 : 2;
static_assert(16 % (TF_OPS_ISA == 3 ? kLanes : kTileVectors * kLanes) == 0,
              "16 columns are a whole number of tiles");

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

// c [rows, columns] = a [rows, depth] b [depth, columns], columns a multiple of 16.
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
