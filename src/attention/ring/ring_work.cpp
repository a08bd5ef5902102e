// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/ring_work.hpp"

#include <vector>

namespace ringattn {

RingWork keys_to_queries(const RingWork& work) {
  RingWork part = work;
  std::erase_if(part.streams, [](const RowStream& stream) { return stream.queries; });
  part.query_pair_flops = 0.0;
  return part;
}

RingWork queries_to_keys(const RingWork& work, int query_tile) {
  RingWork part;
  part.batch = transposed(work.batch, query_tile);
  part.mask = {work.mask.right, work.mask.left};
  for (const RowStream& stream : work.streams) {
    if (stream.queries) part.streams.push_back({stream.name, stream.token_bytes});
  }
  part.pair_flops = work.query_pair_flops;
  part.tiles_by_query = true;
  return part;
}

}  // namespace ringattn
