// SPDX-License-Identifier: Apache-2.0
// What ops cost: operations and bytes, each formula once. Plans, predictions, reports and benchmarks take theirs
// from here.
#pragma once

#include <cstdint>

#include "attention/tokens/job.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "kernels/causal_conv1d.hpp"
#include "kernels/mla.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

// Operations of one visible (query, key) pair, all heads. The field's convention: a multiplication and an addition for
// each element of a key and of a value, whatever is skipped or masked inside tiles.
double pair_flops(const AttentionSpec& spec);

// Operations of a whole job: pair_flops() · visible pairs.
double job_flops(const Job& job);

// Bytes of one token's row, all heads.
std::int64_t q_token_bytes(const AttentionSpec& spec);
std::int64_t k_token_bytes(const AttentionSpec& spec);
std::int64_t v_token_bytes(const AttentionSpec& spec);
std::int64_t out_token_bytes(const AttentionSpec& spec);
std::int64_t lse_token_bytes(const AttentionSpec& spec);

// Of K and V, which is what travels.
std::int64_t kv_token_bytes(const AttentionSpec& spec);

// Of q, out and LSE: what a rank has of a query.
std::int64_t query_bytes(const AttentionSpec& spec);

// Mla attention. Its pairs cost what those of its form's fold do: pair_flops() of expanded_spec() or
// absorbed_spec(). Beside them the products that are not the caller's, all heads: expanded of one key, to its keys and
// values; absorbed of one query, into the latent and back.
double mla_gemm_flops(const MlaSpec& spec);
// Bytes of what travels of one token, and of what K and V of all heads would have been; 0 where queries or O are in the
// latent, and nothing says what the heads have.
std::int64_t latent_token_bytes(const MlaSpec& spec);
std::int64_t k_rope_token_bytes(const MlaSpec& spec);
std::int64_t expanded_token_bytes(const MlaSpec& spec);
// Of w_uk and w_uv, as far as there are such.
std::int64_t mla_weight_bytes(const MlaSpec& spec);

// Operations of a scan for one token, all heads: a multiplication and an addition for each element of the state to
// update it, and as many to read it.
double ssm_token_flops(const SsmSpec& spec);

// Bytes of one token's rows of a scan: x, dt, B, C, z and y.
std::int64_t ssm_token_bytes(const SsmSpec& spec);

// The same of a whole job's token, a convolution in front included, and of an update its state, read and written.
double ssm_token_flops(const SsmJob& job);
std::int64_t ssm_token_bytes(const SsmJob& job);

// Operations of a convolution for one token, all channels, and bytes of the row that it makes of it.
double conv1d_token_flops(const CausalConv1dSpec& spec);
std::int64_t conv1d_row_bytes(const CausalConv1dSpec& spec);

}  // namespace ringattn
