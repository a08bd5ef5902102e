// SPDX-License-Identifier: Apache-2.0
// Tensors in host memory that are coded on any backend: some tokens at a time go to its memory and come back. Backends
// make the same bits, so nobody sees where it was done.
#pragma once

#include "kernels/backend.hpp"
#include "kernels/codebook.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/gram.hpp"

namespace ringattn {

// Tokens that are in the backend's memory at a time: a multiple of every group.
inline constexpr std::int64_t kStagedTokens = std::int64_t{1} << 15;

// Backend::compress() and decompress() of views of host memory, whose streams are dense and whose runs are in the order
// of their rows. They return when all is done. A task's fault cell is the host's; behind the first piece with a fault
// nothing more is done. A format with a rank is a LowRankCodec's, and compress_staged() then tells what that tells; a
// product that isn't finite doesn't end the search for a factor. Throw kMemory where the backend
// has no room for a piece, kPeer where it doesn't answer.
void compress_staged(Backend& backend, const CompressTask& task);
void decompress_staged(Backend& backend, const DecompressTask& task);
// Backend::compute_absmax() likewise.
void compute_absmax_staged(Backend& backend, const AbsmaxTask& task);
// Backend::find_codebook() likewise, of which the tokens that are looked at go to the backend's memory, all at once.
void find_codebook_staged(Backend& backend, const CodebookTask& task);
// LowRankCodec::add_gram() likewise, of all rows.
void add_gram_staged(Backend& backend, const RowFormat& format, const TensorView& rows, double* sums);

}  // namespace ringattn
