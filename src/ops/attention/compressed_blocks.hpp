// SPDX-License-Identifier: Apache-2.0
// The rows of a block that are decompressed: those of the tiles that the rank attends to, from its own shard and from
// the block buffer, packed. Each row is decompressed once on each rank that needs it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/options.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

struct DecompressedBlock {
  std::array<std::vector<CompressedRun>, 2> runs;  // of kOwnShard and of kBlockBuffer, as few as possible
  std::vector<PageRun> tiles;                      // of the block's task, in the decompressed rows: source 0
  std::int64_t rows = 0;
};

// `plan` is the plan of the block. Tiles are whole quantization groups of tokens.
DecompressedBlock decompressed_block(const Plan& plan, const BlockPlan& block);

// Index in the batch, counted over its sequences, of the key at row `row` of the block.
std::int64_t key_of_row(const DecompressedBlock& block, const Batch& batch, std::int64_t row);

// Bytes of the decompressed rows of the largest block, with at most this many tokens per block (0: one block), and of
// the job's tables.
std::size_t decompression_bytes(const Job& job, const Options& options, std::int64_t max_block_tokens, int key_tile);

// Throws kUsage for Options::shorter_lengths, which compressed rows do not support. Throws kUnsupported for key tiles
// that cut quantization groups of tokens.
void check_compressed(const Job& job, const Options& options, int key_tile);

}  // namespace ringattn
