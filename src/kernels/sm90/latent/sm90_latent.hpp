// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm90_latent`: decoding in the absorbed form of latent attention.
#pragma once

#include <memory>

#include "kernels/decode.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and outlives the kernel; latent_missing() (config.hpp) says which specs it can do.
std::unique_ptr<DecodeKernel> make_latent_decode(const DecodeSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
