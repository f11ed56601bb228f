// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention with an online softmax; the scores are never in memory.
//
//   s_ij = cap(scale q_i . k_j) + bias_ij,   cap(x) = c tanh(x / c), or x where soft_cap is 0
//                                            a scale of NaN is 1 / sqrt(head_dim)
//   lse_i = log(exp(sink_h) + sum over visible j of exp(s_ij))
//   o_i   = sum over visible j of w_ij p_ij v_j,   p_ij = exp(s_ij - lse_i)
//
// sink_h, a logit of each head, is in the sum where it is given. w_ij is 1, or, under a
// dropout_rate, 0 for that share of the pairs and 1 / (1 - dropout_rate) for the others;
// attention_dropout.h says for which. lse is without it.
//
// Gradients, with do and dlse those of o and lse:
//
//   dv_j    = sum_i w_ij p_ij do_i
//   dbias   = ds_ij = p_ij (w_ij do_i . v_j - delta_i),   delta_i = do_i . o_i - dlse_i
//   dx_ij   = ds_ij (1 - (cap(x_ij) / c)^2) scale
//   dq_i    = sum_j dx_ij k_j,   dk_j = sum_i dx_ij q_i
//   dsink_h = sum over batch rows and i of -exp(sink_h - lse_i) delta_i
//
// Visible: j < key length, i < query length (of the batch row; the lengths default to the
// sizes and are clamped into [0, size]), mask_ij, and
//
//   -window_left <= j - i - offset <= window_right
//
// where -1 stands for no bound, and is_causal makes the right one 0. offset is 0, or, under
// bottom_right, key length - query length. A row that sees nothing has o = 0, lse = -inf, or
// sink_h, and no gradient but that of sink_h, dlse_i. What is invisible to a row never enters
// its arithmetic, so that NaN or Inf there stays there.
//
// Shapes: query [batch, seq_q, heads, head_dim], key [batch, seq_k, kv_heads, head_dim],
// value [batch, seq_k, kv_heads, value_dim], output [batch, seq_q, heads, value_dim], all of
// one dtype (float32, float16, bfloat16); head h uses key head h / (heads / kv_heads).
// bias (that dtype) and mask (bool) are rank 4 and broadcast to [batch, heads, seq_q,
// seq_k]; lengths are int32 [batch]; lse, dlse are float32 [batch, heads, seq_q]; sink, dsink
// are float32 [heads], seed int64 [2]. bias, mask, lengths, dlse, sink and, without a
// dropout_rate, seed are optional: a tensor of shape [0] leaves one out. head_dim and value_dim
// are at most 256. Arithmetic is in float32, with 16-bit operands of the matrix products.
// No output aliases an input. Every result is the same bit for bit at each call.
#pragma once

#include <string>

#include "cc/common/workspace.h"

namespace tf_ops {

constexpr int kMaxHeadDim = 256;

Status DotProductAttention(Cpu cpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, Workspace* workspace);
Status DotProductAttention(Gpu gpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, Workspace* workspace);

Status DotProductAttentionGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView sink, TensorView seed, TensorView output, TensorView lse,
                               float scale, float soft_cap, bool is_causal, bool bottom_right,
                               int64_t window_left, int64_t window_right, float dropout_rate,
                               TensorView dquery, TensorView dkey, TensorView dvalue,
                               TensorView dsink, Workspace* workspace);
Status DotProductAttentionGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView sink, TensorView seed, TensorView output, TensorView lse,
                               float scale, float soft_cap, bool is_causal, bool bottom_right,
                               int64_t window_left, int64_t window_right, float dropout_rate,
                               TensorView dquery, TensorView dkey, TensorView dvalue,
                               TensorView dsink, Workspace* workspace);

// The gradient of the bias alone, summed over what was broadcast: an op of its own, so that a
// bias that is not trained costs nothing. The scores are computed once more.
Status DotProductAttentionBiasGrad(Cpu cpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, Workspace* workspace);
Status DotProductAttentionBiasGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, Workspace* workspace);

// What both devices compute with. Plain data: a CUDA kernel takes it by value. All tensors
// are dense, [batch, seq, heads, dim]; bias and mask strides are 0 where they broadcast.
struct AttentionProblem {
  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim;
  const void *query, *key, *value, *bias;
  const bool* mask;
  const int32_t *query_seq_lengths, *key_value_seq_lengths;
  int64_t bias_strides[4], mask_strides[4];  // of batch, head, query, key; in elements
  float scale, soft_cap;
  bool is_causal, bottom_right;       // is_causal: window_right is 0
  int64_t window_left, window_right;  // -1, or less than the sequence
  const float* sink;                  // [heads], or null
  // Kept are the pairs whose word of attention_dropout.h is at least the threshold, times
  // keep_scale; a threshold of 0 keeps all, and then seed is null.
  uint32_t dropout_threshold;
  float keep_scale;
  const int64_t* seed;
};

// Checks what the forward launchers take, and describes it.
Status DescribeAttention(const TensorView& query, const TensorView& key, const TensorView& value,
                         const TensorView& bias, const TensorView& mask,
                         const TensorView& query_seq_lengths,
                         const TensorView& key_value_seq_lengths, const TensorView& sink,
                         const TensorView& seed, float scale, float soft_cap, bool is_causal,
                         bool bottom_right, int64_t window_left, int64_t window_right,
                         float dropout_rate, const TensorView& output, const TensorView& lse,
                         AttentionProblem* problem);
// Also checks what the gradients take.
Status DescribeAttentionGrad(const TensorView& doutput, const TensorView& dlse,
                             const TensorView& query, const TensorView& key,
                             const TensorView& value, const TensorView& bias,
                             const TensorView& mask, const TensorView& query_seq_lengths,
                             const TensorView& key_value_seq_lengths, const TensorView& sink,
                             const TensorView& seed, const TensorView& output,
                             const TensorView& lse, float scale, float soft_cap, bool is_causal,
                             bool bottom_right, int64_t window_left, int64_t window_right,
                             float dropout_rate, AttentionProblem* problem);

// Workspaces: functions of the ops' inputs and attributes.
void DotProductAttentionCpuWorkspace(TensorView query, TensorView key, TensorView value,
                                     TensorView bias, TensorView mask, TensorView query_seq_lengths,
                                     TensorView key_value_seq_lengths, TensorView sink,
                                     TensorView seed, float scale, float soft_cap, bool is_causal,
                                     bool bottom_right, int64_t window_left, int64_t window_right,
                                     float dropout_rate, Workspace* workspace);
void DotProductAttentionGpuWorkspace(TensorView query, TensorView key, TensorView value,
                                     TensorView bias, TensorView mask, TensorView query_seq_lengths,
                                     TensorView key_value_seq_lengths, TensorView sink,
                                     TensorView seed, float scale, float soft_cap, bool is_causal,
                                     bool bottom_right, int64_t window_left, int64_t window_right,
                                     float dropout_rate, Workspace* workspace);
void DotProductAttentionGradCpuWorkspace(
    TensorView doutput, TensorView dlse, TensorView query, TensorView key, TensorView value,
    TensorView bias, TensorView mask, TensorView query_seq_lengths,
    TensorView key_value_seq_lengths, TensorView sink, TensorView seed, TensorView output,
    TensorView lse, float scale, float soft_cap, bool is_causal, bool bottom_right,
    int64_t window_left, int64_t window_right, float dropout_rate, Workspace* workspace);
void DotProductAttentionGradGpuWorkspace(
    TensorView doutput, TensorView dlse, TensorView query, TensorView key, TensorView value,
    TensorView bias, TensorView mask, TensorView query_seq_lengths,
    TensorView key_value_seq_lengths, TensorView sink, TensorView seed, TensorView output,
    TensorView lse, float scale, float soft_cap, bool is_causal, bool bottom_right,
    int64_t window_left, int64_t window_right, float dropout_rate, Workspace* workspace);
void DotProductAttentionBiasGradCpuWorkspace(
    TensorView doutput, TensorView dlse, TensorView query, TensorView key, TensorView value,
    TensorView bias, TensorView mask, TensorView query_seq_lengths,
    TensorView key_value_seq_lengths, TensorView sink, TensorView seed, TensorView output,
    TensorView lse, float scale, float soft_cap, bool is_causal, bool bottom_right,
    int64_t window_left, int64_t window_right, float dropout_rate, Workspace* workspace);
void DotProductAttentionBiasGradGpuWorkspace(
    TensorView doutput, TensorView dlse, TensorView query, TensorView key, TensorView value,
    TensorView bias, TensorView mask, TensorView query_seq_lengths,
    TensorView key_value_seq_lengths, TensorView sink, TensorView seed, TensorView output,
    TensorView lse, float scale, float soft_cap, bool is_causal, bool bottom_right,
    int64_t window_left, int64_t window_right, float dropout_rate, Workspace* workspace);

}  // namespace tf_ops
