// SPDX-License-Identifier: Apache-2.0
// The CPU loops of the gradients' sums, for one instruction set.

// out = a + b.
template <typename T>
void AddRow(const float* a, const T* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(out + i, Load(a + i) + Load(b + i));
  for (; i < n; ++i) out[i] = a[i] + float(b[i]);
}

// The same for a sum of bfloat16 with its rest, in place or not.
template <typename T>
void AddSplitRow(const bf16* sum, const int16_t* rest, const T* b, int64_t n, bf16* new_sum,
                 int16_t* new_rest) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? int(n - i) : kLanes;
    UShorts high = {}, low = {};
    __builtin_memcpy(&high, sum + i, 2 * count);
    __builtin_memcpy(&low, rest + i, 2 * count);
    const Ints signed_low = (Ints)(__builtin_convertvector(low, UInts) << 16) >> 16;
    const Floats old = (Floats)((__builtin_convertvector(high, UInts) << 16) + (UInts)signed_low);
    const Floats added = count == kLanes ? Load(b + i) : LoadPartial(b + i, count);
    const Floats v = old + added;
    const UInts bits = v == v ? (UInts)v : UInts{} + 0x7fc00000;
    const UInts rounded = (bits + 0x8000) >> 16;
    high = __builtin_convertvector(rounded, UShorts);
    low = __builtin_convertvector(bits - (rounded << 16), UShorts);
    __builtin_memcpy(new_sum + i, &high, 2 * count);
    __builtin_memcpy(new_rest + i, &low, 2 * count);
  }
}

template <typename From, typename To>
void ConvertRow(const From* from, int64_t n, To* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(to + i, Load(from + i));
  for (; i < n; ++i) to[i] = To(float(from[i]));
}
