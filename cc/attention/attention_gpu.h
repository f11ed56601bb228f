// SPDX-License-Identifier: Apache-2.0
// What the GPU side of attention shares between its files. No CUDA header here: the sizes of
// workspaces are asked of CPU builds as well.
#pragma once

#include <algorithm>

#include "cc/attention/attention.h"

namespace tf_ops {

// Of a query: its log-sum-exp, inf where nothing is visible, so that exp(s - lse) is 0; and
// delta. For 16-bit types the first is in base 2.
struct alignas(8) AttentionRow {
  float lse, delta;
};

// The delta, a NaN of its own, of a query that sees one key only, no sink, and whose dlse is 0: p
// is 1 and ds 0 then, whatever rounding leaves of do . v - do . o. Such a query is in tiles that
// hide something from it, so that only the code for those has to know.
constexpr uint32_t kOneKeyDelta = 0x7fc0a11e;

struct AttentionGradients {
  const void *doutput, *output;
  const float *lse, *dlse;
  AttentionRow* rows;  // [batch, heads, seq_q]
  float* sink_terms;   // [batch, heads, seq_q], whose sum dsink is; with a sink only
  float* dsink;
  char* key_masks;  // of Sm90KeyMaskBytes
  void *dquery, *dkey, *dvalue;
  // The gradient of the bias is summed by `splits` blocks per tile: to `dbias` where that is 1,
  // else to partial [splits, dbias_size].
  void* dbias;
  int64_t dbias_dims[4], dbias_size;
  int splits;
  float* partial;
};

// The kernels of one type and padded head_dim; each is compiled in a file of instances/.
template <typename T, int kDim>
struct TensorCoreAttention {  // half, bf16
  static Status Forward(Gpu gpu, const AttentionProblem& p, void* output, float* lse);
  static Status Grad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g);
  static Status BiasGrad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g);
};
template <int kDim>
struct Float32Attention {
  static Status Forward(Gpu gpu, const AttentionProblem& p, void* output, float* lse);
  static Status Grad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g);
  static Status BiasGrad(Gpu gpu, const AttentionProblem& p, const AttentionGradients& g);
};

// A small bias repeats over many scores. Several blocks then share a tile of its gradient, so
// that about 512 run: a figure of no device in particular, for sums are to be the same on all.
inline int BiasGradSplits(const int64_t (&bias_dims)[4], const int64_t (&scores_dims)[4]) {
  int64_t tiles = 1, steps = 1;
  for (int i = 0; i < 4; ++i) {
    const int64_t size = i < 2 ? 1 : 64;
    const int64_t blocks = (scores_dims[i] + size - 1) / size;
    (bias_dims[i] == 1 ? steps : tiles) *= blocks;
  }
  return int(std::max<int64_t>(1, std::min<int64_t>(steps, 512 / std::max<int64_t>(tiles, 1))));
}

inline int64_t AlignedBytes(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// What the kernels for sm_90 make of a mask that is the same for all heads and queries: whole tiles
// of keys in bits, and a few words for each batch row.
inline int64_t Sm90MaskWords(int64_t seq_k) { return (seq_k + 128 + 31) / 32; }
inline int64_t Sm90KeyMaskBytes(const TensorView& mask, int64_t batch, int64_t seq_k) {
  if (!mask.present() || mask.dims[1] != 1 || mask.dims[2] != 1) return 0;
  return AlignedBytes(12 * batch) + AlignedBytes(4 * batch * Sm90MaskWords(seq_k));
}
inline char* TakeKeyMasks(const TensorView& mask, int64_t batch, int64_t seq_k,
                          Workspace* workspace) {
  return workspace->Take<char>("key masks", {Sm90KeyMaskBytes(mask, batch, seq_k)});
}

// What the gradients take of their workspaces.
inline void TakeGradWorkspace(const TensorView& lse, const TensorView& sink, const TensorView& mask,
                              int64_t seq_k, Workspace* workspace, AttentionGradients* g) {
  // Whole tiles of 128, as attention_sm90_backward.cuh wants them.
  const int64_t padded_queries = (lse.dims[2] + 127) / 128 * 128;
  g->rows = workspace->Take<AttentionRow>("rows", {lse.dims[0], lse.dims[1], padded_queries});
  if (sink.present()) g->sink_terms = workspace->Take<float>("sink terms", {lse.size()});
  g->key_masks = TakeKeyMasks(mask, lse.dims[0], seq_k, workspace);
}
inline void TakeBiasGradWorkspace(const TensorView& lse, const TensorView& bias, int64_t seq_k,
                                  Workspace* workspace, AttentionGradients* g) {
  const int64_t scores_dims[4] = {lse.dims[0], lse.dims[1], lse.dims[2], seq_k};
  std::copy_n(bias.dims.begin(), 4, g->dbias_dims);
  g->dbias_size = bias.size();
  g->splits = BiasGradSplits(g->dbias_dims, scores_dims);
  g->rows = workspace->Take<AttentionRow>("rows", {lse.size()});
  if (g->splits > 1) g->partial = workspace->Take<float>("partial", {g->splits, g->dbias_size});
}

}  // namespace tf_ops
