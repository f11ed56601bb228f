// SPDX-License-Identifier: Apache-2.0
// The CPU loops over elements, for one instruction set.

// f(x), and f'(x) in *derivative; whoever needs one of them pays for no other.
template <Activation kActivation>
TF_OPS_INLINE Floats Activate(Floats x, Floats* derivative) {
  if constexpr (kActivation == Activation::kRelu) {
    *derivative = x > 0.0f ? Set(1.0f) : Floats{};
    return x < 0.0f ? Floats{} : x;  // NaN stays
  } else if constexpr (kActivation == Activation::kGelu) {
    // Phi(-|x|) = t P(t) exp(-x^2 / 2), t = 1 / (1 + 0.35 |x|): the polynomial is within 4e-8
    // of it, relatively, a least-squares fit reweighted until the errors were even.
    const Floats density = Exp(x * x * -0.5f);
    const Floats t = 1.0f / (1.0f + 0.35f * (x < 0.0f ? -x : x));
    Floats p = t * -0.0291259638f + 0.143872698f;
    p = p * t - 0.255505481f;
    p = p * t + 0.158930286f;
    p = p * t - 0.022937782f;
    p = p * t + 0.105433189f;
    p = p * t + 0.119852379f;
    p = p * t + 0.139859089f;
    p = p * t + 0.139621569f;
    const Floats tail = p * t * density;
    const Floats phi = x < 0.0f ? tail : 1.0f - tail;
    *derivative = phi + x * (density * 0.398942280f);
    return x * phi;
  } else {
    // exp would overflow below -88, where the sigmoid is no normal number either.
    constexpr bool kTanh = kActivation == Activation::kGeluTanh;
    const Floats x2 = kTanh ? x * x : x;
    const Floats u = kTanh ? 1.59576912f * x * (1.0f + 0.044715f * x2) : x;
    const Floats e = Exp(Min(Set(88.0f), -u));  // NaN stays
    const Floats s = u < -88.0f ? Floats{} : 1.0f / (1.0f + e);
    const Floats slope = s * (e * s);  // e s = 1 - s without cancellation
    if constexpr (kActivation == Activation::kSigmoid) {
      *derivative = slope;
      return s;
    } else if constexpr (kActivation == Activation::kSilu) {
      *derivative = s + x * slope;
    } else {
      // Beyond x^2 = 1e4 the slope is 0, and must not meet an infinite factor.
      const Floats du = 1.59576912f * (1.0f + 0.134145f * Min(x2, Set(1e4f)));
      *derivative = s + x * slope * du;
    }
    return x * s;
  }
}

template <typename T, Activation kActivation>
void GatedLinearUnitElements(const T* gate, const T* up, int64_t n, T* y) {
  Floats unused;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    AskAhead(gate + i);
    AskAhead(up + i);
    Store(y + i, Activate<kActivation>(Load(gate + i), &unused) * Load(up + i));
  }
  if (i < n) {
    const Floats g = LoadPartial(gate + i, n - i), u = LoadPartial(up + i, n - i);
    StorePartial(y + i, Activate<kActivation>(g, &unused) * u, n - i);
  }
}

template <typename T, Activation kActivation>
void GatedLinearUnitGradElements(const T* dy, const T* gate, const T* up, int64_t n, T* dgate,
                                 T* dup) {
  Floats derivative;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    AskAhead(dy + i);
    AskAhead(gate + i);
    AskAhead(up + i);
    const Floats g = Load(dy + i), u = Load(up + i);
    const Floats value = Activate<kActivation>(Load(gate + i), &derivative);
    Store(dgate + i, g * u * derivative);
    Store(dup + i, g * value);
  }
  if (i < n) {
    const Floats g = LoadPartial(dy + i, n - i), u = LoadPartial(up + i, n - i);
    const Floats value = Activate<kActivation>(LoadPartial(gate + i, n - i), &derivative);
    StorePartial(dgate + i, g * u * derivative, n - i);
    StorePartial(dup + i, g * value, n - i);
  }
}
