// SPDX-License-Identifier: Apache-2.0
// The CPU loops of the gradients' sums, for one instruction set.

// out = a + b.
template <typename T>
void AddRow(const float* a, const T* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(out + i, Load(a + i) + Load(b + i));
  for (; i < n; ++i) out[i] = a[i] + float(b[i]);
}

template <typename From, typename To>
void ConvertRow(const From* from, int64_t n, To* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(to + i, Load(from + i));
  for (; i < n; ++i) to[i] = To(float(from[i]));
}
