// SPDX-License-Identifier: Apache-2.0
// Kernels with one fault each, to see that a sanitizer catches it: runner.py --plant.
#include <cstdint>

__global__ void OutOfBoundsKernel(float* x, int n) { x[threadIdx.x + 1] = float(n); }

__global__ void RaceKernel(float* x, int n) {
  __shared__ float shared[256];
  shared[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = shared[(threadIdx.x + 32) % n];  // no barrier since the write
}

__global__ void UninitializedKernel(float* x, float* never_written) {
  x[threadIdx.x] = never_written[threadIdx.x];
}

__global__ void BarrierKernel(float* x) {
  if (threadIdx.x < 40) __syncthreads();  // not all threads of the block arrive
  x[threadIdx.x] = 0.0f;
}

extern "C" void out_of_bounds(uint64_t x, int n) {
  OutOfBoundsKernel<<<1, n>>>(reinterpret_cast<float*>(x), n);
}
extern "C" void race(uint64_t x, int n) { RaceKernel<<<1, n>>>(reinterpret_cast<float*>(x), n); }
extern "C" void uninitialized(uint64_t x, int n) {
  float* never_written;
  if (cudaMalloc(&never_written, n * sizeof(float)) != cudaSuccess) return;
  UninitializedKernel<<<1, n>>>(reinterpret_cast<float*>(x), never_written);
}
extern "C" void barrier(uint64_t x, int n) { BarrierKernel<<<1, n>>>(reinterpret_cast<float*>(x)); }
