// SPDX-License-Identifier: Apache-2.0
// Compression of tensors in host memory on any backend: blocks of tokens are copied to its memory and back. Results are
// bitwise equal on all backends.
#pragma once

#include "kernels/common/backend.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/gram.hpp"

namespace ringattn {

// Tokens in the backend's memory at a time: a multiple of every group.
inline constexpr std::int64_t kStagedTokens = std::int64_t{1} << 15;

// Backend::compress() and decompress() for views of host memory with dense streams and runs in the order of their rows.
// They wait. A task's InvalidElementCell is in host memory, and nothing is processed after the first block with an
// invalid element. Low-rank formats use a LowRankCodec, whose reports compress_staged() passes on; after a non-finite
// product it still searches for a non-finite factor. Throw kMemory if the backend has no memory for a block, and kPeer
// if it does not answer.
void compress_staged(Backend& backend, const CompressTask& task);
void decompress_staged(Backend& backend, const DecompressTask& task);
// Backend::compute_absmax() for host memory.
void compute_absmax_staged(Backend& backend, const AbsmaxTask& task);
// Backend::find_codebook() for host memory. All sampled tokens are copied to the backend's memory at once.
void find_codebook_staged(Backend& backend, const CodebookTask& task);
// LowRankCodec::add_gram() for host memory, over all rows.
void add_gram_staged(Backend& backend, const RowFormat& format, const TensorView& rows, double* sums);

}  // namespace ringattn
