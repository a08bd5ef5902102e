// SPDX-License-Identifier: Apache-2.0
// Where blocks begin and end. Every rank cuts alike: the cut looks at all ranks' needs, and at nothing of its own.
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

// First tile of each block, with all tiles behind: [blocks + 1]. There is always a block, if of nothing. Throws kUsage
// for a machine model or options that make no sense, and kMemory, saying what would fit, when the budget can't hold.
std::vector<std::int64_t> cut_blocks(const RingWork& work, const TileAxis& axis, const Needs& needs,
                                     const KernelShape& kernel, const MachineModel& machine,
                                     const PlanOptions& options);

// The smallest memory budget that cut_blocks() doesn't refuse, whatever PlanOptions::memory_budget is.
std::size_t min_budget(const RingWork& work, const TileAxis& axis, const Needs& needs, const KernelShape& kernel,
                       const PlanOptions& options);

// The most of a job's `keys` keys that a block has, where it is asked to have up to `block_tokens`; 0: up to all. It
// ends at a tile's end, so it may have some keys more.
std::int64_t max_block_keys(std::int64_t keys, std::int64_t block_tokens, int key_tile);

}  // namespace ringattn
