// SPDX-License-Identifier: Apache-2.0
// MLA files with latents and matrices in every supported form, all with the same values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention_jobs/job_input.hpp"
#include "tests/support/cache_files.hpp"

namespace ringattn::testing {

struct MlaFile {
  std::vector<std::int64_t> lengths{40, 0, 17, 65};
  std::vector<std::int64_t> q_lens{40, 0, 3, 1};
  std::int64_t page_size = 16;
  int heads = 3;
  int head_dim = 16;
  int rope_dim = 8;
  int head_dim_v = 24;
  int latent_dim = 128;
  Dtype dtype = Dtype::kBf16;
  std::uint64_t seed = 7;
};

// q, latent, k_rope, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k.
NamedTensors mla_tensors(const MlaFile& shape);

// The same job with some tensors in another form. Each takes the tensors of mla_tensors().
NamedTensors with_projection(NamedTensors tensors);  // w_uk and w_uv as kv_b_proj
NamedTensors with_fp8_latent(NamedTensors tensors);  // latent and k_rope as latent_fp8; only bf16
// Queries multiplied by w_uk by the CPU's kernel, as the absorbed form does it.
NamedTensors with_queries_in_latent(NamedTensors tensors, const MlaFile& shape);
// O in the latent, [tokens, heads, latent_dim], multiplied by w_uv by the CPU's kernel: [tokens, heads, head_dim_v].
std::vector<std::byte> multiplied_by_w_uv(const std::vector<std::byte>& in_latent, const NamedTensor& w_uv,
                                          const MlaFile& shape);
// The result of with_fp8_latent(), dequantized.
NamedTensors with_fp8_rounded_latent(NamedTensors tensors);
// Latents and rotary keys, or FP8 rows, in randomly assigned pages. Slots without a token are NaN.
NamedTensors with_pages(NamedTensors tensors, const MlaFile& shape);

}  // namespace ringattn::testing
