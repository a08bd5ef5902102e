// SPDX-License-Identifier: Apache-2.0
// Row streams: the tensors of which rows are sent around the ring. Attention has two, K and V. MLA has two, latent and
// rotary key. A compressed tensor has those of its format. Plans, workspaces and transfers only know their sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ringattn {

struct RowStream {
  std::string name;              // for messages
  std::int64_t token_bytes = 0;  // of one row, which belongs to one token

  bool operator==(const RowStream&) const = default;
};

using RowStreams = std::vector<RowStream>;

// Bytes of one token over all streams.
inline std::int64_t token_bytes(std::span<const RowStream> streams) {
  std::int64_t bytes = 0;
  for (const RowStream& stream : streams) bytes += stream.token_bytes;
  return bytes;
}

// Address of the dense rows of each stream: [streams]. Row i of every stream belongs to the same token.
using StreamRows = std::vector<std::byte*>;

}  // namespace ringattn
