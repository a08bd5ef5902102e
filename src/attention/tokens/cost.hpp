// SPDX-License-Identifier: Apache-2.0
// FLOPs and bytes of the ops. Plans, time estimates, reports and benchmarks use these formulas.
#pragma once

#include <cstdint>

#include "attention/tokens/job.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// FLOPs of one visible (query, key) pair, all heads: a multiplication and an addition for each element of a key and of
// a value. This is FlashAttention's convention; skipped or masked elements of tiles are not subtracted.
double pair_flops(const AttentionSpec& spec);

// FLOPs of a whole job: pair_flops() · visible pairs.
double job_flops(const Job& job);

// Bytes of one token, all heads.
std::int64_t q_token_bytes(const AttentionSpec& spec);
std::int64_t k_token_bytes(const AttentionSpec& spec);
std::int64_t v_token_bytes(const AttentionSpec& spec);
std::int64_t out_token_bytes(const AttentionSpec& spec);
std::int64_t lse_token_bytes(const AttentionSpec& spec);

// Bytes of K and V, which ranks exchange.
std::int64_t kv_token_bytes(const AttentionSpec& spec);

// Bytes of q, out and LSE: memory of a rank per query.
std::int64_t query_bytes(const AttentionSpec& spec);

// FLOPs of the MLA GEMMs that the library runs, all heads: in the expanded form per key, to expand K and V; in the
// absorbed form per query, into the latent space and back. The pairs cost pair_flops() of expanded_spec() or
// absorbed_spec().
double mla_gemm_flops(const MlaSpec& spec);
// Bytes of one token's latent and rotary key, which are exchanged, and of expanded K and V of all
// heads. The latter is 0 if queries or O are in the latent space, because the dims of the heads are then unknown.
std::int64_t latent_token_bytes(const MlaSpec& spec);
std::int64_t k_rope_token_bytes(const MlaSpec& spec);
std::int64_t expanded_token_bytes(const MlaSpec& spec);
// Bytes of w_uk and w_uv, if they are given.
std::int64_t mla_weight_bytes(const MlaSpec& spec);

// FLOPs of an SSM for one token, all heads: a multiplication and an addition for each element of the state to update
// it, and the same number to read it.
double ssm_token_flops(const SsmSpec& spec);

// Bytes of one token's x, dt, B, C, z and y.
std::int64_t ssm_token_bytes(const SsmSpec& spec);

// The same for one token of a job, including its convolution but not its RoPE, and for an update the state read and
// written.
double ssm_token_flops(const SsmJob& job);
std::int64_t ssm_token_bytes(const SsmJob& job);
// What an op with RoPE keeps of a token: rotated k and q, or for a kernel with rotates_rows() its angles.
std::int64_t rope_token_bytes(const SsmJob& job, bool rotates_rows);

// FLOPs of a conv1d for one token, all channels, and bytes of its output row.
double conv1d_token_flops(const CausalConv1dSpec& spec);
std::int64_t conv1d_row_bytes(const CausalConv1dSpec& spec);

}  // namespace ringattn
