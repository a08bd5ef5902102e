// SPDX-License-Identifier: Apache-2.0
// Synthetic input made on the device (kernels/synthetic.hpp), with exactly the bits of the host's.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn::cuda {

// Enqueues: `rows`, [tokens of all runs, heads, dim] in device memory, get the elements of the runs' tokens, one run
// after the other, rounded to nearest even. `runs` is read before the call returns.
void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, Stream stream);

}  // namespace ringattn::cuda
