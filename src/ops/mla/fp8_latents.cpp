// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/fp8_latents.hpp"

#include <cstddef>

#include "base/memory.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/mla/mla_ring_steps.hpp"

namespace ringattn {

std::int64_t load_fp8_latents(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                              int threads) {
  const MlaSpec& spec = input.mla()->spec;
  const std::int64_t bytes = latent_row_bytes(spec);
  auto* const packed = static_cast<std::byte*>(rows.data);
  input.read_fp8_latents(runs, {packed, static_cast<std::size_t>(rows.tokens * bytes)}, threads);
  const std::int64_t dim = spec.latent_dim + spec.rope_dim;
  const Buffer row = allocate_host(static_cast<std::size_t>(dim) * size_of(Dtype::kBf16));
  const MutableTensorView both = dense_view(static_cast<void*>(row.data()), Dtype::kBf16, 1, 1, dim);
  std::int64_t non_finite = 0;
  for (std::int64_t token = 0; token < rows.tokens; ++token) {
    dequantize_latent_rows(packed + token * bytes, bytes, columns_of(both, 0, spec.latent_dim),
                           columns_of(both, spec.latent_dim, spec.rope_dim));
    non_finite += count_non_finite(both);
  }
  return non_finite;
}

}  // namespace ringattn
