// SPDX-License-Identifier: Apache-2.0
// A sampled row of latent attention as one of attention over latents: its query goes in by w_uk, its output comes back
// by w_uv, unless either is in the latent anyway. In fp64 that is the whole formula, for both GEMMs may be moved out
// of the sums over keys (kernels/mla/mla_oracle.hpp); in fp32, rounded to the dtype, it is what a same-precision
// computation does.
#pragma once

#include <span>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/mla/mla.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

struct MlaProjections {
  MlaSpec spec;
  MlaForm form = MlaForm::kExpanded;  // that computes
  GemmWeights w_uk;                   // none where MlaSpec says that queries are in the latent
  GemmWeights w_uv;                   // none where O stays there
};

// Matrices of an input, in host memory.
struct LoadedMlaProjections {
  // Throws what JobInput::read() throws.
  LoadedMlaProjections(const JobInput& input, int threads);

  Buffer keys;
  Buffer values;
  MlaProjections matrices;
};

// Fills rows [latent, rotary key], [total_tokens(runs), 1, latent_dim + rope_dim]. Throws what JobInput::read() throws.
void read_latent_keys(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                      int threads);

// For each row of a head's w_uv, [head_dim_v], whether it holds a value that isn't finite; empty without w_uv.
std::vector<bool> non_finite_values(const MlaProjections& matrices, int head);

// [latent_dim + rope_dim] of a query, [head_dim + rope_dim]; of one in the latent, itself.
template <typename Real>
std::vector<Real> query_to_latent(const MlaProjections& matrices, int head, std::span<const float> q) {
  const MlaSpec& spec = matrices.spec;
  if (spec.q_in_latent) return {q.begin(), q.end()};
  std::vector<Real> row(static_cast<std::size_t>(spec.latent_dim), Real{0});
  const std::byte* at = matrices.w_uk.at(head);
  for (int dim_n = 0; dim_n < spec.head_dim; ++dim_n) {
    for (Real& sum : row) {
      sum += static_cast<Real>(q[static_cast<std::size_t>(dim_n)]) * static_cast<Real>(load_element(at, spec.dtype));
      at += size_of(spec.dtype);
    }
  }
  row.insert(row.end(), q.begin() + spec.head_dim, q.end());
  return row;
}

// [head_dim_v] of an output in the latent, [latent_dim]; of one that stays there, itself.
template <typename Real>
std::vector<Real> output_from_latent(const MlaProjections& matrices, int head, std::span<const Real> latent) {
  const MlaSpec& spec = matrices.spec;
  if (spec.out_in_latent) return {latent.begin(), latent.end()};
  std::vector<Real> out;
  const std::byte* at = matrices.w_uv.at(head);
  for (int dim_n = 0; dim_n < spec.head_dim_v; ++dim_n) {
    Real sum{0};
    for (const Real value : latent) {
      sum += value * static_cast<Real>(load_element(at, spec.dtype));
      at += size_of(spec.dtype);
    }
    out.push_back(sum);
  }
  return out;
}

}  // namespace ringattn
