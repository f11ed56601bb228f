// SPDX-License-Identifier: Apache-2.0
// Vectors of floats for one instruction set: GCC's vector types, so that + - * / and
// comparisons are written as such, and what those lack. No include guard and no namespace:
// foreach_isa.h includes it once per instruction set, inside that set's namespace.
// `Floats` holds kLanes floats. Multiply-adds are fused where the machine can.

constexpr int kLanes = TF_OPS_ISA == 3 ? 16 : TF_OPS_ISA == 2 ? 8 : 4;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UInts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UShorts __attribute__((vector_size(2 * kLanes)));

#define TF_OPS_INLINE inline __attribute__((always_inline))

TF_OPS_INLINE Floats Set(float x) { return x - Floats{}; }

// kLanes elements from p, unaligned, widened to float.
TF_OPS_INLINE Floats Load(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
TF_OPS_INLINE Floats Load(const bf16* p) {
  UShorts v;
  __builtin_memcpy(&v, p, sizeof v);
  return (Floats)(__builtin_convertvector(v, UInts) << 16);
}
TF_OPS_INLINE Floats Load(const half* p) {
#if TF_OPS_ISA == 3
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif TF_OPS_ISA == 2
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// kLanes elements to p, unaligned, rounded to nearest even.
TF_OPS_INLINE void Store(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }
TF_OPS_INLINE void Store(bf16* p, Floats v) {
  const UInts u = (UInts)v;
  const UInts rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const UInts bits = v == v ? rounded : UInts{} + 0x7fc0;
  const UShorts narrow = __builtin_convertvector(bits, UShorts);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}
TF_OPS_INLINE void Store(half* p, Floats v) {
#if TF_OPS_ISA == 3
  _mm256_storeu_si256((__m256i*)p,
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif TF_OPS_ISA == 2
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = half(v[i]);
#endif
}

// Asks memory for what a loop that reads p, in order, wants that many bytes later. By itself it
// looks ahead no further than a page of 4 kB and idles while a loop computes.
constexpr int64_t kBytesAhead = 2048;
TF_OPS_INLINE void AskAhead(const void* p, int64_t bytes = kBytesAhead) {
  __builtin_prefetch((const void*)((uintptr_t)p + (bytes < kBytesAhead ? kBytesAhead : bytes)));
}

// The first n < kLanes elements; the other lanes read as `fill` and are not written.
#if TF_OPS_ISA == 3
TF_OPS_INLINE Floats LoadPartial(const float* p, int n, float fill = 0.0f) {
  return (Floats)_mm512_mask_loadu_ps((__m512)Set(fill), (1u << n) - 1, p);
}
TF_OPS_INLINE void StorePartial(float* p, Floats v, int n) {
  _mm512_mask_storeu_ps(p, (1u << n) - 1, (__m512)v);
}
template <typename T>
TF_OPS_INLINE Floats LoadPartial(const T* p, int n, float fill = 0.0f) {
  static_assert(sizeof(T) == 2);
  T lanes[kLanes];
  _mm256_storeu_si256((__m256i*)lanes,
                      _mm256_mask_loadu_epi16(_mm256_set1_epi16(T(fill).bits), (1u << n) - 1, p));
  return Load(lanes);
}
template <typename T>
TF_OPS_INLINE void StorePartial(T* p, Floats v, int n) {
  static_assert(sizeof(T) == 2);
  T lanes[kLanes];
  Store(lanes, v);
  _mm256_mask_storeu_epi16(p, (1u << n) - 1, _mm256_loadu_si256((const __m256i*)lanes));
}
#else
template <typename T>
TF_OPS_INLINE Floats LoadPartial(const T* p, int n, float fill = 0.0f) {
  T lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = T(fill);
  __builtin_memcpy(lanes, p, n * sizeof(T));
  return Load(lanes);
}
template <typename T>
TF_OPS_INLINE void StorePartial(T* p, Floats v, int n) {
  T lanes[kLanes];
  Store(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(T));
}
#endif

// As the float instructions do it: b where either is NaN.
TF_OPS_INLINE Floats Max(Floats a, Floats b) { return a > b ? a : b; }
TF_OPS_INLINE Floats Min(Floats a, Floats b) { return a < b ? a : b; }

// Each lane and the one kDistance away trade places.
template <int kDistance>
TF_OPS_INLINE Floats SwapLanes(Floats v) {
  Ints from{};
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ kDistance;
  return __builtin_shuffle(v, from);
}

// Adds, or takes the largest of, the lanes, in a fixed order.
TF_OPS_INLINE float ReduceSum(Floats v) {
  if constexpr (kLanes >= 16) v += SwapLanes<8>(v);
  if constexpr (kLanes >= 8) v += SwapLanes<4>(v);
  v += SwapLanes<2>(v);
  v += SwapLanes<1>(v);
  return v[0];
}
TF_OPS_INLINE float ReduceMax(Floats v) {
  if constexpr (kLanes >= 16) v = Max(v, SwapLanes<8>(v));
  if constexpr (kLanes >= 8) v = Max(v, SwapLanes<4>(v));
  v = Max(v, SwapLanes<2>(v));
  return Max(v, SwapLanes<1>(v))[0];
}

// exp(x) to 2 ulp for x <= 88, 0 below the normal numbers (-inf included), NaN for NaN: 2^n
// times a polynomial in the rest; n is rounded by adding 1.5 * 2^23.
TF_OPS_INLINE Floats Exp(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats scale = (Floats)(((UInts)shifted + 127) << 23);
  const Floats y = (p * (r * r) + r + 1.0f) * scale;
  return x < -87.3f ? Floats{} : y;
}

// The weight of a softmax: exp(x) for x <= 0, cheaper than Exp: 2^n times a polynomial in the rest
// of x log2(e). The relative error grows with -x to a few ulp, as the weight shrinks beside the
// largest, 1.
TF_OPS_INLINE Floats Weight(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f,
               r = x * 1.44269504f - n;
  Floats p = r * 1.53707101e-4f + 1.33998531e-3f;
  p = p * r + 9.61837326e-3f;
  p = p * r + 5.55032902e-2f;
  p = p * r + 2.40226485e-1f;
  p = p * r + 6.93147206e-1f;
  p = p * r + 1.0f;
#if TF_OPS_ISA == 3
  const __mmask16 not_below = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(not_below, (__m512)p, (__m512)n);
#else
  const Floats scaled = (Floats)((UInts)p + ((UInts)shifted << 23));
  return x < -87.3f ? Floats{} : scaled;
#endif
}

// tanh(x) to a few ulp: an odd rational function near 0 would lose nothing to cancellation;
// here 1 - 2 / (exp(2|x|) + 1) away from 0 and the Taylor series below 0.25.
TF_OPS_INLINE Floats Tanh(Floats x) {
  const Floats a = x < 0.0f ? -x : x, a2 = x * x;
  const Floats far = 1.0f - 2.0f / (Exp(2.0f * Min(a, Set(20.0f))) + 1.0f);
  Floats p = a2 * (62.0f / 2835) - 17.0f / 315;
  p = p * a2 + 2.0f / 15;
  p = p * a2 - 1.0f / 3;
  const Floats near = a + a * (a2 * p);
  const Floats y = a < 0.25f ? near : far;
  const Floats signed_y = x < 0.0f ? -y : y;
  return x == x ? signed_y : x;
}

// kLanes elements, and the first n < kLanes of them.
struct Whole {};
struct Part {
  int n;
};

template <typename T>
TF_OPS_INLINE Floats Get(const T* p, Whole) {
  return Load(p);
}
template <typename T>
TF_OPS_INLINE Floats Get(const T* p, Part part) {
  return LoadPartial(p, part.n);
}
template <typename T>
TF_OPS_INLINE void Put(T* p, Floats v, Whole) {
  Store(p, v);
}
template <typename T>
TF_OPS_INLINE void Put(T* p, Floats v, Part part) {
  StorePartial(p, v, part.n);
}

template <typename F>
TF_OPS_INLINE void ForVectors(int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, Whole{});
  if (i < end) f(i, Part{int(end - i)});
}
