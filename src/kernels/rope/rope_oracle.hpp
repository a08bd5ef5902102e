// SPDX-License-Identifier: Apache-2.0
// RoPE by its definition, in fp64, with the spec's frequencies and libm's sine.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/rope/rope.hpp"

namespace ringattn {

// Rotates x, [head_dim], of a token at `positions`, [axis_count()], to y. `allowed`: the maximum error of a kernel's y,
// including its rounding to the spec's dtype. Without `exact` the angle is rounded to fp32, as rope.hpp requires.
void rope_oracle(const RopeSpec& spec, std::span<const std::int64_t> positions, bool inverse, std::span<const float> x,
                 std::span<double> y, std::span<double> allowed);

}  // namespace ringattn
