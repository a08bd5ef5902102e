// SPDX-License-Identifier: Apache-2.0
// The decode kernels `sm90_mla` and `sm90_mla_split1k`: absorbed MLA on Hopper. Created by the kernel registry.
#pragma once

#include <memory>

#include "kernels/decode/decode.hpp"
#include "kernels/mla/sm90/config.hpp"

namespace ringattn::sm90 {

// `backend` must be a CudaBackend and must outlive the kernel. mla_missing() says which specs are supported.
std::unique_ptr<DecodeKernel> make_mla_decode(const DecodeSpec& spec, Backend& backend, const MlaVariant& variant);

}  // namespace ringattn::sm90
