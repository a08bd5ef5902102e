// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_projections.hpp"

#include <cmath>

namespace ringattn {

namespace {

GemmWeights read_matrices(const JobInput& input, SyntheticTensor tensor, int dim_n, int threads, Buffer& buffer) {
  const MlaSpec& spec = input.mla()->spec;
  const PackedRun heads[] = {{0, spec.heads}};
  buffer = allocate_host(static_cast<std::size_t>(spec.heads) * static_cast<std::size_t>(dim_n) *
                         static_cast<std::size_t>(spec.latent_dim) * size_of(spec.dtype));
  const MutableTensorView rows =
      dense_view(static_cast<void*>(buffer.data()), spec.dtype, spec.heads, dim_n, spec.latent_dim);
  input.read(tensor, heads, rows, threads);
  return {rows.data, spec.dtype, spec.heads, dim_n, rows.dim, rows.token_stride, rows.head_stride, 1};
}

}  // namespace

LoadedMlaProjections::LoadedMlaProjections(const JobInput& input, int threads) {
  matrices.spec = input.mla()->spec;
  matrices.form = *input.mla()->form;
  const MlaSpec& spec = matrices.spec;
  if (!spec.q_in_latent) {
    matrices.w_uk = read_matrices(input, SyntheticTensor::kWeightKeys, spec.head_dim, threads, keys);
  }
  if (!spec.out_in_latent) {
    matrices.w_uv = read_matrices(input, SyntheticTensor::kWeightValues, spec.head_dim_v, threads, values);
  }
}

std::vector<bool> non_finite_values(const MlaProjections& matrices, int head) {
  const MlaSpec& spec = matrices.spec;
  std::vector<bool> found;
  if (spec.out_in_latent) return found;
  const std::byte* at = matrices.w_uv.at(head);
  for (int dim_n = 0; dim_n < spec.head_dim_v; ++dim_n) {
    bool any = false;
    for (int i = 0; i < spec.latent_dim; ++i, at += size_of(spec.dtype)) {
      any = any || !std::isfinite(load_element(at, spec.dtype));
    }
    found.push_back(any);
  }
  return found;
}

void read_latent_keys(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                      int threads) {
  MutableTensorView part = rows;
  part.dim = input.mla()->spec.latent_dim;
  input.read(SyntheticTensor::kLatent, runs, part, threads);
  part.data = part.at(0, 0) + static_cast<std::size_t>(part.dim) * size_of(rows.dtype);
  part.dim = input.mla()->spec.rope_dim;
  input.read(SyntheticTensor::kKeyRope, runs, part, threads);
}

}  // namespace ringattn
