// SPDX-License-Identifier: Apache-2.0
// Synthetic input made on the device (kernels/synthetic.hpp), with exactly the bits of the host's, and a check of what
// a tensor in device memory holds.
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

// How many elements of a tensor in device memory are NaN or ∞. Waits for the stream; throws kPeer after ten minutes.
std::int64_t count_non_finite(const TensorView& view, Stream stream);

}  // namespace ringattn::cuda
