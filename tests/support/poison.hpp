// SPDX-License-Identifier: Apache-2.0
// Values with which tests fill memory that a call must write, or must not read.
#pragma once

#include <cstddef>

namespace ringattn::testing {

inline constexpr std::byte kPoison{0xff};  // every byte of it: NaN in every dtype

}  // namespace ringattn::testing
