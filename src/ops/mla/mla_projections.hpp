// SPDX-License-Identifier: Apache-2.0
// Converts a sampled row of MLA to one of attention over latents: w_uk maps its query into the latent space, and w_uv
// maps its output back, unless either is in the latent space anyway. In fp64 that is the whole formula, because both
// GEMMs may be moved out of the sums over keys (kernels/mla/mla_oracle.hpp). In fp32, rounded to the dtype, it is the
// same-precision reference.
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
  MlaForm form = MlaForm::kExpanded;  // the form of the computation
  GemmWeights w_uk;                   // none if MlaSpec says that queries are in the latent space
  GemmWeights w_uv;                   // none if O stays in the latent space
};

// Matrices of an input, in host memory.
struct LoadedMlaProjections {
  // Throws the errors of JobInput::read().
  LoadedMlaProjections(const JobInput& input, int threads);

  Buffer keys;
  Buffer values;
  MlaProjections matrices;
};

// Fills rows [latent, rotary key], [total_tokens(runs), 1, latent_dim + rope_dim]. Throws the errors of
// JobInput::read().
void read_latent_keys(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                      int threads);

// For each row of a head's w_uv, [head_dim_v], whether it has a non-finite value; empty without w_uv.
std::vector<bool> non_finite_values(const MlaProjections& matrices, int head);

// Maps a query, [head_dim + rope_dim], to the latent space: [latent_dim + rope_dim]. A query that is there already is
// returned unchanged.
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

// Maps an output in the latent space, [latent_dim], to [head_dim_v]. An output that stays there is returned unchanged.
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
