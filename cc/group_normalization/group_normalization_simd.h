// SPDX-License-Identifier: Apache-2.0
// The CPU loops of group normalization, for one instruction set. A strip is some channels of a
// sample whose groups are whole or of which it is a part; in it, lanes are channels where these
// come last, else places.

TF_OPS_INLINE Floats Clear(Floats v, Whole) { return v; }
TF_OPS_INLINE Floats Clear(Floats v, Part part) {
  for (int i = part.n; i < kLanes; ++i) v[i] = 0.0f;
  return v;
}

// sums[k][c] = the sum over all places of value k at channel `first` + c, of `count`:
// value(i, c, n, v) writes kValues vectors for the elements from i on, which are of the channel
// first + c, or of channels from it on where these come last. Blocks keep rounding errors small.
template <int kValues, bool kLast, typename F>
TF_OPS_INLINE void SumByChannel(const GroupNormalizationProblem& p, int64_t sample, int64_t first,
                                int64_t count, double (*sums)[kStrip], const F& value) {
  for (int k = 0; k < kValues; ++k) {
    for (int64_t c = 0; c < count; ++c) sums[k][c] = 0.0;
  }
  const int64_t stride = p.channels * p.inner;
  const int64_t base = sample * p.outer * stride + first * p.inner;
  if constexpr (kLast) {
    float block[kValues][kStrip];
    for (int64_t begin = 0; begin < p.outer; begin += kBlock) {
      const int64_t end = p.outer - begin < kBlock ? p.outer : begin + kBlock;
      for (int k = 0; k < kValues; ++k) {
        for (int64_t c = 0; c < count; ++c) block[k][c] = 0.0f;
      }
      for (int64_t o = begin; o < end; ++o) {
        ForVectors(0, count, [&](int64_t c, auto n) __attribute__((always_inline)) {
          Floats v[kValues];
          value(base + o * stride + c, c, n, v);
          for (int k = 0; k < kValues; ++k) Put(block[k] + c, Get(block[k] + c, n) + v[k], n);
        });
      }
      for (int k = 0; k < kValues; ++k) {
        for (int64_t c = 0; c < count; ++c) sums[k][c] += block[k][c];
      }
    }
  } else {
    for (int64_t o = 0; o < p.outer; ++o) {
      for (int64_t c = 0; c < count; ++c) {
        const int64_t at = base + o * stride + c * p.inner;
        for (int64_t begin = 0; begin < p.inner; begin += kBlock * kLanes) {
          const int64_t rest = p.inner - begin;
          const int64_t end = begin + (rest < kBlock * kLanes ? rest : kBlock * kLanes);
          // Four sums hide the latency of an addition.
          Floats sum[4][kValues] = {}, v[kValues];
          int64_t i = begin;
          for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
            for (int u = 0; u < 4; ++u) {
              value(at + i + u * kLanes, c, Whole{}, v);
              for (int k = 0; k < kValues; ++k) sum[u][k] += v[k];
            }
          }
          ForVectors(0, end - i, [&](int64_t j, auto n) __attribute__((always_inline)) {
            value(at + i + j, c, n, v);
            for (int k = 0; k < kValues; ++k) sum[0][k] += Clear(v[k], n);
          });
          for (int k = 0; k < kValues; ++k) {
            sums[k][c] += ReduceSum((sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]));
          }
        }
      }
    }
  }
}

// f(i, c, n) for all elements of the strip, i and c as above.
template <bool kLast, typename F>
TF_OPS_INLINE void ForElements(const GroupNormalizationProblem& p, int64_t sample, int64_t first,
                               int64_t count, const F& f) {
  const int64_t stride = p.channels * p.inner;
  const int64_t base = sample * p.outer * stride + first * p.inner;
  for (int64_t o = 0; o < p.outer; ++o) {
    if constexpr (kLast) {
      ForVectors(0, count, [&](int64_t c, auto n) __attribute__((always_inline)) {
        f(base + o * stride + c, c, n);
      });
    } else {
      for (int64_t c = 0; c < count; ++c) {
        ForVectors(0, p.inner, [&](int64_t i, auto n) __attribute__((always_inline)) {
          f(base + o * stride + c * p.inner + i, c, n);
        });
      }
    }
  }
}

// What belongs to channel c: a vector of channels, or of one of them.
template <bool kLast, typename N>
TF_OPS_INLINE Floats Of(const float* values, int64_t c, N n) {
  return kLast ? Get(values + c, n) : Set(values[c]);
}

// For AskAhead: where channels come last, a whole number of places, of which a strip has a part.
template <typename T, bool kLast>
int64_t BytesAhead(const GroupNormalizationProblem& p) {
  const int64_t place = p.channels * sizeof(T);
  return kLast ? (kBytesAhead + place - 1) / place * place : kBytesAhead;
}

// Groups [first_group, last_group) of a sample: of as many as fit a strip, or one, in strips.
template <typename T, typename W, bool kLast>
void NormalizeGroups(const GroupNormalizationProblem& p, int64_t sample, int64_t first_group,
                     int64_t last_group) {
  const T* x = (const T*)p.x;
  T* y = (T*)p.y;
  const W *gamma = (const W*)p.gamma, *beta = (const W*)p.beta;
  const int64_t begin = first_group * p.group_channels, end = last_group * p.group_channels;
  const double count = double(p.group_channels) * p.outer * p.inner;
  const int64_t ahead = BytesAhead<T, kLast>(p);
  double sums[1][kStrip], total[kStrip];
  float mean[kStrip], scale[kStrip], shift[kStrip];
  float* const group_mean = p.mean + sample * p.groups;
  float* const group_rstd = p.rstd + sample * p.groups;
  const auto add_to_groups = [&](int64_t first, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      total[(first + c) / p.group_channels - first_group] += sums[0][c];
    }
  };
  const auto set_means = [&](int64_t first, int64_t n) {
    for (int64_t c = 0; c < n; ++c) mean[c] = group_mean[(first + c) / p.group_channels];
  };
  const auto strip_of = [&](int64_t c) { return end - c < kStrip ? end - c : int64_t{kStrip}; };

  for (int64_t g = first_group; g < last_group; ++g) total[g - first_group] = 0.0;
  for (int64_t c = begin; c < end; c += kStrip) {
    SumByChannel<1, kLast>(p, sample, c, strip_of(c), sums,
                           [&](int64_t i, int64_t, auto n, Floats* v)
                               __attribute__((always_inline)) {
                                 AskAhead(x + i, ahead);
                                 v[0] = Get(x + i, n);
                               });
    add_to_groups(c, strip_of(c));
  }
  for (int64_t g = first_group; g < last_group; ++g) {
    group_mean[g] = total[g - first_group] / count;
    total[g - first_group] = 0.0;
  }
  for (int64_t c = begin; c < end; c += kStrip) {
    set_means(c, strip_of(c));
    SumByChannel<1, kLast>(p, sample, c, strip_of(c), sums,
                           [&](int64_t i, int64_t at, auto n, Floats* v)
                               __attribute__((always_inline)) {
                                 const Floats d = Get(x + i, n) - Of<kLast>(mean, at, n);
                                 v[0] = d * d;
                               });
    add_to_groups(c, strip_of(c));
  }
  for (int64_t g = first_group; g < last_group; ++g) {
    group_rstd[g] = float(1.0 / __builtin_sqrt(total[g - first_group] / count + p.epsilon));
  }
  for (int64_t c = begin; c < end; c += kStrip) {
    set_means(c, strip_of(c));
    for (int64_t i = 0; i < strip_of(c); ++i) {
      scale[i] = group_rstd[(c + i) / p.group_channels] * (gamma ? float(gamma[c + i]) : 1.0f);
      shift[i] = beta ? float(beta[c + i]) : 0.0f;
    }
    ForElements<kLast>(p, sample, c, strip_of(c),
                       [&](int64_t i, int64_t at, auto n) __attribute__((always_inline)) {
                         const Floats d = Get(x + i, n) - Of<kLast>(mean, at, n);
                         Put(y + i, d * Of<kLast>(scale, at, n) + Of<kLast>(shift, at, n), n);
                       });
  }
}

template <typename T, typename W, bool kLast>
void NormalizeGroupsGrad(const GroupNormalizationProblem& p, int64_t sample, int64_t first_group,
                         int64_t last_group) {
  const T *x = (const T*)p.x, *dy = (const T*)p.dy;
  T* dx = (T*)p.dx;
  const W* gamma = (const W*)p.gamma;
  const int64_t begin = first_group * p.group_channels, end = last_group * p.group_channels;
  const double count = double(p.group_channels) * p.outer * p.inner;
  const int64_t ahead = BytesAhead<T, kLast>(p);
  double sums[2][kStrip], total[2][kStrip];
  float mean[kStrip], rstd[kStrip], scale[kStrip], average[2][kStrip];
  const auto strip_of = [&](int64_t c) { return end - c < kStrip ? end - c : int64_t{kStrip}; };
  const auto set_channels = [&](int64_t first, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      const int64_t g = (first + c) / p.group_channels;
      mean[c] = p.mean[sample * p.groups + g];
      rstd[c] = p.rstd[sample * p.groups + g];
      scale[c] = gamma ? float(gamma[first + c]) : 1.0f;
    }
  };

  for (int64_t g = 0; g < last_group - first_group; ++g) total[0][g] = total[1][g] = 0.0;
  for (int64_t c = begin; c < end; c += kStrip) {
    set_channels(c, strip_of(c));
    SumByChannel<2, kLast>(
        p, sample, c, strip_of(c), sums,
        [&](int64_t i, int64_t at, auto n, Floats* v) __attribute__((always_inline)) {
          AskAhead(x + i, ahead);
          AskAhead(dy + i, ahead);
          v[0] = Get(dy + i, n);
          v[1] = v[0] * ((Get(x + i, n) - Of<kLast>(mean, at, n)) * Of<kLast>(rstd, at, n));
        });
    for (int64_t i = 0; i < strip_of(c); ++i) {
      const int64_t g = (c + i) / p.group_channels - first_group;
      p.sum_dy[sample * p.channels + c + i] = float(sums[0][i]);
      p.sum_dy_xhat[sample * p.channels + c + i] = float(sums[1][i]);
      for (int k = 0; k < 2; ++k) total[k][g] += sums[k][i] * scale[i];
    }
  }
  for (int64_t c = begin; c < end; c += kStrip) {
    set_channels(c, strip_of(c));
    for (int64_t i = 0; i < strip_of(c); ++i) {
      const int64_t g = (c + i) / p.group_channels - first_group;
      for (int k = 0; k < 2; ++k) average[k][i] = float(total[k][g] / count);
    }
    ForElements<kLast>(
        p, sample, c, strip_of(c),
        [&](int64_t i, int64_t at, auto n) __attribute__((always_inline)) {
          const Floats r = Of<kLast>(rstd, at, n);
          const Floats xhat = (Get(x + i, n) - Of<kLast>(mean, at, n)) * r;
          const Floats g = Get(dy + i, n) * Of<kLast>(scale, at, n);
          Put(dx + i, r * (g - Of<kLast>(average[0], at, n) - xhat * Of<kLast>(average[1], at, n)),
              n);
        });
  }
}
