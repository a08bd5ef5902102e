// SPDX-License-Identifier: Apache-2.0
// The exchange of each block over all ranks: which rows of which owner are sent to which ranks, and in which round.
// Every rank computes all of it and takes its own messages, so sends and receives match.
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

// Rows of one owner's shard that the same set of ranks needs.
struct WorldMessagePart {
  int owner = 0;
  std::int64_t row = 0;  // of the owner's shard
  std::int64_t rows = 0;
  std::int32_t receivers = 0;  // index into WorldMessageParts::sets; the owner is no receiver, even if it is in the set
  // True: each receiver forwards the rows to the next receiver up the ring, in rounds first_round, first_round + 1, ….
  // False: the owner sends them to each receiver in round 0.
  bool chain = false;
  int first_round = 0;
};

struct WorldMessageParts {
  std::vector<RankSet> sets;
  std::vector<std::vector<WorldMessagePart>> blocks;  // each ascending by (owner, row)
};

// `boundaries`: first tile of each block, [blocks + 1]. Rows that no other rank needs are in no part.
WorldMessageParts cut_message_parts(const TileAxis& axis, const Needs& needs, const Layout& keys,
                                    std::span<const std::int64_t> boundaries, Route route, const MachineModel& machine,
                                    std::int64_t token_bytes);

}  // namespace ringattn
