// SPDX-License-Identifier: Apache-2.0
// The kernel rows `sm90_latent` and `sm90_latent_1k`: decoding in the absorbed form of latent attention.
#pragma once

#include <memory>

#include "kernels/decode.hpp"
#include "kernels/sm90/latent/config.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and outlives the kernel; latent_missing() says which specs it can do.
std::unique_ptr<DecodeKernel> make_latent_decode(const DecodeSpec& spec, Backend& backend, const LatentRow& row);

}  // namespace ringattn::sm90
