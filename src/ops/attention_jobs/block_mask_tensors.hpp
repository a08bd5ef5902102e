// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks in a safetensors file, in one of two forms that say the same.
//
//   block_mask     U8 or BOOL, [heads, query blocks, key blocks] of one sequence, or [sequences, heads, query blocks,
//                  key blocks] of several with equal numbers of blocks; not 0: listed
//   block_indptr   I32 or I64, [lists + 1], and
//   block_indices  I32 or I64, [listed blocks]: the rows of such a mask one after the other, each as the numbers of its
//                  listed key blocks. List n holds entries block_indptr[n] … block_indptr[n + 1] − 1 of block_indices,
//                  ascending, each block once. The lists of a sequence are those of its query blocks, for each head in
//                  turn; sequences follow each other, and may have different numbers of blocks.
//
// Heads are 1, the KV heads or the query heads; of compressed rows their number follows from that of the lists. The
// file's metadata may name query_block and key_block, which are 128 otherwise. Query blocks are counted by position:
// the first row is that of the block which the first query lies in.
#pragma once

#include <vector>

#include "attention/tokens/job.hpp"
#include "io/safetensors_file.hpp"
#include "kernels/attention/block_mask_patterns.hpp"

namespace ringattn {

// The tensors that hold a file's block mask. Throws kFile for a file with neither form, with both, or with half of one.
std::vector<TensorSource> block_mask_tensors(const SafetensorsFile& file);

// Reads the block mask of a job. Throws kFile for a file that has none for it, naming the tensor and, where one is
// wrong, the entry; kMemory for a mask that exceeds the budget. Only a part of a tensor is in memory at a time.
BlockMask block_mask_from_file(const SafetensorsFile& file, const Job& job, const BlockMaskBudget& budget);

}  // namespace ringattn
