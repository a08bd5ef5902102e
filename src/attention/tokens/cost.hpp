// SPDX-License-Identifier: Apache-2.0
// What attention costs: operations and bytes, each formula once. Plans, predictions, reports and benchmarks take theirs
// from here.
#pragma once

#include <cstdint>

#include "attention/tokens/job.hpp"
#include "kernels/latent.hpp"

namespace ringattn {

// Operations of one visible (query, key) pair, all heads. The field's convention: a multiplication and an addition for
// each element of a key and of a value, whatever is skipped or masked inside tiles.
double pair_flops(const FoldSpec& spec);

// Operations of a whole job: pair_flops() · visible pairs.
double job_flops(const Job& job);

// Bytes of one token's row, all heads.
std::int64_t q_token_bytes(const FoldSpec& spec);
std::int64_t k_token_bytes(const FoldSpec& spec);
std::int64_t v_token_bytes(const FoldSpec& spec);
std::int64_t out_token_bytes(const FoldSpec& spec);
std::int64_t lse_token_bytes(const FoldSpec& spec);

// Of K and V, which is what travels.
std::int64_t kv_token_bytes(const FoldSpec& spec);

// Of q, out and LSE: what a rank has of a query.
std::int64_t query_bytes(const FoldSpec& spec);

// Latent attention. Its pairs cost what those of its form's fold do: pair_flops() of expanded_spec() or
// absorbed_spec(). Beside them the products, all heads: expanded of one key, to its keys and values; absorbed of one
// query, into the latent and back.
double latent_product_flops(const LatentSpec& spec);
// Bytes of what travels of one token, and of what K and V of all heads would have been.
std::int64_t latent_token_bytes(const LatentSpec& spec);
std::int64_t k_rope_token_bytes(const LatentSpec& spec);
std::int64_t expanded_token_bytes(const LatentSpec& spec);
// Of w_uk and w_uv.
std::int64_t latent_weight_bytes(const LatentSpec& spec);

}  // namespace ringattn
