// SPDX-License-Identifier: Apache-2.0
// The kernel rows `sm90_mla` and `sm90_mla_split1k`: decoding in the absorbed form of latent attention.
#pragma once

#include <memory>

#include "kernels/decode.hpp"
#include "kernels/sm90/latent/config.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and outlives the kernel; mla_missing() says which specs it can do.
std::unique_ptr<DecodeKernel> make_mla_decode(const DecodeSpec& spec, Backend& backend, const MlaVariant& row);

}  // namespace ringattn::sm90
