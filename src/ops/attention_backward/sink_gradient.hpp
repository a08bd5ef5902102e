// SPDX-License-Identifier: Apache-2.0
// The gradient of the sinks: the sum of all queries' terms (RowStatsTask::sink_terms), in an order that does not depend
// on ranks: over the queries of each tile of kBackwardTile positions, ascending, then over the tiles of a sequence,
// ascending, then over the sequences in order. A rank sums its own tiles. All ranks receive these sums and add them. If
// several ranks have queries of one tile, its terms are sent one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Bytes that a SinkGradient allocates, without tables, if no tile is divided among ranks.
std::size_t sink_gradient_bytes(const Batch& batch, int heads);

class SinkGradient {
 public:
  // Allocates memory. All arguments except the layout outlive the object.
  SinkGradient(const Batch& batch, const Layout& queries, int heads, AttentionBackwardKernel& kernel, Backend& backend,
               Transport& transport, const Timeouts& timeouts);
  // Collective. Announces the receive buffers of the ranks' sums.
  void connect();

  // The steps of a run; they enqueue on `stream` (devices) or do the work (hosts).
  // `terms`: [rows, heads] of this rank's queries.
  void sum_own(const float* terms, Stream stream);
  // Receives the other ranks' sums, which take about `seconds` to compute.
  void exchange(Stream stream, double seconds);
  // Writes the sum over all ranks, [heads] in the backend's memory.
  void sum_all(float* dsinks, Stream stream);

 private:
  // Sums of rows, in the backend's memory.
  struct Sums {
    Buffer order;   // empty: rows 0, 1, …
    Buffer begins;  // [count + 1]
    std::int64_t count = 0;
    Buffer values;  // [count, heads]; empty: written to another buffer
  };

  Sums make_sums(std::span<const std::int64_t> order, std::span<const std::int64_t> begins);
  void run(const Sums& sums, const float* rows, float* values, Stream stream);
  Exchange parts_exchange() const;
  float* part(std::int64_t number) const;

  int heads_;
  AttentionBackwardKernel& kernel_;
  Backend& backend_;
  Transport& transport_;
  Timeouts timeouts_;
  std::vector<std::int64_t> first_part_;  // of each rank, then the number of parts: [ranks + 1]
  Buffer parts_;                          // [parts, heads]: what each rank sends
  Sums own_, tiles_, sequences_, total_;
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
