// SPDX-License-Identifier: Apache-2.0
// sm80_linear_int8 and sm80_linear_int4: mma.sync, for every GPU from sm_80 on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/linear.hpp"

namespace ringattn::sm80 {

std::vector<std::string> int8_linear_configs();
std::vector<std::string> int4_linear_configs();
std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, Backend& backend);
std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, Backend& backend);

}  // namespace ringattn::sm80
