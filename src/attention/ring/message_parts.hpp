// SPDX-License-Identifier: Apache-2.0
// What travels in each block, as all ranks see it: which rows of which owner go together to which ranks, and when they
// set out. A rank's own plan is what it does in this picture; sends and receives match because there is one picture.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/needs.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/rank_set.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Rows of one owner's shard that the same ranks need.
struct WorldMessagePart {
  int owner = 0;
  std::int64_t row = 0;  // of the owner's shard
  std::int64_t rows = 0;
  std::int32_t receivers =
      0;  // index into WorldMessageParts::sets; the owner may or may not be in the set, and doesn't count
  // Handed on from each needing rank to the next one up the ring, in rounds first_round, first_round + 1, …; otherwise
  // the owner sends it to each of them in round 0.
  bool chain = false;
  int first_round = 0;
};

struct WorldMessageParts {
  std::vector<RankSet> sets;
  std::vector<std::vector<WorldMessagePart>> blocks;  // each ascending by (owner, row)
};

// `boundaries` are tiles, [blocks + 1]. Rows that no other rank needs are in no part.
WorldMessageParts cut_message_parts(const TileAxis& axis, const Needs& needs, const Layout& keys,
                                    std::span<const std::int64_t> boundaries, Route route, const MachineModel& machine,
                                    std::int64_t token_bytes);

}  // namespace ringattn
