// SPDX-License-Identifier: Apache-2.0
// Row streams: what of each token travels around the ring. Attention has two, K and V; latent attention a latent and a
// rotary key; compressed tensors as many as their formats. Plans, workspaces and transfers handle a list of streams and
// never ask what is in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ringattn {

struct RowStream {
  std::string name;              // for messages
  std::int64_t token_bytes = 0;  // of one token's row

  bool operator==(const RowStream&) const = default;
};

using RowStreams = std::vector<RowStream>;

// Bytes of one token's rows of all streams.
inline std::int64_t token_bytes(std::span<const RowStream> streams) {
  std::int64_t bytes = 0;
  for (const RowStream& stream : streams) bytes += stream.token_bytes;
  return bytes;
}

// Where the rows of each stream lie, dense: [streams]. The same row of every stream belongs to the same token.
using StreamRows = std::vector<std::byte*>;

}  // namespace ringattn
