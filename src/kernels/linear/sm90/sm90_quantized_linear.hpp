// SPDX-License-Identifier: Apache-2.0
// sm90_linear_int8 and sm90_linear_int4: wgmma. Tasks whose tensors TMA can't read are computed by the mma.sync
// kernels, which have the same bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn::sm90 {

std::vector<std::string> int8_linear_configs();
std::vector<std::string> int4_linear_configs();
std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, Backend& backend);
std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
