// SPDX-License-Identifier: Apache-2.0
// The CPU loops over classes, for one instruction set.

constexpr int kBlock = 1024;  // floats that stay in the nearest cache between two passes

TF_OPS_INLINE Floats Cap(Floats x, float soft_cap) {
  return soft_cap > 0.0f ? soft_cap * Tanh(x / soft_cap) : x;
}

template <typename T>
float CappedLogit(const T* logit, float soft_cap) {
  return Cap(Set(float(*logit)), soft_cap)[0];
}

// The sums over x = cap(logits), read once. A block's entries are summed relative to the
// largest so far, or to 0 while there are only -inf, whose difference would be NaN.
template <typename T>
void SumClasses(const T* logits, int64_t classes, float soft_cap, SoftmaxSums* sums) {
  float max = -INFINITY;
  double sum = 0.0, sum_x = 0.0;
  float block[kBlock];
  for (int64_t begin = 0; begin < classes; begin += kBlock) {
    const T* p = logits + begin;
    const int n = classes - begin < kBlock ? classes - begin : kBlock;
    Floats block_max = Set(max), block_x = {}, block_sum = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Floats x = Cap(Load(p + i), soft_cap);
      block_max = Max(x, block_max);  // passes over NaN, which the sum keeps
      block_x += x;
      Store(block + i, x);
    }
    if (i < n) {
      // The lanes beyond the end become -inf after the cap, which would make -c of it.
      const Floats x = Cap(LoadPartial(p + i, n - i), soft_cap);
      block_x += x;
      Store(block + i, x);
      for (int j = n; j < i + kLanes; ++j) block[j] = -INFINITY;
      block_max = Max(Load(block + i), block_max);
    }
    const float new_max = ReduceMax(block_max);
    const float reference = new_max == -INFINITY ? 0.0f : new_max;
    for (i = 0; i < n; i += kLanes) {
      AskAhead(p + i, n * sizeof(T));  // the next block, or row
      block_sum += Weight(Load(block + i) - reference);
    }
    sum = sum * Exp(Set(max - reference))[0] + ReduceSum(block_sum);
    sum_x += ReduceSum(block_x);
    max = new_max;
  }
  *sums = {max, sum, sum_x};
}

// dlogits at `logit`; the token's figures are floats, or Floats where each lane is a token.
template <typename V>
TF_OPS_INLINE Floats Gradient(Floats logit, float soft_cap, V max, V scale, V shift) {
  const Floats x = Cap(logit, soft_cap);
  const Floats dx = Weight(x - max) * scale - shift;
  if (soft_cap == 0.0f) return dx;
  const Floats tanh = x / soft_cap;
  return dx * (1.0f - tanh * tanh);
}

// dlogits of `classes` classes; the label is the one at `label`, which may be outside them.
// Each vector is read before it is written: dlogits may be logits.
template <typename T>
void GradClasses(const T* logits, int64_t classes, int64_t label, float soft_cap, TokenGradient g,
                 T* dlogits) {
  const bool has_label = label >= 0 && label < classes;
  const Floats at_label = Set(has_label ? float(logits[label]) : 0.0f);
  int64_t i = 0;
  for (; i + kLanes <= classes; i += kLanes) {
    AskAhead(logits + i);
    Store(dlogits + i, Gradient(Load(logits + i), soft_cap, g.max, g.scale, g.shift));
  }
  if (const int n = classes - i; n > 0) {
    const Floats x = LoadPartial(logits + i, n);
    StorePartial(dlogits + i, Gradient(x, soft_cap, g.max, g.scale, g.shift), n);
  }
  if (has_label) {
    dlogits[label] = T(Gradient(at_label, soft_cap, g.max, g.scale, g.shift + g.target)[0]);
  }
}

// Few classes leave most of a vector empty: here each lane is a token, the last one repeated
// where they do not suffice. [classes, kLanes] from [tokens, classes].
template <typename T>
TF_OPS_INLINE void Transpose(const T* logits, int64_t tokens, int64_t classes, float* block) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const T* row = logits + (lane < tokens ? lane : tokens - 1) * classes;
    for (int64_t c = 0; c < classes; ++c) block[c * kLanes + lane] = float(row[c]);
  }
}

template <typename T>
void SumFewClasses(const T* logits, int64_t tokens, int64_t classes, float soft_cap,
                   SoftmaxSums* sums) {
  float block[kFewClasses * kLanes];
  for (int64_t first = 0; first < tokens; first += kLanes) {
    Transpose(logits + first * classes, tokens - first, classes, block);
    Floats max = Set(-INFINITY), sum = {}, sum_x = {};
    for (int64_t c = 0; c < classes; ++c) {
      const Floats x = Cap(Load(block + c * kLanes), soft_cap);
      max = Max(x, max);
      sum_x += x;
      Store(block + c * kLanes, x);
    }
    for (int64_t c = 0; c < classes; ++c) sum += Weight(Load(block + c * kLanes) - max);
    for (int lane = 0; lane < kLanes && first + lane < tokens; ++lane) {
      sums[first + lane] = {max[lane], sum[lane], sum_x[lane]};
    }
  }
}

template <typename T>
void GradFewClasses(const T* logits, int64_t tokens, int64_t classes, const int64_t* labels,
                    float soft_cap, const TokenGradient* gradients, T* dlogits) {
  float block[kFewClasses * kLanes];
  for (int64_t first = 0; first < tokens; first += kLanes) {
    Transpose(logits + first * classes, tokens - first, classes, block);
    Floats max, scale, shift, target, at_label;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t token = first + lane < tokens ? first + lane : tokens - 1;
      const TokenGradient& g = gradients[token];
      max[lane] = g.max;
      scale[lane] = g.scale;
      shift[lane] = g.shift;
      target[lane] = g.target;
      at_label[lane] = block[labels[token] * kLanes + lane];
    }
    at_label = Gradient(at_label, soft_cap, max, scale, shift + target);
    for (int64_t c = 0; c < classes; ++c) {
      const Floats x = Load(block + c * kLanes);
      Store(block + c * kLanes, Gradient(x, soft_cap, max, scale, shift));
    }
    for (int lane = 0; lane < kLanes && first + lane < tokens; ++lane) {
      T* row = dlogits + (first + lane) * classes;
      for (int64_t c = 0; c < classes; ++c) row[c] = T(block[c * kLanes + lane]);
      row[labels[first + lane]] = T(at_label[lane]);
    }
  }
}
