// SPDX-License-Identifier: Apache-2.0
// The GPU launchers of attention. The kernels are in attention_sm80.cuh (float16 and bfloat16)
// and attention_simt.cuh (float32).
#include "cc/attention/attention_gpu.h"
#include "cc/attention/attention_pairs.cuh"

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

char* AlignedData(const TensorView& workspace) {
  return reinterpret_cast<char*>(AlignedBytes(reinterpret_cast<uintptr_t>(workspace.data)));
}

}  // namespace

Status DotProductAttention(Gpu gpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, float scale, float soft_cap,
                           bool is_causal, bool bottom_right, TensorView output, TensorView lse) {
  AttentionProblem p;
  if (Status s = DescribeAttention(query, key, value, bias, mask, query_seq_lengths,
                                   key_value_seq_lengths, scale, soft_cap, is_causal, bottom_right,
                                   output, lse, &p);
      !s.ok()) {
    return s;
  }
  return DispatchKernels(query.dtype, p, [&](auto kernels) {
    return kernels.Forward(gpu, p, output.data, lse.as<float>());
  });
}

Status DotProductAttentionGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                               TensorView key, TensorView value, TensorView bias, TensorView mask,
                               TensorView query_seq_lengths, TensorView key_value_seq_lengths,
                               TensorView output, TensorView lse, float scale, float soft_cap,
                               bool is_causal, bool bottom_right, TensorView dquery,
                               TensorView dkey, TensorView dvalue, TensorView workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, output, lse,
                                       scale, soft_cap, is_causal, bottom_right, &p);
      !s.ok()) {
    return s;
  }
  AttentionGradients g = {};
  g.doutput = doutput.data;
  g.output = output.data;
  g.lse = lse.as<const float>();
  g.dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  g.rows = reinterpret_cast<AttentionRow*>(AlignedData(workspace));
  g.dquery = dquery.data;
  g.dkey = dkey.data;
  g.dvalue = dvalue.data;
  return DispatchKernels(query.dtype, p, [&](auto kernels) { return kernels.Grad(gpu, p, g); });
}

Status DotProductAttentionBiasGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView output,
                                   TensorView lse, float scale, float soft_cap, bool is_causal,
                                   bool bottom_right, TensorView dbias, TensorView workspace) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask,
                                       query_seq_lengths, key_value_seq_lengths, output, lse,
                                       scale, soft_cap, is_causal, bottom_right, &p);
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
  g.rows = reinterpret_cast<AttentionRow*>(AlignedData(workspace));
  g.dbias = dbias.data;
  g.dbias_size = dbias.size();
  std::copy_n(dbias.dims.begin(), 4, g.dbias_dims);
  const int64_t scores_dims[4] = {p.batch, p.heads, p.seq_q, p.seq_k};
  g.splits = BiasGradSplits(g.dbias_dims, scores_dims);
  g.partial = reinterpret_cast<float*>(
      AlignedData(workspace) + AlignedBytes(lse.size() * int64_t(sizeof(AttentionRow))));
  return DispatchKernels(query.dtype, p,
                         [&](auto kernels) { return kernels.BiasGrad(gpu, p, g); });
}

}  // namespace tf_ops
