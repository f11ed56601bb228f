// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "cc/attention/attention_decode.h"
#include "cc/attention/attention_gpu.h"

namespace tf_ops {
namespace {

constexpr double kTwoTo32 = 4294967296.0;

Status Error(const std::string& message) {
  return InvalidArgument("dot_product_attention: " + message);
}

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.dims[i]);
  return text + "]";
}

bool HasShape(const TensorView& view, std::initializer_list<int64_t> dims) {
  if (view.rank != int(dims.size())) return false;
  int i = 0;
  for (int64_t dim : dims) {
    if (view.dims[i++] != dim) return false;
  }
  return true;
}

// The strides with which `view`, of rank 4, broadcasts to `dims`; 0 where it repeats.
Status BroadcastStrides(const char* name, const TensorView& view, const int64_t (&dims)[4],
                        int64_t (&strides)[4]) {
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    if (view.rank != 4 || (view.dims[i] != dims[i] && view.dims[i] != 1)) {
      return Error(std::string(name) + " is " + ShapeOf(view) +
                   "; it must broadcast to [batch, heads, seq_q, seq_k] = [" +
                   std::to_string(dims[0]) + ", " + std::to_string(dims[1]) + ", " +
                   std::to_string(dims[2]) + ", " + std::to_string(dims[3]) + "]");
    }
    strides[i] = view.dims[i] == 1 ? 0 : stride;
    stride *= view.dims[i];
  }
  return Ok();
}

Status CheckLengths(const char* name, const TensorView& lengths, int64_t batch) {
  if (!lengths.present()) return Ok();
  if (lengths.dtype != DType::kInt32 || !HasShape(lengths, {batch})) {
    return Error(std::string(name) + " is " + ShapeOf(lengths) + "; it must be int32 [" +
                 std::to_string(batch) + "]");
  }
  return Ok();
}

}  // namespace

Status DescribeAttention(const TensorView& query, const TensorView& key, const TensorView& value,
                         const TensorView& bias, const TensorView& mask,
                         const TensorView& query_seq_lengths,
                         const TensorView& key_value_seq_lengths, const TensorView& sink,
                         const TensorView& seed, float scale, float soft_cap, bool is_causal,
                         bool bottom_right, int64_t window_left, int64_t window_right,
                         float dropout_rate, const TensorView& output, const TensorView& lse,
                         AttentionProblem* problem) {
  if (query.rank != 4 || key.rank != 4 || value.rank != 4) {
    return Error("query, key and value must have rank 4; they are " + ShapeOf(query) + ", " +
                 ShapeOf(key) + " and " + ShapeOf(value));
  }
  AttentionProblem& p = *problem;
  p = {};
  p.batch = query.dims[0];
  p.seq_q = query.dims[1];
  p.heads = query.dims[2];
  p.head_dim = query.dims[3];
  p.seq_k = key.dims[1];
  p.kv_heads = key.dims[2];
  p.value_dim = value.dims[3];
  if (!HasShape(key, {p.batch, p.seq_k, p.kv_heads, p.head_dim})) {
    return Error("key is " + ShapeOf(key) + "; beside query " + ShapeOf(query) +
                 " it must be [batch, seq_k, kv_heads, head_dim]");
  }
  if (!HasShape(value, {p.batch, p.seq_k, p.kv_heads, p.value_dim})) {
    return Error("value is " + ShapeOf(value) + "; beside key " + ShapeOf(key) +
                 " it must be [batch, seq_k, kv_heads, value_dim]");
  }
  if (p.kv_heads == 0 ? p.heads != 0 : p.heads % p.kv_heads != 0) {
    return Error("query has " + std::to_string(p.heads) + " heads, key and value " +
                 std::to_string(p.kv_heads) + "; the first must be a multiple of the second");
  }
  if (p.head_dim > kMaxHeadDim || p.value_dim > kMaxHeadDim) {
    return Error("head_dim is " + std::to_string(p.head_dim) + " and value_dim " +
                 std::to_string(p.value_dim) + "; the limit is " + std::to_string(kMaxHeadDim));
  }
  if (query.dtype != key.dtype || query.dtype != value.dtype || query.dtype != output.dtype ||
      (query.dtype != DType::kFloat32 && query.dtype != DType::kFloat16 &&
       query.dtype != DType::kBFloat16)) {
    return Error("query, key and value must be of one dtype: float32, float16 or bfloat16");
  }
  const int64_t scores[4] = {p.batch, p.heads, p.seq_q, p.seq_k};
  if (bias.present()) {
    if (bias.dtype != query.dtype) return Error("bias must be of the dtype of query");
    if (Status s = BroadcastStrides("bias", bias, scores, p.bias_strides); !s.ok()) return s;
  }
  if (mask.present()) {
    if (mask.dtype != DType::kBool) return Error("mask must be bool");
    if (Status s = BroadcastStrides("mask", mask, scores, p.mask_strides); !s.ok()) return s;
  }
  if (Status s = CheckLengths("query_seq_lengths", query_seq_lengths, p.batch); !s.ok()) return s;
  if (Status s = CheckLengths("key_value_seq_lengths", key_value_seq_lengths, p.batch); !s.ok()) {
    return s;
  }
  if (sink.present() && (sink.dtype != DType::kFloat32 || !HasShape(sink, {p.heads}))) {
    return Error("sink is " + ShapeOf(sink) + "; it must be float32 [" + std::to_string(p.heads) +
                 "], the heads of query");
  }
  if (!(dropout_rate >= 0.0f && dropout_rate < 1.0f)) {
    return Error("dropout_rate is " + std::to_string(dropout_rate) + "; it must be in [0, 1)");
  }
  if (dropout_rate > 0.0f && !seed.present()) return Error("a dropout_rate wants a seed");
  if (seed.present() && (seed.dtype != DType::kInt64 || !HasShape(seed, {2}))) {
    return Error("seed is " + ShapeOf(seed) + "; it must be int64 [2]");
  }
  if (window_left < -1 || window_right < -1) {
    return Error("the window is (" + std::to_string(window_left) + ", " +
                 std::to_string(window_right) + "); -1, which hides nothing, is the least");
  }
  if (!HasShape(output, {p.batch, p.seq_q, p.heads, p.value_dim}) ||
      !HasShape(lse, {p.batch, p.heads, p.seq_q}) || lse.dtype != DType::kFloat32) {
    return Error("output is " + ShapeOf(output) + " and lse " + ShapeOf(lse) +
                 "; they must be [batch, seq_q, heads, value_dim] and float32 [batch, heads, "
                 "seq_q]");
  }
  if (!(soft_cap >= 0.0f) || soft_cap > 3e38f) {
    return Error("attn_logits_soft_cap must be finite and not negative");
  }
  p.query = query.data;
  p.key = key.data;
  p.value = value.data;
  p.bias = bias.present() ? bias.data : nullptr;
  p.mask = mask.present() ? mask.as<const bool>() : nullptr;
  p.query_seq_lengths =
      query_seq_lengths.present() ? query_seq_lengths.as<const int32_t>() : nullptr;
  p.key_value_seq_lengths =
      key_value_seq_lengths.present() ? key_value_seq_lengths.as<const int32_t>() : nullptr;
  p.scale = std::isnan(scale) ? 1.0f / std::sqrt(float(std::max<int64_t>(p.head_dim, 1))) : scale;
  p.soft_cap = soft_cap;
  p.bottom_right = bottom_right;
  // A window over the whole of a sequence is none.
  p.window_left = window_left < (bottom_right ? p.seq_k : p.seq_q) ? window_left : -1;
  p.window_right = window_right < (bottom_right ? p.seq_q : p.seq_k) ? window_right : -1;
  if (is_causal) p.window_right = 0;
  p.is_causal = p.window_right == 0;
  p.sink = sink.present() ? sink.as<const float>() : nullptr;
  p.dropout_threshold = uint32_t(std::llround(double(dropout_rate) * kTwoTo32));
  p.keep_scale = float(kTwoTo32 / (kTwoTo32 - double(p.dropout_threshold)));
  p.seed = p.dropout_threshold ? seed.as<const int64_t>() : nullptr;
  return Ok();
}

Status DescribeAttentionGrad(const TensorView& doutput, const TensorView& dlse,
                             const TensorView& query, const TensorView& key,
                             const TensorView& value, const TensorView& bias,
                             const TensorView& mask, const TensorView& query_seq_lengths,
                             const TensorView& key_value_seq_lengths, const TensorView& sink,
                             const TensorView& seed, const TensorView& output,
                             const TensorView& lse, float scale, float soft_cap, bool is_causal,
                             bool bottom_right, int64_t window_left, int64_t window_right,
                             float dropout_rate, AttentionProblem* problem) {
  if (Status s =
          DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                            sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                            window_right, dropout_rate, output, lse, problem);
      !s.ok()) {
    return s;
  }
  if (!doutput.SameShapeAndDType(output)) {
    return Error("the gradient of output is " + ShapeOf(doutput) + ", output " + ShapeOf(output));
  }
  if (dlse.present() && !dlse.SameShapeAndDType(lse)) {
    return Error("the gradient of lse is " + ShapeOf(dlse) + ", lse " + ShapeOf(lse));
  }
  return Ok();
}

void DotProductAttentionGpuWorkspace(TensorView query, TensorView key, TensorView value,
                                     TensorView bias, TensorView mask, TensorView query_seq_lengths,
                                     TensorView key_value_seq_lengths, TensorView sink,
                                     TensorView seed, float scale, float soft_cap, bool is_causal,
                                     bool bottom_right, int64_t window_left, int64_t window_right,
                                     float dropout_rate, Workspace* workspace) {
  if (mask.present()) {
    TakeKeyMasks(mask, query.dims[0], key.dims[1], workspace);
    return;
  }
  // XLA asks before there are data, which the description has in place of the bias.
  if (bias.present()) return;
  TensorView output = query, lse = {nullptr, DType::kFloat32, 3};
  if (query.rank == 4) lse.dims = {query.dims[0], query.dims[2], query.dims[1]};
  if (value.rank == 4) output.dims[3] = value.dims[3];
  AttentionProblem p;
  const bool ok =
      DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                        sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                        window_right, dropout_rate, output, lse, &p)
          .ok();
  if (ok && ServesDecode(p, query.dtype)) DecodeParts(p, query.dtype, 1, workspace);
}

void DotProductAttentionGradGpuWorkspace(TensorView, TensorView, TensorView, TensorView key,
                                         TensorView, TensorView, TensorView mask, TensorView,
                                         TensorView, TensorView sink, TensorView, TensorView,
                                         TensorView lse, float, float, bool, bool, int64_t, int64_t,
                                         float, Workspace* workspace) {
  AttentionGradients g;
  TakeGradWorkspace(lse, sink, mask, key.dims[1], workspace, &g);
}

void DotProductAttentionBiasGradGpuWorkspace(TensorView, TensorView, TensorView, TensorView key,
                                             TensorView, TensorView bias, TensorView, TensorView,
                                             TensorView, TensorView, TensorView, TensorView,
                                             TensorView lse, float, float, bool, bool, int64_t,
                                             int64_t, float, Workspace* workspace) {
  AttentionGradients g;
  TakeBiasGradWorkspace(lse, bias, key.dims[1], workspace, &g);
}

}  // namespace tf_ops
