// SPDX-License-Identifier: Apache-2.0
// GPU implementation of kernels/quant/compressed_rows.hpp, kernels/quant/codebook.hpp and kernels/quant/gram.hpp.
// CudaBackend calls it.
#pragma once

#include "base/memory.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/gram.hpp"

namespace ringattn::cuda {

inline constexpr int kMaxRowDim = 640;

// All functions enqueue on the current device. Quantization throws kUnsupported for dims above kMaxRowDim. Without
// runs, or without sequences, decompress() and append() only load their kernels, so that loading happens neither while
// a graph is captured nor while peers wait.

void decompress(const DecompressTask& task, Stream stream);
void compress(const CompressTask& task, Stream stream);
void compute_absmax(const AbsmaxTask& task, Stream stream);
void append(const AppendTask& task, Stream stream);
void find_codebook(const CodebookTask& task, Stream stream);
void add_gram(const GramTask& task, Stream stream);
void check_finite(const FiniteTask& task, Stream stream);

}  // namespace ringattn::cuda
