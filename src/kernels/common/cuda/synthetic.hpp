// SPDX-License-Identifier: Apache-2.0
// Synthetic input generated on the device (kernels/common/synthetic.hpp), bitwise equal to the host's.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/common/synthetic.hpp"

namespace ringattn::cuda {

// Enqueues. Fills `rows`, [tokens of all runs, heads, dim] in device memory, with the elements of the runs' tokens, one
// run after another, rounded to nearest even. `runs` is read before the call returns.
void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, Stream stream);

}  // namespace ringattn::cuda
