// SPDX-License-Identifier: Apache-2.0
// Cuts the tile axis into KV blocks. Every rank computes the same cut, from the needs of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/needs.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/ring_work.hpp"
#include "attention/tokens/tile_axis.hpp"

namespace ringattn {

// First tile of each block, then the number of tiles: [blocks + 1]. There is at least one block, which may be empty.
// Throws kUsage for invalid machine models or options. Throws kMemory, with a sufficient budget, if the budget is too
// small.
std::vector<std::int64_t> cut_blocks(const RingWork& work, const TileAxis& axis, const Needs& needs,
                                     const KernelShape& kernel, const MachineModel& machine,
                                     const PlanOptions& options);

// The smallest memory budget that cut_blocks() accepts; ignores PlanOptions::memory_budget.
std::size_t min_budget(const RingWork& work, const TileAxis& axis, const Needs& needs, const KernelShape& kernel,
                       const PlanOptions& options);

// Maximum number of keys of a block if blocks have up to `block_tokens` of a job's `keys` keys; 0: all keys. Blocks end
// at tile ends, so it may exceed block_tokens.
std::int64_t max_block_keys(std::int64_t keys, std::int64_t block_tokens, int key_tile);

}  // namespace ringattn
