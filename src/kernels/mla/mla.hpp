// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (MLA, DeepSeek-V2). A token has one latent c and one rotary key k_r for all heads, and
//
//   k[h] = [w_uk[h] · c, k_r]     v[h] = w_uv[h] · c     O[h] = attention(q[h], k[h], v[h])
//
// with q[h] = [q_nope, q_rope]. There are two forms. `expanded` computes k and v of every head, rounded once to the
// dtype, and attends to them. `absorbed` multiplies q_nope by w_uk instead, attends to the rows [c, k_r] as the keys of
// one KV head with the values c, and multiplies O by w_uv. The forms are mathematically equal but round differently, so
// each has its own bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/visibility.hpp"
#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn {

// The computation, without lengths or ranks.
struct MlaSpec {
  Dtype dtype = Dtype::kBf16;  // of every tensor; state and LSE are fp32
  int heads = 128;             // query heads
  int head_dim = 128;          // q and k without the rotary part (qk_nope_head_dim)
  int rope_dim = 64;           // the rotary part of q, and k_rope (qk_rope_head_dim)
  int head_dim_v = 128;        // v and O (v_head_dim)
  int latent_dim = 512;        // the latent (kv_lora_rank)
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
  bool sinks = false;
  // Absorbed form only: the caller does the GEMM on this side. q_in_latent: queries are already multiplied by w_uk, and
  // head_dim is latent_dim. out_in_latent: O is not multiplied by w_uv, and head_dim_v is latent_dim. The weight matrix
  // is then absent.
  bool q_in_latent = false;
  bool out_in_latent = false;

  bool operator==(const MlaSpec&) const = default;
};

// 1/√(head_dim + rope_dim), in both forms. Queries in the latent keep the scale of their original head_dim.
inline float default_softmax_scale(const MlaSpec& spec) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim + spec.rope_dim)));
}

// Attention of the expanded form, for some of the heads: each has its own keys and values.
inline AttentionSpec expanded_spec(const MlaSpec& spec, int heads) {
  AttentionSpec attention;
  attention.dtype = spec.dtype;
  attention.heads = heads;
  attention.kv_heads = heads;
  attention.head_dim = spec.head_dim + spec.rope_dim;
  attention.head_dim_v = spec.head_dim_v;
  attention.mask = spec.mask;
  attention.softmax_scale = spec.softmax_scale;
  attention.softcap = spec.softcap;
  attention.sinks = spec.sinks;
  return attention;
}

// Attention of the absorbed form: all heads share the rows [c, k_r], and the values are their first columns.
inline AttentionSpec absorbed_spec(const MlaSpec& spec) {
  AttentionSpec attention = expanded_spec(spec, spec.heads);
  attention.kv_heads = 1;
  attention.head_dim = spec.latent_dim + spec.rope_dim;
  attention.head_dim_v = spec.latent_dim;
  return attention;
}

// GEMMs from a latent to a head's keys (without the rotary part) and to its values.
inline BatchedGemmSpec key_expansion(const MlaSpec& spec) { return {spec.dtype, spec.latent_dim, spec.head_dim}; }
inline BatchedGemmSpec value_expansion(const MlaSpec& spec) { return {spec.dtype, spec.latent_dim, spec.head_dim_v}; }
// GEMM from q_nope to the latent, with key_expansion()'s matrices transposed. O is projected with value_expansion().
inline BatchedGemmSpec query_absorption(const MlaSpec& spec) { return {spec.dtype, spec.head_dim, spec.latent_dim}; }

}  // namespace ringattn
