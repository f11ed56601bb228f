// SPDX-License-Identifier: Apache-2.0
// RMS normalisation of rows of bfloat16, y = x scale / sqrt(mean(x^2) + epsilon), six times: the
// steps of docs/guide/steps.md.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace {

using bf16 = __nv_bfloat16;

// Step 1: a thread per row.
__global__ void OneThreadPerRow(const bf16* x, const bf16* scale, int64_t rows, int64_t cols,
                                float epsilon, bf16* y) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= rows) return;
  float squares = 0.0f;
  for (int64_t i = 0; i < cols; ++i) {
    const float value = float(x[row * cols + i]);
    squares += value * value;
  }
  const float rstd = rsqrtf(squares / cols + epsilon);
  for (int64_t i = 0; i < cols; ++i) {
    y[row * cols + i] = bf16(float(x[row * cols + i]) * rstd * float(scale[i]));
  }
}

// Step 2: a warp per row.

// The sum of the 32 values of a warp; every lane gets it.
__device__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  return value;
}

__global__ void OneWarpPerRow(const bf16* x, const bf16* scale, int64_t rows, int64_t cols,
                              float epsilon, bf16* y) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float squares = 0.0f;
  for (int64_t i = lane; i < cols; i += 32) {
    const float value = float(x[row * cols + i]);
    squares += value * value;
  }
  const float rstd = rsqrtf(WarpSum(squares) / cols + epsilon);
  for (int64_t i = lane; i < cols; i += 32) {
    y[row * cols + i] = bf16(float(x[row * cols + i]) * rstd * float(scale[i]));
  }
}

// Step 3: sixteen bytes a load.

// kVec elements that are loaded and stored by one instruction.
template <int kVec>
struct alignas(kVec * sizeof(bf16)) Vector {
  bf16 of[kVec];
};

template <int kVec>
__device__ float SumOfSquares(Vector<kVec> x) {
  float squares = 0.0f;
  for (int i = 0; i < kVec; ++i) squares += float(x.of[i]) * float(x.of[i]);
  return squares;
}

template <int kVec>
__device__ Vector<kVec> Scaled(Vector<kVec> x, float rstd, Vector<kVec> scale) {
  for (int i = 0; i < kVec; ++i) x.of[i] = bf16(float(x.of[i]) * rstd * float(scale.of[i]));
  return x;
}

template <int kVec>
__global__ void SixteenBytesPerLoad(const Vector<kVec>* x, const Vector<kVec>* scale, int64_t rows,
                                    int64_t cols, float epsilon, Vector<kVec>* y) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int64_t vectors = cols / kVec;
  float squares = 0.0f;
  for (int64_t v = lane; v < vectors; v += 32) squares += SumOfSquares(x[row * vectors + v]);
  const float rstd = rsqrtf(WarpSum(squares) / cols + epsilon);
  for (int64_t v = lane; v < vectors; v += 32) {
    y[row * vectors + v] = Scaled(x[row * vectors + v], rstd, scale[v]);
  }
}

// Step 4: the row in shared memory.

// The sum of the values of a block, of whole warps; every thread gets it.
__device__ float BlockSum(float value) {
  __shared__ float of_warp[32];
  value = WarpSum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warp[warp];
  return sum;
}

// A block has a row, of which the first `kept` vectors stay in shared memory.
template <int kVec>
__global__ void RowInSharedMemory(const Vector<kVec>* x, const Vector<kVec>* scale, int64_t kept,
                                  int64_t cols, float epsilon, Vector<kVec>* y) {
  extern __shared__ char shared[];
  Vector<kVec>* row = reinterpret_cast<Vector<kVec>*>(shared);
  const int64_t vectors = cols / kVec, base = blockIdx.x * vectors;
  float squares = 0.0f;
  for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    const Vector<kVec> value = x[base + v];
    if (v < kept) row[v] = value;
    squares += SumOfSquares(value);
  }
  const float rstd = rsqrtf(BlockSum(squares) / cols + epsilon);
  for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    y[base + v] = Scaled(v < kept ? row[v] : x[base + v], rstd, scale[v]);
  }
}

// Step 5: the row in registers.
template <int kVec, int kThreads, int kChunks>
__global__ void __launch_bounds__(kThreads)
    RowInRegisters(const Vector<kVec>* x, const Vector<kVec>* scale, int64_t cols, float epsilon,
                   Vector<kVec>* y) {
  const int64_t vectors = cols / kVec, base = blockIdx.x * vectors;
  Vector<kVec> value[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int v = threadIdx.x + c * kThreads;
    if (v < vectors) value[c] = x[base + v];
  }
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (threadIdx.x + c * kThreads < vectors) squares += SumOfSquares(value[c]);
  }
  const float rstd = rsqrtf(BlockSum(squares) / cols + epsilon);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int v = threadIdx.x + c * kThreads;
    if (v < vectors) y[base + v] = Scaled(value[c], rstd, scale[v]);
  }
}

// Step 6: all loads in flight.

// What lies beyond the row is zeros, selected instead of branched around.
template <int kVec, int kThreads, int kChunks>
__global__ void __launch_bounds__(kThreads)
    AllLoadsInFlight(const Vector<kVec>* x, const Vector<kVec>* scale, int64_t cols, float epsilon,
                     Vector<kVec>* y) {
  const int64_t vectors = cols / kVec, base = blockIdx.x * vectors;
  Vector<kVec> value[kChunks], weight[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int v = threadIdx.x + c * kThreads;
    value[c] = v < vectors ? x[base + v] : Vector<kVec>{};
    weight[c] = v < vectors ? scale[v] : Vector<kVec>{};
  }
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) squares += SumOfSquares(value[c]);
  const float rstd = rsqrtf(BlockSum(squares) / cols + epsilon);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int v = threadIdx.x + c * kThreads;
    value[c] = Scaled(value[c], rstd, weight[c]);
    if (v < vectors) y[base + v] = value[c];
  }
}

}  // namespace
