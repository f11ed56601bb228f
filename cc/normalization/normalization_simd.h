// SPDX-License-Identifier: Apache-2.0
// Rows and sums of normalization_cpu.cc. A row is read from memory once, then from cache.

// The sum of f(i, Whole or Part) over [0, cols). Four sums hide the latency of an addition;
// blocks keep the rounding errors of long rows small.
template <typename F>
TF_OPS_INLINE float SumOver(int64_t cols, const F& f) {
  float total = 0.0f;
  for (int64_t i = 0; i < cols;) {
    const int64_t end = cols - i < 4096 ? cols : i + 4096;
    Floats a{}, b{}, c{}, d{};
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      a += f(i, Whole{});
      b += f(i + kLanes, Whole{});
      c += f(i + 2 * kLanes, Whole{});
      d += f(i + 3 * kLanes, Whole{});
    }
    for (; i + kLanes <= end; i += kLanes) a += f(i, Whole{});
    if (i < end) {
      const int n = int(end - i);
      float lanes[kLanes];
      Store(lanes, f(i, Part{n}));
      b += LoadPartial(lanes, n);
      i = end;
    }
    total += ReduceSum((a + b) + (c + d));
  }
  return total;
}

// Rows [begin, end).
template <typename T, typename W, bool kMean>
void NormalizationRows(const NormalizationProblem& p, int64_t begin, int64_t end) {
  const int64_t cols = p.cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)p.x + row * cols;
    T* y = (T*)p.y + row * cols;
    if (p.residual) {
      const T* residual = (const T*)p.residual + row * cols;
      T* s = (T*)p.s + row * cols;
      ForVectors(0, cols, [=](int64_t i, auto n) __attribute__((always_inline)) {
        AskAhead(x + i);
        AskAhead(residual + i);
        Put(s + i, Get(x + i, n) + Get(residual + i, n), n);
      });
      x = s;
    }
    float mean = 0.0f;
    if (kMean) {
      mean = SumOver(cols,
                     [=](int64_t i, auto n) __attribute__((always_inline)) {
                       AskAhead(x + i);
                       return Get(x + i, n);
                     }) /
             float(cols);
      p.mean[row] = mean;
    }
    const float squares = SumOver(cols, [=](int64_t i, auto n) __attribute__((always_inline)) {
      if (!kMean) AskAhead(x + i);
      const Floats v = Get(x + i, n) - mean;
      return v * v;
    });
    const float rstd = 1.0f / __builtin_sqrtf(squares / float(cols) + p.epsilon);
    p.rstd[row] = rstd;

    const int64_t weight = row % p.groups * cols;
    const W* scale = p.scale ? (const W*)p.scale + weight : nullptr;
    const W* beta = p.beta ? (const W*)p.beta + weight : nullptr;
    const float offset = p.scale_offset;
    ForVectors(0, cols, [=](int64_t i, auto n) __attribute__((always_inline)) {
      Floats v = (Get(x + i, n) - mean) * rstd;
      if (scale) v *= Get(scale + i, n) + offset;
      if (beta) v += Get(beta + i, n);
      Put(y + i, v, n);
    });
  }
}

// Rows [begin, end), whose share of the weights' gradients is added to dscale and dbeta,
// [groups, cols], if there are. dx may be dy.
template <typename T, typename W, bool kMean>
void NormalizationGradRows(const NormalizationProblem& p, int64_t begin, int64_t end, float* dscale,
                           float* dbeta) {
  const int64_t cols = p.cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)p.x + row * cols;
    const T* dy = (const T*)p.dy + row * cols;
    const T* ds = p.ds ? (const T*)p.ds + row * cols : nullptr;
    T* dx = (T*)p.dx + row * cols;
    const int64_t weight = row % p.groups * cols;
    const W* scale = p.scale ? (const W*)p.scale + weight : nullptr;
    float* dscale_row = dscale ? dscale + weight : nullptr;
    float* dbeta_row = dbeta ? dbeta + weight : nullptr;
    const float mean = kMean ? p.mean[row] : 0.0f, rstd = p.rstd[row], offset = p.scale_offset;

    const auto g = [=](int64_t i, auto n) __attribute__((always_inline)) {
      const Floats v = Get(dy + i, n);
      return scale ? v * (Get(scale + i, n) + offset) : v;
    };
    const auto xhat = [=](int64_t i, auto n)
                          __attribute__((always_inline)) { return (Get(x + i, n) - mean) * rstd; };
    float dot = SumOver(cols, [=](int64_t i, auto n) __attribute__((always_inline)) {
      AskAhead(dy + i);
      AskAhead(x + i);
      return g(i, n) * xhat(i, n);
    });
    if (p.drstd) dot += rstd * p.drstd[row];
    dot /= float(cols);
    float shift = 0.0f, dmean = 0.0f;
    if (kMean) {
      shift = SumOver(cols, g) / float(cols);
      if (p.dmean) dmean = p.dmean[row] / float(cols);
    }
    ForVectors(0, cols, [=](int64_t i, auto n) __attribute__((always_inline)) {
      const Floats d = Get(dy + i, n), v = xhat(i, n);
      Floats out = rstd * (g(i, n) - shift - v * dot);
      if (kMean) out += dmean;
      if (ds) out += Get(ds + i, n);
      if (dscale_row) Put(dscale_row + i, Get(dscale_row + i, n) + d * v, n);
      if (dbeta_row) Put(dbeta_row + i, Get(dbeta_row + i, n) + d, n);
      Put(dx + i, out, n);
    });
  }
}

// out[begin, end) = the sum of partial, [parts, size], over the parts; by blocks, against the
// rounding errors of a long sum.
template <typename W>
void SumParts(const float* partial, int64_t parts, int64_t size, int64_t begin, int64_t end,
              W* out) {
  ForVectors(begin, end, [=](int64_t i, auto n) __attribute__((always_inline)) {
    Floats sum{};
    for (int64_t part = 0; part < parts;) {
      const int64_t block_end = parts - part < 64 ? parts : part + 64;
      Floats block{};
      for (; part < block_end; ++part) block += Get(partial + part * size + i, n);
      sum += block;
    }
    Put(out + i, sum, n);
  });
}
