// SPDX-License-Identifier: Apache-2.0
// The GEMMs around MLA as a caller computes them, by the library's op class: mapping queries into the latent space, and
// outputs back from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/mla/mla.hpp"

namespace ringattn::testing {

// q [rows, heads, head_dim + rope_dim] and w_uk, packed, as [rows, heads, latent_dim + rope_dim]. `backend`: "cpu" or
// "cuda", of whose kernels it is the first one.
std::vector<std::byte> queries_in_latent(const MlaSpec& spec, const std::vector<std::byte>& q,
                                         const std::vector<std::byte>& w_uk, const std::string& backend);

// O in the latent, [rows, heads, latent_dim], as [rows, heads, head_dim_v].
std::vector<std::byte> outputs_from_latent(const MlaSpec& spec, const std::vector<std::byte>& in_latent,
                                           const std::vector<std::byte>& w_uv, const std::string& backend);

}  // namespace ringattn::testing
