// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/tile_axis.hpp"

#include <algorithm>

namespace ringattn {

TileAxis::TileAxis(const Batch& batch, int key_tile) : first_{0} {
  std::int64_t packed = 0;
  for (const Sequence& s : batch.sequences) {
    for (std::int64_t begin = 0; begin < s.k_len; begin += key_tile) {
      token_.push_back(packed + std::max<std::int64_t>(0, begin - s.k_begin));
    }
    packed += s.keys();
    first_.push_back(static_cast<std::int64_t>(token_.size()));
  }
  token_.push_back(packed);
}

std::int32_t TileAxis::sequence(std::int64_t tile) const {
  return static_cast<std::int32_t>(std::upper_bound(first_.begin(), first_.end(), tile) - first_.begin() - 1);
}

}  // namespace ringattn
