// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/cost.hpp"

namespace ringattn {

namespace {

std::int64_t row_bytes(Dtype dtype, int heads, int dim) {
  return std::int64_t{heads} * dim * static_cast<std::int64_t>(size_of(dtype));
}

// Number of rows, over the given matrices, of one head.
int matrix_rows(const MlaSpec& spec) {
  return (spec.q_in_latent ? 0 : spec.head_dim) + (spec.out_in_latent ? 0 : spec.head_dim_v);
}

}  // namespace

double pair_flops(const AttentionSpec& spec) { return 2.0 * spec.heads * (spec.head_dim + spec.head_dim_v); }

double job_flops(const Job& job) { return visible_pairs(job) * pair_flops(job.spec); }

std::int64_t q_token_bytes(const AttentionSpec& spec) { return row_bytes(spec.dtype, spec.heads, spec.head_dim); }
std::int64_t k_token_bytes(const AttentionSpec& spec) { return row_bytes(spec.dtype, spec.kv_heads, spec.head_dim); }
std::int64_t v_token_bytes(const AttentionSpec& spec) { return row_bytes(spec.dtype, spec.kv_heads, spec.head_dim_v); }
std::int64_t out_token_bytes(const AttentionSpec& spec) { return row_bytes(spec.dtype, spec.heads, spec.head_dim_v); }
std::int64_t lse_token_bytes(const AttentionSpec& spec) { return row_bytes(Dtype::kF32, spec.heads, 1); }

std::int64_t kv_token_bytes(const AttentionSpec& spec) { return k_token_bytes(spec) + v_token_bytes(spec); }

std::int64_t query_bytes(const AttentionSpec& spec) {
  return q_token_bytes(spec) + out_token_bytes(spec) + lse_token_bytes(spec);
}

double mla_gemm_flops(const MlaSpec& spec) { return 2.0 * spec.heads * spec.latent_dim * matrix_rows(spec); }

std::int64_t latent_token_bytes(const MlaSpec& spec) { return row_bytes(spec.dtype, 1, spec.latent_dim); }
std::int64_t k_rope_token_bytes(const MlaSpec& spec) { return row_bytes(spec.dtype, 1, spec.rope_dim); }

std::int64_t expanded_token_bytes(const MlaSpec& spec) {
  return spec.q_in_latent || spec.out_in_latent ? 0 : kv_token_bytes(expanded_spec(spec, spec.heads));
}

std::int64_t mla_weight_bytes(const MlaSpec& spec) {
  return spec.latent_dim * row_bytes(spec.dtype, spec.heads, matrix_rows(spec));
}

double ssm_token_flops(const SsmSpec& spec) { return 4.0 * spec.heads * spec.head_dim * spec.state_dim; }

std::int64_t ssm_token_bytes(const SsmSpec& spec) {
  const SsmDtRows dt = dt_rows(spec);
  return (spec.gate ? 3 : 2) * row_bytes(spec.dtype, spec.heads, spec.head_dim) +
         row_bytes(dt.dtype, spec.heads, dt.dim) + 2 * row_bytes(spec.dtype, spec.groups, spec.state_dim);
}

double conv1d_token_flops(const CausalConv1dSpec& spec) { return 2.0 * spec.channels * spec.width; }

double ssm_token_flops(const SsmJob& job) {
  return (job.conv1d_only ? 0.0 : ssm_token_flops(job.spec)) +
         (job.convolution ? conv1d_token_flops(*job.convolution) : 0.0);
}

std::int64_t ssm_token_bytes(const SsmJob& job) {
  return (job.conv1d_only ? 0 : ssm_token_bytes(job.spec)) +
         (job.convolution ? 2 * conv1d_row_bytes(*job.convolution) : 0) + (job.update ? 2 * state_bytes(job.spec) : 0);
}

std::int64_t rope_token_bytes(const SsmJob& job, bool rotates_rows) {
  return rotates_rows ? row_bytes(Dtype::kF32, 1, job.rope->rotary_dim)
                      : 2 * row_bytes(job.spec.dtype, job.spec.groups, job.spec.state_dim);
}

std::int64_t conv1d_row_bytes(const CausalConv1dSpec& spec) { return row_bytes(spec.dtype, 1, spec.channels); }

}  // namespace ringattn
