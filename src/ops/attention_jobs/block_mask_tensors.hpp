// SPDX-License-Identifier: Apache-2.0
// A block mask in a safetensors file, in one of two equivalent forms.
//
//   block_mask     U8 or BOOL, [heads, query blocks, key blocks] of one sequence, or [sequences, heads, query blocks,
//                  key blocks] of several with equal numbers of blocks; not 0: selected
//   block_indptr   I32 or I64, [mask rows + 1], and
//   block_indices  I32 or I64, [selected blocks]: BSR. Row n of the mask selects the key blocks
//                  block_indices[block_indptr[n]] … block_indices[block_indptr[n + 1] − 1], ascending, each once. The
//                  rows of a sequence are those of its query blocks, one head after the other. Sequences follow each
//                  other, and may have different numbers of blocks.
//
// The number of heads is 1, that of KV heads or that of query heads; in BSR form it follows from the number of rows.
// The file's metadata may set query_block and key_block, which are 128 otherwise. Query blocks are counted by position:
// the first row is that of the block that contains the first query.
#pragma once

#include <vector>

#include "attention/tokens/job.hpp"
#include "io/safetensors_file.hpp"
#include "kernels/attention/block_mask_patterns.hpp"

namespace ringattn {

// The tensors that hold a file's block mask. Throws kFile for a file with neither form, with both, or with half of BSR.
std::vector<TensorSource> block_mask_tensors(const SafetensorsFile& file);

// Reads the block mask of a job. Throws kFile, naming the tensor and any invalid entry, for a file without a valid mask
// for the job, and kMemory for a mask that exceeds the budget. Only a part of a tensor is in memory at a time.
BlockMask block_mask_from_file(const SafetensorsFile& file, const Job& job, const BlockMaskBudget& budget);

}  // namespace ringattn
