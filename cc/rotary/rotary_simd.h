// SPDX-License-Identifier: Apache-2.0
// The CPU loops over pairs, for one instruction set.

// cos and sin of position * turns[i] turns. The product is exact modulo 2^64, its top bits say
// which quarter of a turn is nearest, and two polynomials serve the eighth to its either side;
// they are least-squares fits reweighted until the errors were even, within 4e-9.
inline void AnglesOf(int64_t position, const uint64_t* turns, int n, bool inverse, float* cos,
                     float* sin) {
  for (int begin = 0; begin < n; begin += kLanes) {
    const int count = n - begin < kLanes ? n - begin : kLanes;
    uint32_t lanes[kLanes] = {};
    for (int i = 0; i < count; ++i) lanes[i] = uint64_t(position) * turns[begin + i] >> 32;
    UInts phase;
    __builtin_memcpy(&phase, lanes, sizeof phase);
    const UInts quarter = (phase + 0x20000000u) >> 30;
    const Floats r = __builtin_convertvector((Ints)(phase - (quarter << 30)), Floats) *
                     1.46291808e-9f;  // 2 pi / 2^32
    const Floats r2 = r * r;
    Floats s = r2 * -1.95172341e-4f + 8.33217768e-3f;
    s = s * r2 - 0.166666549f;
    s = r + r * (r2 * s);
    Floats c = r2 * 2.44383784e-5f - 1.38873669e-3f;
    c = c * r2 + 4.16666469e-2f;
    c = (1.0f - 0.5f * r2) + r2 * r2 * c;
    const Ints swap = (quarter & 1) != 0;
    const UInts negative_sin = (quarter & 2) << 30 ^ (inverse ? 0x80000000u : 0u);
    const UInts negative_cos = ((quarter + 1) & 2) << 30;
    const Floats sin_value = swap ? c : s, cos_value = swap ? s : c;
    StorePartial(sin + begin, (Floats)((UInts)sin_value ^ negative_sin), count);
    StorePartial(cos + begin, (Floats)((UInts)cos_value ^ negative_cos), count);
  }
}

// Rotates the pairs (x1[i], x2[i]). Each is read before it is written: y may be x.
template <typename T>
void RotateHalves(const T* x1, const T* x2, const float* cos, const float* sin, int n, T* y1,
                  T* y2) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    AskAhead(x1 + i);
    AskAhead(x2 + i);
    const Floats a = Load(x1 + i), b = Load(x2 + i), c = Load(cos + i), s = Load(sin + i);
    Store(y1 + i, a * c - b * s);
    Store(y2 + i, b * c + a * s);
  }
  if (i < n) {
    const int rest = n - i;
    const Floats a = LoadPartial(x1 + i, rest), b = LoadPartial(x2 + i, rest);
    const Floats c = LoadPartial(cos + i, rest), s = LoadPartial(sin + i, rest);
    StorePartial(y1 + i, a * c - b * s, rest);
    StorePartial(y2 + i, b * c + a * s, rest);
  }
}

// Each lane and its neighbour in a pair trade places.
TF_OPS_INLINE Floats SwapPairs(Floats v) {
  typedef uint64_t Wide __attribute__((vector_size(4 * kLanes)));
  const Wide w = (Wide)v;
  return (Floats)(w << 32 | w >> 32);
}

// Rotates the pairs (x[2 i], x[2 i + 1]); cos2 holds each cosine twice, sin2 -sin, sin.
template <typename T>
void RotateInterleaved(const T* x, const float* cos2, const float* sin2, int n2, T* y) {
  int i = 0;
  for (; i + kLanes <= n2; i += kLanes) {
    AskAhead(x + i);
    const Floats v = Load(x + i);
    Store(y + i, v * Load(cos2 + i) + SwapPairs(v) * Load(sin2 + i));
  }
  if (i < n2) {
    const int rest = n2 - i;
    const Floats v = LoadPartial(x + i, rest);
    const Floats rotated =
        v * LoadPartial(cos2 + i, rest) + SwapPairs(v) * LoadPartial(sin2 + i, rest);
    StorePartial(y + i, rotated, rest);
  }
}

// Pairs [begin, begin + n) of each of `heads` heads, for n <= kPairsAtOnce.
template <typename T>
void RotateHeads(const RotaryProblem& p, const T* x, int64_t heads, int64_t begin, int n,
                 const float* cos, const float* sin, T* y) {
  float cos2[2 * kPairsAtOnce], sin2[2 * kPairsAtOnce];
  if (p.interleaved) {
    for (int i = 0; i < n; ++i) {
      cos2[2 * i] = cos2[2 * i + 1] = cos[i];
      sin2[2 * i] = -sin[i], sin2[2 * i + 1] = sin[i];
    }
  }
  for (int64_t h = 0; h < heads; ++h, x += p.head_dim, y += p.head_dim) {
    if (p.interleaved) {
      RotateInterleaved(x + 2 * begin, cos2, sin2, 2 * n, y + 2 * begin);
    } else {
      const int64_t other = p.pairs + begin;
      RotateHalves(x + begin, x + other, cos, sin, n, y + begin, y + other);
    }
  }
}

// One token: all heads of x and key.
template <typename T>
void RotaryToken(const RotaryProblem& p, int64_t token, int64_t position, int64_t table_row) {
  const int64_t size = p.heads * p.head_dim, key_size = p.key_heads * p.head_dim;
  const T *x = (const T*)p.x + token * size, *key = (const T*)p.key + token * key_size;
  T *y = (T*)p.y + token * size, *rotated_key = (T*)p.rotated_key + token * key_size;
  float cos[kPairsAtOnce], sin[kPairsAtOnce];
  for (int64_t begin = 0; begin < p.pairs; begin += kPairsAtOnce) {
    const int n = p.pairs - begin < kPairsAtOnce ? p.pairs - begin : kPairsAtOnce;
    if (p.cos) {
      const int64_t at = table_row * p.pairs + begin;
      for (int i = 0; i < n; ++i) {
        cos[i] = p.cos[at + i];
        sin[i] = p.inverse ? -p.sin[at + i] : p.sin[at + i];
      }
    } else {
      AnglesOf(position, p.turns + begin, n, p.inverse, cos, sin);
    }
    RotateHeads(p, x, p.heads, begin, n, cos, sin, y);
    RotateHeads(p, key, p.key_heads, begin, n, cos, sin, rotated_key);
  }
  const int64_t rest = p.head_dim - 2 * p.pairs;
  if (rest == 0) return;
  for (int64_t h = 0; h < p.heads + p.key_heads; ++h) {
    const bool of_key = h >= p.heads;
    const int64_t at = (of_key ? h - p.heads : h) * p.head_dim + 2 * p.pairs;
    const T* from = (of_key ? key : x) + at;
    T* to = (of_key ? rotated_key : y) + at;
    if (from != to) __builtin_memcpy(to, from, rest * sizeof(T));
  }
}
