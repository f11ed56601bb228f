// SPDX-License-Identifier: Apache-2.0
// The GPU launchers of attention, and which kernels serve a call:
//
//   the output of at most 16 queries
//     (float32: 4) to 256 keys or more;
//     no bias, mask or dropout                  attention_decode.cuh
//   float32                                     attention_simt.cuh
//   float16, bfloat16                           attention_sm80.cuh
//     on sm_90: no bias, mask, soft cap,
//     window, sink or dropout, 16-byte rows;
//     gradients: head_dim <= 128                attention_sm90_forward.cuh, _backward.cuh
//   the gradient of the bias                    attention_simt.cuh, attention_sm80_grad.cuh
#include "cc/attention/attention_decode.h"
#include "cc/attention/attention_gpu.h"
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

char* AlignedData(const TensorView& workspace) {
  return reinterpret_cast<char*>(AlignedBytes(reinterpret_cast<uintptr_t>(workspace.data)));
}

}  // namespace

bool ServesSm90(const AttentionProblem& p, DType dtype, int largest_head_dim,
                std::initializer_list<const void*> data) {
  if (!TF_OPS_SM90A || dtype == DType::kFloat32) return false;
  if (p.bias || p.mask || p.soft_cap != 0.0f) return false;
  if (p.sink || p.dropout_threshold || p.window_left >= 0 || p.window_right > 0) return false;
  if (!(p.scale > 0.0f && p.scale <= 3e38f)) return false;  // the maximum is taken unscaled
  // The copy engine takes rows of 16-byte multiples at 16-byte addresses.
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  if (p.head_dim == 0 || p.value_dim == 0 || p.head_dim % 8 || p.value_dim % 8) return false;
  if (dim > largest_head_dim) return false;
  for (const void* pointer : data) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16) return false;
  }
  // Rows, heads and tiles are counted in int.
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (p.seq_q == 0 || p.seq_k == 0 || p.seq_q > kLimit || p.seq_k > kLimit) return false;
  if (p.batch == 0 || p.heads == 0 || p.batch * p.heads > kLimit) return false;
  const int64_t tiles = (std::max(p.seq_q, p.seq_k) + 63) / 64;
  if (p.batch * p.heads * tiles > kLimit) return false;
  if (p.batch * p.heads > kLimit / 16) return false;  // of whole tiles, a warp for each row
  const DeviceProperties device = CurrentDevice();
  return device.major == 9 && device.minor == 0;
}

Status DotProductAttention(Gpu gpu, TensorView query, TensorView key, TensorView value,
                           TensorView bias, TensorView mask, TensorView query_seq_lengths,
                           TensorView key_value_seq_lengths, TensorView sink, TensorView seed,
                           float scale, float soft_cap, bool is_causal, bool bottom_right,
                           int64_t window_left, int64_t window_right, float dropout_rate,
                           TensorView output, TensorView lse, TensorView workspace) {
  AttentionProblem p;
  if (Status s =
          DescribeAttention(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
                            sink, seed, scale, soft_cap, is_causal, bottom_right, window_left,
                            window_right, dropout_rate, output, lse, &p);
      !s.ok()) {
    return s;
  }
  if (ServesDecode(p, query.dtype)) {
    return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
      using T = decltype(zero);
      return DecodeAttention<T>(gpu, p, KeyPages{}, output.as<T>(), lse.as<float>(),
                                workspace.data);
    });
  }
  if (ServesSm90(p, query.dtype, 256, {query.data, key.data, value.data, output.data})) {
    return DispatchSm90<64, 128, 256>(query.dtype, p, [&](auto zero, auto dim) {
      using T = decltype(zero);
      return AttentionForwardSm90<T, dim>(gpu, p, output.as<T>(), lse.as<float>());
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
                               TensorView dsink, TensorView workspace) {
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
  if (ServesSm90(
          p, query.dtype, 128,
          {query.data, key.data, value.data, doutput.data, dquery.data, dkey.data, dvalue.data})) {
    return DispatchSm90<64, 128>(query.dtype, p, [&](auto zero, auto dim) {
      using T = decltype(zero);
      return AttentionBackwardSm90<T, dim>(
          gpu, p, output.as<const T>(), doutput.as<const T>(), lse.as<const float>(),
          dlse.present() ? dlse.as<const float>() : nullptr, dquery.as<T>(), dkey.as<T>(),
          dvalue.as<T>(), reinterpret_cast<float*>(AlignedData(workspace)));
    });
  }
  AttentionGradients g = {};
  g.doutput = doutput.data;
  g.output = output.data;
  g.lse = lse.as<const float>();
  g.dlse = dlse.present() ? dlse.as<const float>() : nullptr;
  g.rows = reinterpret_cast<AttentionRow*>(AlignedData(workspace));
  if (p.sink) {
    // After the rows: DotProductAttentionGradGpuWorkspace.
    g.sink_terms =
        reinterpret_cast<float*>(AlignedData(workspace) + GradRowsBytes(p.batch, p.heads, p.seq_q));
    g.dsink = dsink.as<float>();
  }
  g.dquery = dquery.data;
  g.dkey = dkey.data;
  g.dvalue = dvalue.data;
  return DispatchKernels(query.dtype, p, [&](auto kernels) { return kernels.Grad(gpu, p, g); });
}

Status DotProductAttentionBiasGrad(Gpu gpu, TensorView doutput, TensorView dlse, TensorView query,
                                   TensorView key, TensorView value, TensorView bias,
                                   TensorView mask, TensorView query_seq_lengths,
                                   TensorView key_value_seq_lengths, TensorView sink,
                                   TensorView seed, TensorView output, TensorView lse, float scale,
                                   float soft_cap, bool is_causal, bool bottom_right,
                                   int64_t window_left, int64_t window_right, float dropout_rate,
                                   TensorView dbias, TensorView workspace) {
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
  g.rows = reinterpret_cast<AttentionRow*>(AlignedData(workspace));
  g.dbias = dbias.data;
  g.dbias_size = dbias.size();
  std::copy_n(dbias.dims.begin(), 4, g.dbias_dims);
  const int64_t scores_dims[4] = {p.batch, p.heads, p.seq_q, p.seq_k};
  g.splits = BiasGradSplits(g.dbias_dims, scores_dims);
  g.partial = reinterpret_cast<float*>(AlignedData(workspace) +
                                       AlignedBytes(lse.size() * int64_t(sizeof(AttentionRow))));
  return DispatchKernels(query.dtype, p, [&](auto kernels) { return kernels.BiasGrad(gpu, p, g); });
}

}  // namespace tf_ops
