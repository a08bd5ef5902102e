// SPDX-License-Identifier: Apache-2.0
// A rank's part of packed rows, and bytes in the memory of its backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

inline std::vector<std::byte> shard_of(const Layout& layout, int rank, const std::vector<std::byte>& packed,
                                       std::int64_t token_bytes) {
  std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank) * token_bytes));
  layout.shard(rank, packed.data(), rows.data(), token_bytes);
  return rows;
}

// Memory of at least a float, NaN but for `bytes` at its beginning.
inline DeviceArray placed(Backend& backend, const std::vector<std::byte>& bytes) {
  DeviceArray memory(backend, std::max(sizeof(float), bytes.size()));
  if (!bytes.empty()) memory.write(bytes);
  return memory;
}

}  // namespace ringattn::testing
