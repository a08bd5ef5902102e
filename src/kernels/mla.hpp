// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (MLA, DeepSeek-V2): a token has one latent c and one rotary key k_r for all heads, and
//
//   k[h] = [w_uk[h] · c, k_r]     v[h] = w_uv[h] · c     O[h] = attention(q[h], k[h], v[h])
//
// with q[h] = [q_nope, q_rope]. Two forms compute it. `expanded` makes k and v of every head, rounded once to the
// dtype, and folds them. `absorbed` multiplies w_uk into q_nope instead, folds the rows [c, k_r] as the keys of one KV
// head and c as its values, and takes O back by w_uv. Their maths is the same and their rounding is not: each form has
// bits of its own.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/attention.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

// What is computed, without lengths or ranks.
struct MlaSpec {
  Dtype dtype = Dtype::kBf16;  // of every tensor; state and LSE are fp32
  int heads = 128;             // query heads
  int head_dim = 128;          // of q and k without the rotary part (qk_nope_head_dim)
  int rope_dim = 64;           // of the rotary part of q, and of k_rope (qk_rope_head_dim)
  int head_dim_v = 128;        // of v and O (v_head_dim)
  int latent_dim = 512;        // of the latent (kv_lora_rank)
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
  bool sinks = false;
  // Of the absorbed form: the products around it are the caller's. Queries come multiplied by w_uk, and head_dim is
  // latent_dim; O stays in front of w_uv, and head_dim_v is latent_dim. Then there is no such matrix.
  bool q_in_latent = false;
  bool out_in_latent = false;

  bool operator==(const MlaSpec&) const = default;
};

// 1/√(head_dim + rope_dim), in both forms. Of queries in the latent it follows from the head_dim that they had before.
inline float default_softmax_scale(const MlaSpec& spec) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim + spec.rope_dim)));
}

// The fold of the expanded form, for some of the heads: each has keys and values of its own.
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

// The fold of the absorbed form: all heads share the rows [c, k_r], and the values are their first part.
inline AttentionSpec absorbed_spec(const MlaSpec& spec) {
  AttentionSpec attention = expanded_spec(spec, spec.heads);
  attention.kv_heads = 1;
  attention.head_dim = spec.latent_dim + spec.rope_dim;
  attention.head_dim_v = spec.latent_dim;
  return attention;
}

// From a latent to a head's keys (without their rotary part) and to its values.
inline BatchedGemmSpec key_expansion(const MlaSpec& spec) { return {spec.dtype, spec.latent_dim, spec.head_dim}; }
inline BatchedGemmSpec value_expansion(const MlaSpec& spec) { return {spec.dtype, spec.latent_dim, spec.head_dim_v}; }
// From q_nope to the latent, by the matrices of key_expansion() the other way round. O comes back by value_expansion().
inline BatchedGemmSpec query_absorption(const MlaSpec& spec) { return {spec.dtype, spec.head_dim, spec.latent_dim}; }

}  // namespace ringattn
