// SPDX-License-Identifier: Apache-2.0
// Cuts the tile axis into blocks. Every rank computes the same cut, from the needs of all ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/needs.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/ring_work.hpp"
#include "attention/tokens/tile_axis.hpp"

namespace ringattn {

// Where blocks may end: after each of `count()` steps. If only keys are sent, a step is one key tile. If queries are
// sent, too, a step is one key tile and the query tiles at its positions. Where one side has no tiles, a step has only
// tiles of the other.
class BlockSteps {
 public:
  explicit BlockSteps(const TileAxis& keys);
  // `queries` is the axis of queries_to_keys() of a batch's work.
  BlockSteps(const Batch& batch, const TileAxis& keys, const TileAxis& queries, const KernelShape& kernel);

  std::int64_t count() const { return static_cast<std::int64_t>(token_.size()) - 1; }
  // The first tile of a step, of keys (direction 0) or of queries (1).
  std::int64_t tile(std::size_t direction, std::int64_t step) const {
    return tiles_.empty() ? step : tiles_[static_cast<std::size_t>(step)][direction];
  }
  // The number of packed tokens before a step: of keys, and of queries at positions without keys.
  std::int64_t token(std::int64_t step) const { return token_[static_cast<std::size_t>(step)]; }
  // The first step that begins at or after `token`.
  std::int64_t step_from(std::int64_t token) const;

 private:
  std::vector<std::array<std::int64_t, 2>> tiles_;  // [steps + 1]; empty: step and key tile are the same
  std::vector<std::int64_t> token_;                 // [steps + 1]
};

// One direction of a job: keys that are sent to queries, or queries that are sent to keys; in the latter, "keys" and
// "queries" are exchanged in all members. The referenced objects outlive it.
struct CutDirection {
  const RingWork& work;
  const TileAxis& axis;
  const Needs& needs;
};

// First step of each block, then the number of steps: [blocks + 1]. There is at least one block, which may be empty.
// `directions` are those of `steps`. Throws kUsage for invalid machine models or options. Throws kMemory, with a
// sufficient budget, if the budget is too small.
std::vector<std::int64_t> cut_blocks(std::span<const CutDirection> directions, const BlockSteps& steps,
                                     const KernelShape& kernel, const MachineModel& machine,
                                     const PlanOptions& options);

// The smallest memory budget that cut_blocks() accepts; ignores PlanOptions::memory_budget.
std::size_t min_budget(std::span<const CutDirection> directions, const BlockSteps& steps, const KernelShape& kernel,
                       const PlanOptions& options);

// Maximum number of keys of a block if blocks have up to `block_tokens` of a job's `keys` keys; 0: all keys. Blocks end
// at tile ends, so it may exceed block_tokens.
std::int64_t max_block_keys(std::int64_t keys, std::int64_t block_tokens, int key_tile);

}  // namespace ringattn
