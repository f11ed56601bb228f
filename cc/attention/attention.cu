// SPDX-License-Identifier: Apache-2.0
// The GPU launchers of attention; attention_kernels.cc says which kernels serve a call.
#include <initializer_list>

#include "cc/attention/attention_decode.h"
#include "cc/attention/attention_gpu.h"
#include "cc/attention/attention_kernels.h"
#include "cc/attention/attention_pairs.cuh"
#include "cc/attention/attention_sm90.h"

namespace tf_ops {
namespace {

template <typename T, int kDim>
using Kernels = std::conditional_t<std::is_same_v<T, float>, Float32Attention<kDim>,
                                   TensorCoreAttention<T, kDim>>;

// f(Kernels<T, kDim>{}) for the type and the least kDim that holds both dims.
template <typename F>
Status DispatchKernels(DType dtype, const AttentionProblem& p, F&& f) {
  if (p.seq_q > kMaxSeq || p.seq_k > kMaxSeq) {
    return InvalidArgument("dot_product_attention: a sequence is longer than 2^29");
  }
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  return DispatchType<float, half, bf16>("dot_product_attention", dtype, [&](auto zero) {
    using T = decltype(zero);
    if (dim <= 64) return f(Kernels<T, 64>{});
    if (dim <= 128) return f(Kernels<T, 128>{});
    return f(Kernels<T, 256>{});
  });
}

// f(T{}, std::integral_constant<int, kHeadDim>{}) for the type and the least of kDims that
// holds both dims.
template <int... kDims, typename F>
Status DispatchSm90(DType dtype, const AttentionProblem& p, F&& f) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  return DispatchType<half, bf16>("dot_product_attention", dtype, [&](auto zero) {
    Status status = Internal("dot_product_attention: no kernel");
    ((dim <= kDims && (status = f(zero, std::integral_constant<int, kDims>{}), true)) || ...);
    return status;
  });
}

// `data` are all 16-bit tensors of the call.
AttentionKernels KernelsOf(const AttentionProblem& p, DType dtype, AttentionPass pass,
                           std::initializer_list<const void*> data) {
  bool aligned = true;
  for (const void* pointer : data) aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  const DeviceProperties device = CurrentDevice();
  // Without code for sm_90a, a 9.0 runs what an 8.0 does.
  const int capability = TF_OPS_SM90A ? 10 * device.major + device.minor : 80;
  return ChooseAttention(p, dtype, pass, capability, aligned).kernels;
}

}  // namespace

Status DotProductAttention(Gpu gpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, Workspace* workspace) {
  AttentionProblem p;
  if (Status s =
          DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                            sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                            window_right, dropout_rate, output, lse, &p);
      !s.ok()) {
    return s;
  }
  const AttentionKernels kernels = KernelsOf(p, query.dtype, AttentionPass::kForward,
                                             {query.data, key.data, value.data, output.data});
  if (kernels == AttentionKernels::kDecode) {
    return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
      using T = decltype(zero);
      return DecodeAttention<T>(gpu, p, KeyPages{}, output.as<T>(), lse.as<float>(), workspace);
    });
  }
  if (kernels == AttentionKernels::kSm90) {
    char* const key_masks = TakeKeyMasks(mask, p.batch, p.seq_k, workspace);
    return DispatchSm90<64, 128, 256>(query.dtype, p, [&](auto zero, auto dim) {
      using T = decltype(zero);
      return AttentionForwardSm90<T, dim>(gpu, p, key_masks, output.as<T>(), lse.as<float>());
    });
  }
  return DispatchKernels(query.dtype, p, [&](auto kernels) {
    return kernels.Forward(gpu, p, output.data, lse.as<float>());
  });
}

Status DotProductAttentionGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView sink, TensorView seed, TensorView output, TensorView lse,
                               float scale, float soft_cap, bool is_causal, bool bottom_right,
                               int64_t window_left, int64_t window_right, float dropout_rate,
                               TensorView dquery, TensorView dkey, TensorView dvalue,
                               TensorView dsink, Workspace* workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, sink, seed, output,
                                       lse, scale, soft_cap, is_causal, bottom_right, window_left,
                                       window_right, dropout_rate, &p);
      !s.ok()) {
    return s;
  }
  if (!dsink.SameShapeAndDType(sink)) {
    return InvalidArgument("dot_product_attention: the gradient of sink must be as sink is");
  }
  AttentionGradients g = {};
  g.doutput = doutput.data;
  g.output = output.data;
  g.lse = lse.as<const float>();
  g.dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  TakeGradWorkspace(lse, sink, mask, p.seq_k, workspace, &g);
  if (p.sink) g.dsink = dsink.as<float>();
  g.dquery = dquery.data;
  g.dkey = dkey.data;
  g.dvalue = dvalue.data;
  const AttentionKernels kernels =
      KernelsOf(p, query.dtype, AttentionPass::kGrad,
                {query.data, key.data, value.data, g.doutput, g.dquery, g.dkey, g.dvalue});
  if (kernels == AttentionKernels::kSm90) {
    Status s = DispatchSm90<64, 128, 256>(query.dtype, p, [&](auto zero, auto dim) {
      return AttentionBackwardSm90<decltype(zero), dim>(gpu, p, g);
    });
    return s.ok() ? LaunchSinkGrad(gpu, p, g) : s;
  }
  return DispatchKernels(query.dtype, p, [&](auto kernels) { return kernels.Grad(gpu, p, g); });
}

Status DotProductAttentionBiasGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, Workspace* workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, sink, seed, output,
                                       lse, scale, soft_cap, is_causal, bottom_right, window_left,
                                       window_right, dropout_rate, &p);
      !s.ok()) {
    return s;
  }
  if (!bias.present() || !dbias.SameShapeAndDType(bias)) {
    return InvalidArgument("dot_product_attention: the gradient of bias must be as bias is");
  }
  AttentionGradients g = {};
  g.doutput = doutput.data;
  g.output = output.data;
  g.lse = lse.as<const float>();
  g.dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  g.dbias = dbias.data;
  TakeBiasGradWorkspace(lse, bias, p.seq_k, workspace, &g);
  return DispatchKernels(query.dtype, p, [&](auto kernels) { return kernels.BiasGrad(gpu, p, g); });
}

}  // namespace tf_ops
