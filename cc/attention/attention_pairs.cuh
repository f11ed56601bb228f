// SPDX-License-Identifier: Apache-2.0
// The device code that all attention kernels share: who sees whom, scores, launches.
#pragma once

#include "cc/attention/attention_dropout.h"
#include "cc/attention/attention_gpu.h"
#include "cc/common/cuda.cuh"

namespace tf_ops {

constexpr int kMaxSeq = 1 << 29;  // positions, and sums of two of them, are int
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline int SeqLength(const int32_t* lengths, int64_t b, int64_t size) {
  return lengths ? min(max(lengths[b], 0), int(size)) : int(size);
}

// Scores are products times a positive factor, and no mask hides any. Kernels of such problems
// are compiled apart: what the others need does not fit into their registers.
inline bool IsPlain(const AttentionProblem& p) {
  return p.scale > 0.0f && p.soft_cap == 0.0f && !p.bias && !p.mask;
}

// The queries and keys of one batch row and head.
template <typename T, bool kPlain = false>
struct AttentionPairs {
  // Scores of 16-bit types are in base 2.
  static constexpr float kUnit = std::is_same_v<T, float> ? 1.0f : kLog2e;

  const AttentionProblem& p;
  int q_len, k_len, first, last;  // query i sees keys from i + first to i + last
  float inverse_cap;
  const bool* mask;
  const T* bias;

  __device__ AttentionPairs(const AttentionProblem& p, int64_t b, int64_t h) : p(p) {
    q_len = SeqLength(p.query_seq_lengths, b, p.seq_q);
    k_len = SeqLength(p.key_value_seq_lengths, b, p.seq_k);
    const int offset = p.bottom_right ? k_len - q_len : 0;
    first = p.window_left < 0 ? -(1 << 30) : offset - int(p.window_left);
    last = p.window_right < 0 ? 1 << 30 : offset + int(p.window_right);
    inverse_cap = 1.0f / p.soft_cap;
    SetHead(b, h);
  }

  __device__ void SetHead(int64_t b, int64_t h) {
    if constexpr (kPlain) return;
    mask = p.mask ? p.mask + b * p.mask_strides[0] + h * p.mask_strides[1] : nullptr;
    bias = p.bias ? static_cast<const T*>(p.bias) + b * p.bias_strides[0] + h * p.bias_strides[1]
                  : nullptr;
  }

  __device__ bool Visible(int i, int j) const {
    return i < q_len && j < k_len && j <= i + last && j >= i + first &&
           (kPlain || !mask || mask[i * p.mask_strides[2] + j * p.mask_strides[3]]);
  }

  // Keys [KeyBegin, KeyEnd) hold all that queries [i, i + rows) see; queries [QueryBegin,
  // QueryEnd) all that see keys [j, j + columns).
  __device__ int KeyBegin(int i) const { return max(0, i + first); }
  __device__ int KeyEnd(int i, int rows) const {
    const int end = min(i + rows, q_len);
    return end <= i ? 0 : max(0, min(k_len, end + last));
  }
  __device__ int QueryBegin(int j) const { return max(0, j - last); }
  __device__ int QueryEnd(int j, int columns) const { return min(q_len, j + columns - first); }

  // Whether all keys that query i may see are in one tile of `tile` keys.
  __device__ bool KeysInOneTile(int i, int tile) const {
    return KeyBegin(i) / tile == (KeyEnd(i, 1) - 1) / tile;
  }

  // Whether some query of [i, i + rows) does not see some key of [j, j + columns) ...
  __device__ bool HidesSome(int i, int rows, int j, int columns) const {
    return i + rows > q_len || j + columns > k_len || HidesValid(i, rows, j, columns);
  }
  // ... both below the lengths: what is above them was loaded as zeros.
  __device__ bool HidesValid(int i, int rows, int j, int columns) const {
    return (!kPlain && mask) || min(j + columns, k_len) - 1 > i + last || j < i + rows - 1 + first;
  }

  // The score, in 1 / kUnit; *slope is that of the cap. Only for i < seq_q, j < seq_k.
  __device__ float Score(float product, int i, int j, float* slope) const {
    float x = product * p.scale;
    *slope = 1.0f;
    if (p.soft_cap > 0.0f) {
      const float t = Tanh(x * inverse_cap);
      x = p.soft_cap * t;
      *slope = 1.0f - t * t;
    }
    if (bias) x += float(bias[i * p.bias_strides[2] + j * p.bias_strides[3]]);
    return x * kUnit;
  }

 private:
  static __device__ float Tanh(float x) {
    if constexpr (std::is_same_v<T, float>) return tanhf(x);
    return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
  }
};

// Which pairs of a batch row and head the dropout keeps, if there is one.
template <bool kDropout>
class PairDropout {
 public:
  __device__ PairDropout(const AttentionProblem& p, int64_t b, int64_t h) {
    if constexpr (!kDropout) return;
    key_ = DropoutKeyOf(p.seed);
    threshold_ = p.dropout_threshold;
    SetHead(p, b, h);
  }
  __device__ void SetHead(const AttentionProblem& p, int64_t b, int64_t h) {
    head_ = uint32_t(b * p.heads + h);
  }

  // Of query i and keys j to j + 3, a bit for each; j is a multiple of 4.
  __device__ uint32_t KeptOfFour(int i, int j) const {
    const PhiloxWords w = DropoutWords(key_, head_, uint32_t(i), uint32_t(j) / 4);
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) bits |= uint32_t(w.word[n] >= threshold_) << n;
    return bits;
  }

 private:
  DropoutKey key_;
  uint32_t head_, threshold_;
};

__device__ inline bool SeesOneKey(float delta) { return __float_as_uint(delta) == kOneKeyDelta; }

// AttentionRows of a problem: eight lanes to a row of `output`. With a key_tile, the delta of a
// query whose keys are in one such tile is left without do . o: the kernels that see the tile
// add the weighted mean of dp, whose rounding is that of the dp it is taken from.
template <typename T>
__global__ void __launch_bounds__(256)
    AttentionRowsKernel(const __grid_constant__ AttentionProblem p, const T* doutput,
                        const T* output, const float* lse, const float* dlse, bool aligned,
                        int key_tile, AttentionRow* rows, float* sink_terms) {
  const int64_t row = int64_t(blockIdx.x) * 32 + threadIdx.x / 8;  // [batch, seq_q, heads]
  const int64_t h = row % p.heads, i = row / p.heads % p.seq_q, b = row / p.heads / p.seq_q;
  if (b >= p.batch) return;
  const int dim = p.value_dim, lane = threadIdx.x % 8;
  constexpr int kVector = 16 / sizeof(T);
  const unsigned group = 0xffu << (threadIdx.x % 32 / 8 * 8);
  float sum = 0.0f;
  for (int begin = 0; begin < dim; begin += 8 * kVector) {
    const int d = begin + lane * kVector;
    struct alignas(16) Vector {
      T values[kVector];
    } x = {}, y = {};
    const T* from_x = doutput + row * dim + d;
    const T* from_y = output + row * dim + d;
    if (aligned && d < dim) {
      x = *reinterpret_cast<const Vector*>(from_x);
      y = *reinterpret_cast<const Vector*>(from_y);
    } else if (!aligned) {
      for (int e = 0; e < kVector; ++e) {
        x.values[e] = d + e < dim ? from_x[e] : T(0.0f);
        y.values[e] = d + e < dim ? from_y[e] : T(0.0f);
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      // In the order of SimtProducts: where one weight is 1 and o is v, do . o is the very do . v.
      for (int turn = 0; turn < 8; ++turn) {
        float next = sum;
        for (int e = 0; e < kVector; ++e) next = fmaf(x.values[e], y.values[e], next);
        sum = __shfl_sync(group, next, turn, 8);
      }
    } else {
      for (int e = 0; e < kVector; ++e) sum += float(x.values[e]) * float(y.values[e]);
    }
  }
  if constexpr (!std::is_same_v<T, float>) {
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(group, sum, step);
  }
  const AttentionPairs<T> pairs(p, b, h);
  const int begin = pairs.KeyBegin(int(i)), end = pairs.KeyEnd(int(i), 1);
  bool one_key = end - begin == 1;
  if (p.mask) {  // which most often shows two keys before long
    int seen = 0;
    for (int j = begin; j < end && seen < 2; j += 8) {
      const bool sees = j + lane < end && pairs.Visible(int(i), j + lane);
      seen += __popc(__ballot_sync(group, sees) & group);
    }
    one_key = seen == 1;
  }
  if (lane != 0) return;
  const int64_t at = (b * p.heads + h) * p.seq_q + i;
  const bool empty = lse[at] == -INFINITY || i >= pairs.q_len;
  const float of_lse = dlse ? dlse[at] : 0.0f;
  if (sink_terms) {
    // A query that is none has an output of 0, whatever its upstream gradient.
    const float weight = lse[at] == -INFINITY ? 0.0f : expf(p.sink[h] - lse[at]);
    sink_terms[at] = i >= pairs.q_len ? of_lse : -weight * (sum - of_lse);
  }
  one_key = one_key && of_lse == 0.0f && !p.sink;
  if (key_tile > 0 && pairs.KeysInOneTile(int(i), key_tile)) sum = 0.0f;
  const float delta = one_key ? __uint_as_float(kOneKeyDelta) : sum - of_lse;
  rows[at] = empty ? AttentionRow{INFINITY, 0.0f}
                   : AttentionRow{lse[at] * AttentionPairs<T>::kUnit, delta};
}

// dsink: a block per head sums its rows' terms.
static __global__ void __launch_bounds__(1024)
    SinkGradKernel(const __grid_constant__ AttentionProblem p, const float* terms, float* dsink) {
  __shared__ float sums[1024];
  const int64_t h = blockIdx.x;
  float sum = 0.0f;
  for (int64_t n = threadIdx.x; n < p.batch * p.seq_q; n += 1024) {
    sum += terms[(n / p.seq_q * p.heads + h) * p.seq_q + n % p.seq_q];
  }
  sums[threadIdx.x] = sum;
  for (int step = 512; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) dsink[h] = sums[0];
}

// A block's part in the gradient of the bias: one tile of rows x columns of it, and of what
// repeats it the steps [begin, end).
struct BiasGradTile {
  int64_t b, h, i, j;  // those of the bias; its repeated dimensions are 0
  int split;
  int64_t begin, end;
  bool over[4];  // which dimensions repeat
  int64_t steps[4];

  __device__ BiasGradTile(const AttentionProblem& p, const AttentionGradients& g, int rows,
                          int columns) {
    const int64_t blocks[4] = {p.batch, p.heads, (p.seq_q + rows - 1) / rows,
                               (p.seq_k + columns - 1) / columns};
    int64_t tiles[4], total = 1;
    for (int d = 0; d < 4; ++d) {
      over[d] = g.dbias_dims[d] == 1;
      tiles[d] = over[d] ? 1 : blocks[d];
      steps[d] = over[d] ? blocks[d] : 1;
      total *= steps[d];
    }
    int64_t index = blockIdx.x;
    split = index % g.splits;
    index /= g.splits;
    j = index % tiles[3] * columns;
    i = index / tiles[3] % tiles[2] * rows;
    h = index / (tiles[3] * tiles[2]) % tiles[1];
    b = index / (tiles[3] * tiles[2] * tiles[1]);
    const int64_t share = (total + g.splits - 1) / g.splits;
    begin = min(share * split, total);
    end = min(share * (split + 1), total);
  }

  // The batch row, head, first query and first key of a step.
  __device__ void At(int64_t step, int rows, int columns, int64_t* sb, int64_t* sh, int* si,
                     int* sj) const {
    *sj = int(j + step % steps[3] * columns);
    step /= steps[3];
    *si = int(i + step % steps[2] * rows);
    step /= steps[2];
    *sh = h + step % steps[1];
    *sb = b + step / steps[1];
  }

  // `tile` is float [rows][columns + 1] in shared memory, written and synchronised.
  template <int kRows, int kColumns, typename T>
  __device__ void Write(float* tile, const AttentionProblem& p, const AttentionGradients& g) const {
    constexpr int kStride = kColumns + 1;
    int rows = kRows, columns = kColumns;
    if (over[2]) {
      if (threadIdx.x < kColumns) {
        float sum = 0.0f;
        for (int r = 0; r < kRows; ++r) sum += tile[r * kStride + threadIdx.x];
        tile[threadIdx.x] = sum;
      }
      rows = 1;
      __syncthreads();
    }
    if (over[3]) {
      if (int(threadIdx.x) < rows) {
        float sum = 0.0f;
        for (int c = 0; c < kColumns; ++c) sum += tile[threadIdx.x * kStride + c];
        tile[threadIdx.x * kStride] = sum;
      }
      columns = 1;
      __syncthreads();
    }
    for (int n = threadIdx.x; n < rows * columns; n += blockDim.x) {
      const int r = n / columns, c = n % columns;
      if (i + r >= g.dbias_dims[2] || j + c >= g.dbias_dims[3]) continue;
      const int64_t at = b * p.bias_strides[0] + h * p.bias_strides[1] +
                         (i + r) * p.bias_strides[2] + (j + c) * p.bias_strides[3];
      if (g.splits == 1) {
        static_cast<T*>(g.dbias)[at] = T(tile[r * kStride + c]);
      } else {
        g.partial[split * g.dbias_size + at] = tile[r * kStride + c];
      }
    }
  }
};

// dbias = the sum of the partial ones, in order.
template <typename T>
__global__ void __launch_bounds__(256)
    BiasGradSumKernel(const float* partial, int64_t size, int splits, T* dbias) {
  const int64_t n = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (n >= size) return;
  float sum = 0.0f;
  for (int s = 0; s < splits; ++s) sum += partial[s * size + n];
  dbias[n] = T(sum);
}

inline int64_t BiasGradBlocks(const AttentionProblem& p, const AttentionGradients& g, int rows,
                              int columns) {
  const int64_t blocks[4] = {p.batch, p.heads, (p.seq_q + rows - 1) / rows,
                             (p.seq_k + columns - 1) / columns};
  int64_t tiles = g.splits;
  for (int d = 0; d < 4; ++d) tiles *= g.dbias_dims[d] == 1 ? 1 : blocks[d];
  return tiles;
}

// Launches `kernel` on `blocks` blocks, if any, with `shared_bytes` of dynamic shared memory.
template <typename... Params, typename... Args>
Status Launch(Gpu gpu, void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
              Args... args) {
  if (blocks == 0) return Ok();
  if (blocks > INT32_MAX) {
    return InvalidArgument("dot_product_attention: the problem has more than 2^31 tiles");
  }
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return Internal(std::string("dot_product_attention: ") + cudaGetErrorString(error));
    }
  }
  kernel<<<blocks, threads, shared_bytes, gpu.stream>>>(args...);
  return CudaStatus();
}

// The most dynamic shared memory that a block of the current device may have.
inline Status SharedMemoryLimit(int* bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return error == cudaSuccess ? Ok() : Internal(cudaGetErrorString(error));
}

// Whether every row of `dim` elements of T from `data` on is 16-byte aligned.
template <typename T>
bool RowsAligned(const void* data, int64_t dim) {
  return dim > 0 && (reinterpret_cast<uintptr_t>(data) | dim * sizeof(T)) % 16 == 0;
}

template <typename T>
Status LaunchRows(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g,
                  int key_tile = 0) {
  const int64_t count = p.batch * p.heads * p.seq_q;
  return Launch(gpu, AttentionRowsKernel<T>, (count + 31) / 32, 256, 0, p,
                static_cast<const T*>(g.doutput), static_cast<const T*>(g.output), g.lse, g.dlse,
                RowsAligned<T>(g.doutput, p.value_dim) && RowsAligned<T>(g.output, p.value_dim),
                key_tile, g.rows, g.sink_terms);
}

inline Status LaunchSinkGrad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g) {
  if (!p.sink) return Ok();
  return Launch(gpu, SinkGradKernel, p.heads, 1024, 0, p, g.sink_terms, g.dsink);
}

template <typename T>
Status LaunchBiasGradSum(Gpu gpu, const AttentionGradients& g) {
  if (g.splits == 1) return Ok();
  return Launch(gpu, BiasGradSumKernel<T>, (g.dbias_size + 255) / 256, 256, 0, g.partial,
                g.dbias_size, g.splits, static_cast<T*>(g.dbias));
}

}  // namespace tf_ops
