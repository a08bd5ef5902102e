// SPDX-License-Identifier: Apache-2.0
// The key tiles of all sequences on one axis: tiles are cut from the start of each sequence and never span two, so
// planning counts in tiles, and a packed batch is as simple as one sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/batch.hpp"

namespace ringattn {

class TileAxis {
 public:
  TileAxis(const Batch& batch, int key_tile);

  std::int64_t tiles() const { return static_cast<std::int64_t>(token_.size()) - 1; }
  // Packed token at which a tile begins; of tiles(): all tokens.
  std::int64_t token(std::int64_t tile) const { return token_[static_cast<std::size_t>(tile)]; }
  // The first tile of a sequence; of the number of sequences: tiles().
  std::int64_t first(std::int32_t sequence) const { return first_[static_cast<std::size_t>(sequence)]; }
  // The sequence that a tile is cut from.
  std::int32_t sequence(std::int64_t tile) const;
  // The first tile boundary that is at `token` or behind it.
  std::int64_t boundary_from(std::int64_t token) const;

 private:
  std::vector<std::int64_t> first_;  // [sequences + 1]
  std::vector<std::int64_t> token_;  // [tiles + 1]
};

}  // namespace ringattn
