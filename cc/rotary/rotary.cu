// SPDX-License-Identifier: Apache-2.0
#include "cc/common/rows.cuh"
#include "cc/rotary/rotary.h"

namespace tf_ops {
namespace {

constexpr int kThreads = 256;
// Heads that share a thread's sines and cosines; their loads are in flight together.
constexpr int kHeads = 2;

// The formulas of rotary_simd.h.
__device__ void SineAndCosine(uint32_t phase, float* sin, float* cos) {
  const uint32_t quarter = (phase + 0x20000000u) >> 30;
  const float r = static_cast<float>(static_cast<int>(phase - (quarter << 30))) * 1.46291808e-9f;
  const float r2 = r * r;
  float s = r2 * -1.95172341e-4f + 8.33217768e-3f;
  s = s * r2 - 0.166666549f;
  s = r + r * (r2 * s);
  float c = r2 * 2.44383784e-5f - 1.38873669e-3f;
  c = c * r2 + 4.16666469e-2f;
  c = (1.0f - 0.5f * r2) + r2 * r2 * c;
  const bool swap = quarter & 1;
  *sin = __uint_as_float(__float_as_uint(swap ? c : s) ^ (quarter & 2) << 30);
  *cos = __uint_as_float(__float_as_uint(swap ? s : c) ^ ((quarter + 1) & 2) << 30);
}

// Entries [a, a + kVec) and [b, b + kVec) of a head: kVec pairs to rotate, or entries to copy, of
// which the second vector may lie beyond the head.
struct Unit {
  int64_t a, b;
  bool rotates, has_b;
};

template <int kVec, bool kInterleaved>
__device__ Unit UnitAt(const RotaryProblem& p, int64_t number) {
  const int64_t rotating = p.pairs / kVec;
  if (number < rotating) {
    // A vector that is interleaved holds whole pairs: neighbours may take neighbouring vectors.
    if (kInterleaved && kVec == 1) return {2 * number, 2 * number + 1, true, true};
    return {number * kVec, p.pairs + number * kVec, true, true};
  }
  const int64_t a = 2 * p.pairs + (number - rotating) * 2 * kVec;
  return {a, a + kVec, false, a + kVec < p.head_dim};
}

// The number of a unit's pair i.
template <int kVec, bool kInterleaved>
__device__ int64_t PairOf(const RotaryProblem& p, int64_t number, int i) {
  constexpr int kHalf = kVec / 2;
  if (!kInterleaved || kVec == 1) return number * kVec + i;
  return i < kHalf ? number * kHalf + i : p.pairs / 2 + number * kHalf + i - kHalf;
}

// The angles of a unit's pairs at a token.
template <int kVec, bool kInterleaved>
__device__ void Angles(const RotaryProblem& p, const uint64_t* turns, int64_t number, int64_t row,
                       int64_t at, float (&sin)[kVec], float (&cos)[kVec]) {
  const int64_t position = p.positions ? __ldg(p.positions + row * p.position_stride + at) : at;
  if (p.cos) {
    const int64_t table_row = p.table_by_position ? position : row * p.table_stride + at;
    const bool outside = p.table_by_position && uint64_t(position) >= uint64_t(p.table_rows);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int64_t entry = table_row * p.pairs + PairOf<kVec, kInterleaved>(p, number, i);
      sin[i] = outside ? NAN : __ldg(p.sin + entry);
      cos[i] = outside ? NAN : __ldg(p.cos + entry);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int64_t pair = PairOf<kVec, kInterleaved>(p, number, i);
      SineAndCosine(uint64_t(position) * turns[pair] >> 32, &sin[i], &cos[i]);
    }
  }
  if (p.inverse) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sin[i] = -sin[i];
  }
}

// A thread takes one unit of up to kHeads heads of a token, `groups` apart, so that the threads
// of a warp take heads that are neighbours. All loads come before all stores, which may go to
// the same memory.
template <typename T, int kVec, bool kInterleaved, typename Index>
__global__ void __launch_bounds__(kThreads)
    RotaryEmbeddingKernel(const __grid_constant__ RotaryProblem p, Index units, Index groups) {
  using Vector = Raw<T, kVec>;
  __shared__ uint64_t turns[RotaryProblem::kMaxPairs];
  const Index item = Index{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t number = item % units;
  const Unit unit = UnitAt<kVec, kInterleaved>(p, number);
  const int64_t group = item / units % groups, token = item / units / groups, step = groups;
  const int64_t heads = token < p.batch * p.seq ? p.heads + p.key_heads : 0;

  Vector a[kHeads], b[kHeads];
  const auto offset = [&](int64_t head) {
    return head < p.heads ? (token * p.heads + head) * p.head_dim
                          : (token * p.key_heads + head - p.heads) * p.head_dim;
  };
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    const int64_t head = group + k * step;
    if (head >= heads) continue;
    const T* x = static_cast<const T*>(head < p.heads ? p.x : p.key) + offset(head);
    a[k] = __ldcg(reinterpret_cast<const Vector*>(x + unit.a));
    if (unit.has_b) b[k] = __ldcg(reinterpret_cast<const Vector*>(x + unit.b));
  }
  if (!p.cos) {
    for (int i = threadIdx.x; i < p.pairs; i += kThreads) turns[i] = p.turns[i];
    __syncthreads();
  }
  if (heads == 0) return;
  float sin[kVec], cos[kVec];
  if (unit.rotates) {
    const Index row = Index(token) / Index(p.seq), at = Index(token) % Index(p.seq);
    Angles<kVec, kInterleaved>(p, turns, number, row, at, sin, cos);
  }
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    const int64_t head = group + k * step;
    if (head >= heads) continue;
    if (unit.rotates) {
      float u[kVec], v[kVec];
      Unpack<T, kVec>(a[k], u);
      Unpack<T, kVec>(b[k], v);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        constexpr bool kWhole = kInterleaved && kVec > 1;
        float& first = kWhole ? (2 * i < kVec ? u[2 * i % kVec] : v[2 * i % kVec]) : u[i];
        float& second =
            kWhole ? (2 * i < kVec ? u[(2 * i + 1) % kVec] : v[(2 * i + 1) % kVec]) : v[i];
        const float x1 = first, x2 = second;
        first = x1 * cos[i] - x2 * sin[i];
        second = x2 * cos[i] + x1 * sin[i];
      }
      a[k] = Pack<T, kVec>(u);
      b[k] = Pack<T, kVec>(v);
    }
    T* y = static_cast<T*>(head < p.heads ? p.y : p.rotated_key) + offset(head);
    *reinterpret_cast<Vector*>(y + unit.a) = a[k];
    if (unit.has_b) *reinterpret_cast<Vector*>(y + unit.b) = b[k];
  }
}

template <typename T, int kVec, bool kInterleaved>
Status Launch(Gpu gpu, const RotaryProblem& p) {
  const int64_t copied = p.head_dim - 2 * p.pairs;
  const int64_t units = p.pairs / kVec + (copied + 2 * kVec - 1) / (2 * kVec);
  const int64_t groups = (p.heads + p.key_heads + kHeads - 1) / kHeads;
  const int64_t items = p.batch * p.seq * groups * units, blocks = (items - 1) / kThreads + 1;
  if (blocks > INT32_MAX) return InvalidArgument("rotary_embedding: x is too large");
  // Divisions of 64 bits are slow.
  if (items <= UINT32_MAX - kThreads) {
    RotaryEmbeddingKernel<T, kVec, kInterleaved, uint32_t>
        <<<blocks, kThreads, 0, gpu.stream>>>(p, units, groups);
  } else {
    RotaryEmbeddingKernel<T, kVec, kInterleaved, uint64_t>
        <<<blocks, kThreads, 0, gpu.stream>>>(p, units, groups);
  }
  return CudaStatus();
}

}  // namespace

Status RunRotaryEmbedding(Gpu gpu, const RotaryProblem& p) {
  return DispatchType<float, half, bf16>("rotary_embedding", p.dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int kVec = 16 / sizeof(T);
    bool aligned = p.pairs % kVec == 0 && p.head_dim % kVec == 0;
    for (const void* pointer :
         {p.x, p.key, static_cast<const void*>(p.y), static_cast<const void*>(p.rotated_key)}) {
      aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    }
    if (p.interleaved) {
      return aligned ? Launch<T, kVec, true>(gpu, p) : Launch<T, 1, true>(gpu, p);
    }
    return aligned ? Launch<T, kVec, false>(gpu, p) : Launch<T, 1, false>(gpu, p);
  });
}

}  // namespace tf_ops
