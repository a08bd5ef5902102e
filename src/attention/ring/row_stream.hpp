// SPDX-License-Identifier: Apache-2.0
// Row streams: the tensors whose rows are sent around the ring. Attention has two, K and V. MLA has two, latent and
// rotary key. A compressed tensor has those of its format. The backward pass also sends rows of queries. Plans,
// workspaces and transfers only know sizes.
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
  bool queries = false;          // true: rows of queries, sent to keys; false: rows of keys, sent to queries

  bool operator==(const RowStream&) const = default;
};

using RowStreams = std::vector<RowStream>;

// Bytes of one key over all streams of keys, or of one query over all streams of queries.
inline std::int64_t token_bytes(std::span<const RowStream> streams, bool queries = false) {
  std::int64_t bytes = 0;
  for (const RowStream& stream : streams) bytes += stream.queries == queries ? stream.token_bytes : 0;
  return bytes;
}

// Numbers of rows of a memory that holds streams of keys and of queries.
struct RowCounts {
  std::int64_t keys = 0;
  std::int64_t queries = 0;

  std::int64_t of(const RowStream& stream) const { return stream.queries ? queries : keys; }
  bool operator==(const RowCounts&) const = default;
};

// Address of the dense rows of each stream: [streams]. Row i of every stream belongs to the same token.
using StreamRows = std::vector<std::byte*>;

}  // namespace ringattn
