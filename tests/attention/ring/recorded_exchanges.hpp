// SPDX-License-Identifier: Apache-2.0
// The exchanges that a plan's BlockMover posts, with rows of streams instead of addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/row_stream.hpp"

namespace ringattn::testing {

// The rows of a span in an exchange.
struct SpanRows {
  std::size_t stream = 0;
  bool shard = false;  // the rank's own rows, or the block buffer
  std::int64_t row = 0;
  std::int64_t rows = 0;
};

struct RecordedMessage {
  int peer = 0;
  int round = 0;
  std::vector<SpanRows> spans;
};

struct RecordedExchange {
  std::vector<RecordedMessage> sends;
  std::vector<RecordedMessage> receives;
};

// One exchange for each block, without checksums. `shard_rows`: the rank's own rows.
std::vector<RecordedExchange> recorded_exchanges(const Plan& plan, const RowStreams& streams, RowCounts shard_rows);

}  // namespace ringattn::testing
