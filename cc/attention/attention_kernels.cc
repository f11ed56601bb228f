// SPDX-License-Identifier: Apache-2.0
// The kernels by call, the first that fits:
//
//   the output of at most 16 queries (float32: 4) to 256
//     keys or more; no bias, mask or dropout               decode
//   float16 and bfloat16 on compute capability 9.0;
//     no bias, soft cap or dropout; a mask, if any, that
//     is the same for all heads and queries, as one of
//     padding is; rows of whole 16 bytes                   sm_90
//   float16, bfloat16                                      sm_80
//   float32                                                simt
//
// Windows, lengths, sinks and groups of heads are served by all.
#include "cc/attention/attention_kernels.h"

#include <algorithm>

#include "cc/attention/attention_decode.h"

namespace tf_ops {
namespace {

// What keeps a call from the kernels for sm_90; null if nothing does.
const char* WhyNotSm90(const AttentionProblem& p, DType dtype, int compute_capability,
                       bool aligned) {
  if (dtype == DType::kFloat32) return "tensor cores would round float32";
  if (compute_capability != 90) return "the compute capability is not 9.0";
  if (p.bias) return "there is a bias";
  if (p.mask && (p.mask_strides[1] || p.mask_strides[2])) {
    return "the mask differs between heads or queries";
  }
  if (p.soft_cap != 0.0f) return "there is a soft cap";
  if (p.dropout_threshold) return "there is dropout";
  if (!(p.scale > 0.0f && p.scale <= 3e38f)) return "the scale is not positive";  // maximum first
  // The copy engine takes rows of 16-byte multiples at 16-byte addresses.
  if (p.head_dim % 8 || p.value_dim % 8) return "head_dim or value_dim is no multiple of 8";
  if (!aligned) return "a tensor does not start at an address of whole 16 bytes";
  if (p.head_dim == 0 || p.value_dim == 0 || p.seq_q == 0 || p.seq_k == 0 || p.batch == 0 ||
      p.heads == 0) {
    return "there is nothing to compute";
  }
  // Positions and sums of two, heads and tiles are int; and a warp for each row.
  constexpr int64_t kSequence = int64_t{1} << 29, kTiles = int64_t{1} << 30;
  const int64_t longest = std::max(p.seq_q, p.seq_k), rows = p.batch * p.heads;
  if (longest > kSequence || rows > kTiles / 16 || rows * ((longest + 63) / 64) > kTiles) {
    return "there are too many queries or keys";
  }
  return nullptr;
}

}  // namespace

AttentionChoice ChooseAttention(const AttentionProblem& p, DType dtype, AttentionPass pass,
                                int compute_capability, bool aligned) {
  if (pass == AttentionPass::kForward && ServesDecode(p, dtype)) {
    return {AttentionKernels::kDecode, nullptr};
  }
  const char* why = WhyNotSm90(p, dtype, compute_capability, aligned);
  if (!why) return {AttentionKernels::kSm90, nullptr};
  return {dtype == DType::kFloat32 ? AttentionKernels::kSimt : AttentionKernels::kSm80, why};
}

// For Python: `sizes` are batch, heads, kv_heads, seq_q, seq_k, head_dim and value_dim; `features`
// has a bit for a bias, a mask, a soft cap, dropout, and for a mask that is the same for all heads
// and queries. Returns "decode", "sm_90", "sm_80" or
// "simt"; *why is empty or what keeps the call from sm_90.
extern "C" const char* tf_ops_attention_kernels(int dtype, int pass, int compute_capability,
                                                const int64_t* sizes, int features,
                                                const char** why) {
  AttentionProblem p = {};
  p.batch = sizes[0], p.heads = sizes[1], p.kv_heads = sizes[2];
  p.seq_q = sizes[3], p.seq_k = sizes[4], p.head_dim = sizes[5], p.value_dim = sizes[6];
  static const bool kSomething = true;
  p.bias = features & 1 ? &kSomething : nullptr;
  p.mask = features & (2 | 16) ? &kSomething : nullptr;
  if (features & 2) p.mask_strides[2] = p.seq_k;
  p.soft_cap = features & 4 ? 1.0f : 0.0f;
  p.dropout_threshold = features & 8 ? 1 : 0;
  p.scale = 1.0f;
  const AttentionChoice choice =
      ChooseAttention(p, DType(dtype), AttentionPass(pass), compute_capability, true);
  *why = choice.why_not_sm90 ? choice.why_not_sm90 : "";
  constexpr const char* kNames[] = {"decode", "sm_90", "sm_80", "simt"};
  return kNames[int(choice.kernels)];
}

}  // namespace tf_ops
