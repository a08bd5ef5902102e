// SPDX-License-Identifier: Apache-2.0
// Which rows of a block are decompressed, and where: those of the tiles that the rank folds, side by side, the rank's
// own and those that have arrived. So every row is decompressed once where it is folded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/options.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "kernels/attention.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn {

struct DecompressedBlock {
  std::array<std::vector<CompressedRun>, 2> runs;  // of kOwnShard and of kBlockBuffer, as few as possible
  std::vector<PageRun> tiles;                      // of the block's task, in the decompressed rows: source 0
  std::int64_t rows = 0;
};

// `plan`: whose block it is. Tiles are whole groups of tokens.
DecompressedBlock decompressed_block(const Plan& plan, const BlockPlan& block);

// Which of the batch's keys row `row` of the block is, counted over its sequences.
std::int64_t key_of_row(const DecompressedBlock& block, const Batch& batch, std::int64_t row);

// K and V of a job as tensors of a format.
inline RowShape k_shape(const AttentionSpec& spec) { return {spec.dtype, spec.kv_heads, spec.head_dim}; }
inline RowShape v_shape(const AttentionSpec& spec) { return {spec.dtype, spec.kv_heads, spec.head_dim_v}; }

// Bytes of the rows of the largest block, where blocks have so many tokens at most (0: the job is one), and of the
// job's tables.
std::size_t decompression_bytes(const Job& job, const Options& options, std::int64_t max_block_tokens, int key_tile);

// Throws kUsage for shorter lengths, which runs over compressed rows don't have; kUnsupported for tiles that cut groups
// of tokens.
void check_compressed(const Job& job, const Options& options, int key_tile);

}  // namespace ringattn
