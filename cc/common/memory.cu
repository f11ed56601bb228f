// SPDX-License-Identifier: Apache-2.0
#include "cc/common/cuda.cuh"
#include "cc/common/memory.h"

namespace tf_ops {

Status Fill(const Gpu& gpu, void* memory, int byte, int64_t bytes) {
  if (bytes > 0) cudaMemsetAsync(memory, byte, bytes, gpu.stream);
  return CudaStatus();
}

Status Read(const Gpu& gpu, const void* memory, int64_t bytes, void* host) {
  cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, gpu.stream);
  cudaStreamSynchronize(gpu.stream);
  return CudaStatus();
}

}  // namespace tf_ops
