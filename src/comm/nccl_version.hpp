// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ringattn {

// "2.28.3", or why there is none.
std::string nccl_version();

}  // namespace ringattn
