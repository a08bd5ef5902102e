// SPDX-License-Identifier: Apache-2.0
// Results of rows whose heads several ranks have folded: how they travel, and become rows again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/tokens/decode_deal.hpp"
#include "base/memory.hpp"
#include "kernels/attention.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// A row's results of a rank's heads, in memory: outputs, [heads, head_dim_v], and behind them LSE, [heads].
struct HeadResults {
  std::int64_t lse_at = 0;  // bytes from the record's beginning
  std::int64_t bytes = 0;   // of all of it, a multiple of 16

  explicit HeadResults(const AttentionSpec& part);  // of these heads
};

// Where a fold of these heads alone leaves the records of so many rows, which follow each other. Without sinks.
AttentionOutput results_in(std::byte* records, const AttentionSpec& part, std::int64_t rows);

// Puts heads side by side on `stream`: records[i], in the backend's memory, are those of the i-th part of the heads,
// of the rows of `output`.
void join_heads(Backend& backend, const AttentionSpec& spec, const DecodeDeal& deal,
                std::span<std::byte* const> records, const AttentionOutput& output, Stream stream);

}  // namespace ringattn
