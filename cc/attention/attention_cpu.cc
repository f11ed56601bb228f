// Plain loops, to be replaced.
#include <cmath>
#include <vector>

#include "cc/attention/attention.h"
#include "cc/common/cpu.h"

namespace tf_ops {
namespace {

int64_t Length(const int32_t* lengths, int64_t b, int64_t size) {
  return lengths ? std::min<int64_t>(std::max<int64_t>(lengths[b], 0), size) : size;
}

// f(b, h, i, j, s, dcap) for each visible pair.
template <typename T, typename F>
void ForPairs(const AttentionProblem& p, F f) {
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t nq = Length(p.query_seq_lengths, b, p.seq_q), nk = Length(p.key_value_seq_lengths, b, p.seq_k);
      for (int64_t i = 0; i < nq; ++i)
        for (int64_t j = 0; j < nk; ++j) {
          if (p.is_causal && j > i + (p.bottom_right ? nk - nq : 0)) continue;
          auto at = [&](const int64_t (&s)[4]) { return b * s[0] + h * s[1] + i * s[2] + j * s[3]; };
          if (p.mask && !p.mask[at(p.mask_strides)]) continue;
          const T* q = static_cast<const T*>(p.query) + ((b * p.seq_q + i) * p.heads + h) * p.head_dim;
          const int64_t hk = h / (p.heads / p.kv_heads);
          const T* k = static_cast<const T*>(p.key) + ((b * p.seq_k + j) * p.kv_heads + hk) * p.head_dim;
          double s = 0;
          for (int64_t d = 0; d < p.head_dim; ++d) s += double(float(q[d])) * double(float(k[d]));
          s *= p.scale;
          double dcap = 1;
          if (p.soft_cap > 0) {
            double t = std::tanh(s / p.soft_cap);
            s = p.soft_cap * t;
            dcap = 1 - t * t;
          }
          if (p.bias) s += double(float(static_cast<const T*>(p.bias)[at(p.bias_strides)]));
          f(b, h, i, j, hk, s, dcap);
        }
    }
}

template <typename T, typename F>
void ForDs(const AttentionProblem& p, const TensorView& doutput, const TensorView& dlse, const TensorView& output, const TensorView& lse, F f) {
  ForPairs<T>(p, [&](int64_t b, int64_t h, int64_t i, int64_t j, int64_t hk, double s, double dcap) {
    const int64_t o = ((b * p.seq_q + i) * p.heads + h) * p.value_dim, r = (b * p.heads + h) * p.seq_q + i;
    const T* v = static_cast<const T*>(p.value) + ((b * p.seq_k + j) * p.kv_heads + hk) * p.value_dim;
    double dp = 0, delta = dlse.present() ? -dlse.as<float>()[r] : 0;
    for (int64_t d = 0; d < p.value_dim; ++d) {
      dp += double(float(doutput.as<T>()[o + d])) * double(float(v[d]));
      delta += double(float(doutput.as<T>()[o + d])) * double(float(output.as<T>()[o + d]));
    }
    const double w = std::exp(s - lse.as<float>()[r]);
    f(b, h, i, j, hk, w, w * (dp - delta), dcap);
  });
}

}  // namespace

Status DotProductAttention(Cpu, TensorView query, TensorView key, TensorView value, TensorView bias,
                           TensorView mask, TensorView ql, TensorView kl, float scale, float soft_cap,
                           bool is_causal, bool bottom_right, TensorView output, TensorView lse) {
  AttentionProblem p;
  if (Status s = DescribeAttention(query, key, value, bias, mask, ql, kl, scale, soft_cap, is_causal, bottom_right, output, lse, &p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<double> m(lse.size(), -INFINITY), l(lse.size()), o(output.size());
    ForPairs<T>(p, [&](int64_t b, int64_t h, int64_t i, int64_t, int64_t, double s, double) {
      double& x = m[(b * p.heads + h) * p.seq_q + i];
      x = std::max(x, s);
    });
    ForPairs<T>(p, [&](int64_t b, int64_t h, int64_t i, int64_t j, int64_t hk, double s, double) {
      const int64_t r = (b * p.heads + h) * p.seq_q + i;
      const double w = std::exp(s - m[r]);
      l[r] += w;
      const T* v = static_cast<const T*>(p.value) + ((b * p.seq_k + j) * p.kv_heads + hk) * p.value_dim;
      for (int64_t d = 0; d < p.value_dim; ++d) o[((b * p.seq_q + i) * p.heads + h) * p.value_dim + d] += w * double(float(v[d]));
    });
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.seq_q; ++i) {
          const int64_t r = (b * p.heads + h) * p.seq_q + i;
          lse.as<float>()[r] = l[r] > 0 ? m[r] + std::log(l[r]) : -INFINITY;
          for (int64_t d = 0; d < p.value_dim; ++d) {
            const int64_t at = ((b * p.seq_q + i) * p.heads + h) * p.value_dim + d;
            output.as<T>()[at] = T(float(l[r] > 0 ? o[at] / l[r] : 0));
          }
        }
    return Ok();
  });
}

Status DotProductAttentionGrad(Cpu, TensorView doutput, TensorView dlse, TensorView query, TensorView key,
                               TensorView value, TensorView bias, TensorView mask, TensorView ql, TensorView kl,
                               TensorView output, TensorView lse, float scale, float soft_cap, bool is_causal,
                               bool bottom_right, TensorView dquery, TensorView dkey, TensorView dvalue, TensorView) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask, ql, kl, output, lse, scale, soft_cap, is_causal, bottom_right, &p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<double> dq(dquery.size()), dk(dkey.size()), dv(dvalue.size());
    ForDs<T>(p, doutput, dlse, output, lse, [&](int64_t b, int64_t h, int64_t i, int64_t j, int64_t hk, double w, double ds, double dcap) {
      const int64_t q = (b * p.seq_q + i) * p.heads + h, k = (b * p.seq_k + j) * p.kv_heads + hk;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        dq[q * p.head_dim + d] += ds * dcap * p.scale * double(float(key.as<T>()[k * p.head_dim + d]));
        dk[k * p.head_dim + d] += ds * dcap * p.scale * double(float(query.as<T>()[q * p.head_dim + d]));
      }
      for (int64_t d = 0; d < p.value_dim; ++d) dv[k * p.value_dim + d] += w * double(float(doutput.as<T>()[q * p.value_dim + d]));
    });
    for (size_t i = 0; i < dq.size(); ++i) dquery.as<T>()[i] = T(float(dq[i]));
    for (size_t i = 0; i < dk.size(); ++i) dkey.as<T>()[i] = T(float(dk[i]));
    for (size_t i = 0; i < dv.size(); ++i) dvalue.as<T>()[i] = T(float(dv[i]));
    return Ok();
  });
}

Status DotProductAttentionBiasGrad(Cpu, TensorView doutput, TensorView dlse, TensorView query, TensorView key,
                                   TensorView value, TensorView bias, TensorView mask, TensorView ql, TensorView kl,
                                   TensorView output, TensorView lse, float scale, float soft_cap, bool is_causal,
                                   bool bottom_right, TensorView dbias, TensorView) {
  AttentionProblem p;
  if (Status s = DescribeAttentionGrad(doutput, dlse, query, key, value, bias, mask, ql, kl, output, lse, scale, soft_cap, is_causal, bottom_right, &p); !s.ok()) return s;
  return DispatchType<float, half, bf16>("dot_product_attention", query.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<double> db(dbias.size());
    const auto& t = p.bias_strides;
    ForDs<T>(p, doutput, dlse, output, lse, [&](int64_t b, int64_t h, int64_t i, int64_t j, int64_t, double, double ds, double) {
      db[b * t[0] + h * t[1] + i * t[2] + j * t[3]] += ds;
    });
    for (size_t i = 0; i < db.size(); ++i) dbias.as<T>()[i] = T(float(db[i]));
    return Ok();
  });
}

#define ARGS TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, float, float, bool, bool
int64_t DotProductAttentionGradCpuWorkspace(ARGS) { return 0; }
int64_t DotProductAttentionBiasGradCpuWorkspace(ARGS) { return 0; }

}  // namespace tf_ops
