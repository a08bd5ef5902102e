// SPDX-License-Identifier: Apache-2.0
#include "kernels/listed_keys.hpp"

#include <fmt/format.h>

namespace ringattn {

std::vector<std::string> missing_for_listed_keys(const ListShape& shape, const TileSizes& tiles, const Mask& mask,
                                                 int kv_heads) {
  std::vector<std::string> missing;
  if (!shape.any()) return missing;
  // Rows of a step lie in the same places of their query tiles, with the blocks that nobody lists and without.
  if (shape.key_block % tiles.query != 0) {
    missing.push_back(fmt::format("decoding by lists in blocks of {} keys (supported: multiples of {} and {})",
                                  shape.key_block, tiles.key, tiles.query));
  }
  // Query heads of a KV head are rows of one product.
  if (shape.heads > kv_heads) missing.push_back("decoding by a list for each query head (supported: each KV head)");
  // A window's groups of tiles begin at its first tile, which is not the same for all rows of a step.
  if (mask.left >= 0) missing.push_back("decoding by lists under a sliding window (supported: without one)");
  return missing;
}

}  // namespace ringattn
