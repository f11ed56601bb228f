// SPDX-License-Identifier: Apache-2.0
// The CPU loops over a row, for one instruction set. A mask of null shows everything.

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

// Calls f(i, whole, n) for each vector of [0, cols); it is not whole where n < kLanes are left.
template <typename F>
TF_OPS_INLINE void ForVectors(int64_t cols, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) f(i, True{}, kLanes);
  if (i < cols) f(i, False{}, int(cols - i));
}
template <typename T, typename Whole>
TF_OPS_INLINE Floats Get(const T* p, Whole, int n) {
  return Whole::value ? Load(p) : LoadPartial(p, n);
}
template <typename T, typename Whole>
TF_OPS_INLINE void Put(T* p, Floats v, Whole, int n) {
  Whole::value ? Store(p, v) : StorePartial(p, v, n);
}

// scale * x, -inf where hidden and beyond the end.
template <bool kMask, typename T, typename Whole>
TF_OPS_INLINE Floats Visible(const T* x, const bool* mask, float scale, Whole whole, int n) {
  Floats v = Get(x, whole, n) * scale;
  if constexpr (Whole::value) {
    if constexpr (!kMask) return v;
    Bytes bytes;
    __builtin_memcpy(&bytes, mask, sizeof bytes);
// GCC widens the bytes piece by piece.
#if TF_OPS_ISA == 3
    return (Floats)_mm512_mask_mov_ps(
        (__m512)Set(-INFINITY), _mm_test_epi8_mask((__m128i)bytes, (__m128i)bytes), (__m512)v);
#else
    return __builtin_convertvector(bytes, Ints) != 0 ? v : Set(-INFINITY);
#endif
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i >= n || (kMask && !mask[i])) v[i] = -INFINITY;
  }
  return v;
}

// Where the largest entry or the sum is not finite: hidden entries are 0 all the same.
template <typename T>
void SoftmaxOfInfinities(const T* x, const bool* mask, float scale, int64_t cols, float max,
                         float sum, T* y) {
  for (int64_t i = 0; i < cols; ++i) {
    const float e = Exp(Set(float(x[i]) * scale - max))[0];
    y[i] = T(mask && !mask[i] ? 0.0f : e / sum);
  }
}

// kRows rows of `cols` entries, at most kScratch together: read once, one exponential for each
// entry. Rows beside each other hide each other's latencies.
template <typename T, bool kMask, int kRows>
void SoftmaxRows(const T* x, const bool* const* masks, float scale, int64_t cols, T* y) {
  float scratch[kScratch + kRows * kLanes];
  const int64_t stride = (cols + kLanes - 1) / kLanes * kLanes;
  Floats max[kRows], sum[kRows] = {};
  float m[kRows], inverse[kRows];
  for (int r = 0; r < kRows; ++r) max[r] = Set(-INFINITY);
  ForVectors(cols, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
    for (int r = 0; r < kRows; ++r) {
      const Floats v = Visible<kMask>(x + r * cols + i, masks[r] + i, scale, whole, n);
      max[r] = Max(v, max[r]);  // passes over NaN, which the sum keeps
      Store(scratch + r * stride + i, v);
    }
  });
  for (int r = 0; r < kRows; ++r) m[r] = ReduceMax(max[r]);
  for (int64_t i = 0; i < cols; i += kLanes) {
    for (int r = 0; r < kRows; ++r) {
      AskAhead(x + r * cols + i, kRows * cols * sizeof(T));  // the next rows
      const Floats e = Weight(Load(scratch + r * stride + i) - m[r]);
      sum[r] += e;
      Store(scratch + r * stride + i, e);
    }
  }
  bool plain = true;
  for (int r = 0; r < kRows; ++r) {
    const float s = ReduceSum(sum[r]);
    inverse[r] = 1.0f / s;
    // With everything hidden m is -inf and s NaN.
    plain &= s > 0.0f && s <= 3.4e38f && m[r] > -INFINITY;
  }
  if (!plain) {
    if constexpr (kRows > 1) {
      for (int r = 0; r < kRows; ++r) {
        SoftmaxRows<T, kMask, 1>(x + r * cols, masks + r, scale, cols, y + r * cols);
      }
    } else {
      float visible = 0.0f;
      for (int64_t i = 0; i < cols; ++i) {
        if (!kMask || masks[0][i]) visible += Exp(Set(float(x[i]) * scale - m[0]))[0];
      }
      SoftmaxOfInfinities(x, kMask ? masks[0] : nullptr, scale, cols, m[0], visible, y);
    }
    return;
  }
  ForVectors(cols, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
    for (int r = 0; r < kRows; ++r) {
      Put(y + r * cols + i, Load(scratch + r * stride + i) * inverse[r], whole, n);
    }
  });
}

// Part of a longer row: its largest entry, and the sum of exponentials relative to it, 0 where
// all is -inf.
template <typename T, bool kMask>
void SumPart(const T* x, const bool* mask, float scale, int64_t cols, float* max, double* sum) {
  float m = -INFINITY;
  double total = 0.0;
  float block[kBlock];
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t count = cols - begin < kBlock ? cols - begin : kBlock;
    Floats block_max = Set(m), block_sum = {};
    ForVectors(count, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
      const Floats v = Visible<kMask>(x + begin + i, mask + begin + i, scale, whole, n);
      block_max = Max(v, block_max);
      Store(block + i, v);
    });
    const float new_max = ReduceMax(block_max), reference = new_max == -INFINITY ? 0.0f : new_max;
    for (int64_t i = 0; i < count; i += kLanes) {
      AskAhead(x + begin + i, kBlock * sizeof(T));
      block_sum += Weight(Load(block + i) - reference);
    }
    total = total * Exp(Set(m - reference))[0] + ReduceSum(block_sum);
    m = new_max;
  }
  *max = m;
  *sum = total;
}

template <typename T, bool kMask>
void WritePart(const T* x, const bool* mask, float scale, int64_t cols, float max, float sum,
               T* y) {
  // Of a row of -inf the sum is 0, as if it were hidden; there a visible entry makes NaN.
  if (!(sum > 0.0f && sum <= 3.4e38f && max > -INFINITY)) {
    return SoftmaxOfInfinities(x, kMask ? mask : nullptr, scale, cols, max, sum, y);
  }
  const float inverse = 1.0f / sum;
  ForVectors(cols, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
    const Floats v = Visible<kMask>(x + i, mask + i, scale, whole, n);
    Put(y + i, Weight(v - max) * inverse, whole, n);
  });
}

template <typename T>
double DotPart(const T* dy, const T* y, int64_t cols) {
  double total = 0.0;
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t count = cols - begin < kBlock ? cols - begin : kBlock;
    Floats sum = {};
    ForVectors(count, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
      AskAhead(y + begin + i);
      AskAhead(dy + begin + i);
      const Floats p = Get(y + begin + i, whole, n), d = Get(dy + begin + i, whole, n);
      sum += p == 0.0f ? Floats{} : p * d;
    });
    total += ReduceSum(sum);
  }
  return total;
}

// Each vector is read before it is written: dx may be dy.
template <typename T>
void GradPart(const T* dy, const T* y, float scale, int64_t cols, float dot, T* dx) {
  ForVectors(cols, [&](int64_t i, auto whole, int n) __attribute__((always_inline)) {
    const Floats p = Get(y + i, whole, n), d = Get(dy + i, whole, n);
    Put(dx + i, p == 0.0f ? Floats{} : p * scale * (d - dot), whole, n);
  });
}
