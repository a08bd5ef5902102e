// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/compressed_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/ring/blocks.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "ops/attention/block_tiles.hpp"

namespace ringattn {

namespace {

bool goes_on(const CompressedRun& run, const CompressedRun& next) {
  return run.sequence == next.sequence && run.position + run.rows == next.position && run.row + run.rows == next.row;
}

}  // namespace

DecompressedBlock decompressed_block(const Plan& plan, const BlockPlan& block) {
  DecompressedBlock decompressed;
  decompressed.tiles.resize(block.tiles.size());
  for (const BlockTile& tile : tiles_by_address(plan, block)) {
    const CompressedRun run{tile.sequence, tile.position, tile.keys, tile.from.row, tile.rows, decompressed.rows};
    decompressed.tiles[tile.entry] = {0, decompressed.rows};
    decompressed.rows += tile.rows;
    std::vector<CompressedRun>& runs = decompressed.runs[static_cast<std::size_t>(tile.from.source)];
    if (!runs.empty() && goes_on(runs.back(), run)) {
      runs.back().rows += run.rows;
    } else {
      runs.push_back(run);
    }
  }
  return decompressed;
}

std::int64_t key_of_row(const DecompressedBlock& block, const Batch& batch, std::int64_t row) {
  for (const std::vector<CompressedRun>& runs : block.runs) {
    for (const CompressedRun& run : runs) {
      if (row < run.to || row >= run.to + run.rows) continue;
      return batch.cu_k()[static_cast<std::size_t>(run.sequence)] + run.position + (row - run.to);
    }
  }
  fail(ErrorCode::kInternal, fmt::format("row {} of a decompressed block", row),
       fmt::format("it has {} of them", block.rows));
}

std::size_t decompression_bytes(const Job& job, const Options& options, std::int64_t max_block_tokens, int key_tile) {
  const std::int64_t rows =
      max_block_keys(job.batch.k_tokens(), std::max(options.block_tokens, max_block_tokens), key_tile);
  const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  return static_cast<std::size_t>(rows * kv_token_bytes(job.spec) +
                                  table_bytes(job.format.k, k_shape(job.spec), sequences) +
                                  table_bytes(job.format.v, v_shape(job.spec), sequences));
}

void check_compressed(const Job& job, const Options& options, int key_tile) {
  if (options.shorter_lengths) {
    fail(ErrorCode::kUsage, "shorter lengths are wanted of compressed keys", "their blocks are prepared once",
         "Leave Options::shorter_lengths off.");
  }
  for (const RowFormat& format : {job.format.k, job.format.v}) {
    if (quantized_per_token(format) || key_tile % format.group == 0) continue;
    fail(ErrorCode::kUnsupported, fmt::format("groups of {} tokens in key tiles of {}", format.group, key_tile),
         "a tile is whole groups", {"Choose another kernel with ", setting("kernel"), ", or smaller groups."});
  }
}

}  // namespace ringattn
