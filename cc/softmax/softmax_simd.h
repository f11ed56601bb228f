// SPDX-License-Identifier: Apache-2.0
// The CPU loops over a row, for one instruction set. A mask of null shows everything.

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// scale * x, -inf where hidden; n < kLanes: the other lanes are hidden.
template <typename T>
TF_OPS_INLINE Floats Visible(const T* x, const bool* mask, float scale, int64_t n) {
  const Floats hidden = Set(-INFINITY);
  if (n >= kLanes) {
    const Floats v = Load(x) * scale;
    if (!mask) return v;
    Bytes bytes;
    __builtin_memcpy(&bytes, mask, sizeof bytes);
    return __builtin_convertvector(bytes, Ints) != 0 ? v : hidden;
  }
  Floats v = LoadPartial(x, n) * scale;
  for (int i = 0; i < kLanes; ++i) {
    if (i >= n || (mask && !mask[i])) v[i] = -INFINITY;
  }
  return v;
}

template <typename T>
TF_OPS_INLINE void StoreUpTo(T* p, Floats v, int64_t n) {
  if (n >= kLanes) {
    Store(p, v);
  } else {
    StorePartial(p, v, n);
  }
}
template <typename T>
TF_OPS_INLINE Floats LoadUpTo(const T* p, int64_t n) {
  return n >= kLanes ? Load(p) : LoadPartial(p, n);
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

// A row of at most kScratch entries: read once, one exponential for each.
template <typename T>
void SoftmaxRow(const T* x, const bool* mask, float scale, int64_t cols, T* y) {
  float scratch[kScratch + kLanes];
  Floats max = Set(-INFINITY), sum = {};
  for (int64_t i = 0; i < cols; i += kLanes) {
    const Floats v = Visible(x + i, mask ? mask + i : mask, scale, cols - i);
    max = Max(v, max);  // passes over NaN, which the sum keeps
    Store(scratch + i, v);
  }
  const float m = ReduceMax(max);
  for (int64_t i = 0; i < cols; i += kLanes) {
    const Floats e = Exp(Load(scratch + i) - m);
    sum += e;
    Store(scratch + i, e);
  }
  const float s = ReduceSum(sum);
  // With everything hidden m is -inf and s NaN.
  if (!(s > 0.0f && s <= 3.4e38f && m > -INFINITY)) {
    float visible = 0.0f;
    for (int64_t i = 0; i < cols; ++i) {
      if (!mask || mask[i]) visible += Exp(Set(float(x[i]) * scale - m))[0];
    }
    return SoftmaxOfInfinities(x, mask, scale, cols, m, visible, y);
  }
  const float inverse = 1.0f / s;
  for (int64_t i = 0; i < cols; i += kLanes) {
    StoreUpTo(y + i, Load(scratch + i) * inverse, cols - i);
  }
}

// Part of a longer row: its largest entry, and the sum of exponentials relative to it, 0 where
// all is -inf.
template <typename T>
void SumPart(const T* x, const bool* mask, float scale, int64_t cols, float* max, double* sum) {
  float m = -INFINITY;
  double total = 0.0;
  float block[kBlock];
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t n = cols - begin < kBlock ? cols - begin : kBlock;
    Floats block_max = Set(m), block_sum = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Floats v = Visible(x + begin + i, mask ? mask + begin + i : mask, scale, n - i);
      block_max = Max(v, block_max);
      Store(block + i, v);
    }
    const float new_max = ReduceMax(block_max), reference = new_max == -INFINITY ? 0.0f : new_max;
    for (int64_t i = 0; i < n; i += kLanes) block_sum += Exp(Load(block + i) - reference);
    total = total * Exp(Set(m - reference))[0] + ReduceSum(block_sum);
    m = new_max;
  }
  *max = m;
  *sum = total;
}

template <typename T>
void WritePart(const T* x, const bool* mask, float scale, int64_t cols, float max, float sum,
               T* y) {
  if (!(sum > 0.0f && sum <= 3.4e38f && max > -INFINITY)) {
    // The sum of a row of -inf is 0 here, but that of a visible one is NaN.
    return SoftmaxOfInfinities(x, mask, scale, cols, max, sum, y);
  }
  const float inverse = 1.0f / sum;
  for (int64_t i = 0; i < cols; i += kLanes) {
    const Floats v = Visible(x + i, mask ? mask + i : mask, scale, cols - i);
    StoreUpTo(y + i, Exp(v - max) * inverse, cols - i);
  }
}

template <typename T>
double DotPart(const T* dy, const T* y, int64_t cols) {
  double total = 0.0;
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t end = cols - begin < kBlock ? cols : begin + kBlock;
    Floats sum = {};
    for (int64_t i = begin; i < end; i += kLanes) {
      const Floats p = LoadUpTo(y + i, end - i), d = LoadUpTo(dy + i, end - i);
      sum += p == 0.0f ? Floats{} : p * d;
    }
    total += ReduceSum(sum);
  }
  return total;
}

// Each vector is read before it is written: dx may be dy.
template <typename T>
void GradPart(const T* dy, const T* y, float scale, int64_t cols, float dot, T* dx) {
  for (int64_t i = 0; i < cols; i += kLanes) {
    const Floats p = LoadUpTo(y + i, cols - i), d = LoadUpTo(dy + i, cols - i);
    StoreUpTo(dx + i, p == 0.0f ? Floats{} : p * scale * (d - dot), cols - i);
  }
}
