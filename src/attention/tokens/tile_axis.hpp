// SPDX-License-Identifier: Apache-2.0
// The key tiles of all sequences on one axis. Tiles are cut from key 0 of each sequence and never span two sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/batch.hpp"

namespace ringattn {

class TileAxis {
 public:
  TileAxis(const Batch& batch, int key_tile);

  std::int64_t tiles() const { return static_cast<std::int64_t>(token_.size()) - 1; }
  // Packed token at which a tile begins; token(tiles()) is the number of tokens.
  std::int64_t token(std::int64_t tile) const { return token_[static_cast<std::size_t>(tile)]; }
  // The first tile of a sequence; first(number of sequences) is tiles().
  std::int64_t first(std::int32_t sequence) const { return first_[static_cast<std::size_t>(sequence)]; }
  // The sequence of a tile.
  std::int32_t sequence(std::int64_t tile) const;

 private:
  std::vector<std::int64_t> first_;  // [sequences + 1]
  std::vector<std::int64_t> token_;  // [tiles + 1]
};

}  // namespace ringattn
