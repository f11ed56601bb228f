// SPDX-License-Identifier: Apache-2.0
// The CPU loops over n elements, for one instruction set.

template <typename T>
void ScaledSquareElements(const T* x, float scale, int64_t n, T* y) {
  ForVectors(0, n, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const Floats v = Get(x + i, part);
    Put(y + i, scale * v * v, part);
  });
}

template <typename T>
void ScaledSquareGradElements(const T* dy, const T* x, float scale, int64_t n, T* dx) {
  ForVectors(0, n, [=](int64_t i, auto part) __attribute__((always_inline)) {
    Put(dx + i, Get(dy + i, part) * (2.0f * scale * Get(x + i, part)), part);
  });
}
