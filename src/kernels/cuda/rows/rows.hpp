// SPDX-License-Identifier: Apache-2.0
// Compressed rows in a GPU's memory: what the cuda backend does of kernels/compressed_rows.hpp.
#pragma once

#include "base/memory.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn::cuda {

// Enqueue the tasks on the current device. Throw kUnsupported for dims beyond kMostRowDim.
inline constexpr int kMostRowDim = 640;

void decompress(const DecompressTask& task, Stream stream);
void compress(const CompressTask& task, Stream stream);
void greatest_magnitudes(const MagnitudeTask& task, Stream stream);
void append(const AppendTask& task, Stream stream);

}  // namespace ringattn::cuda
