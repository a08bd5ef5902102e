// SPDX-License-Identifier: Apache-2.0
// Decode results of some heads, as one rank sends them to the rank that owns the sequence, which joins the heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/tokens/decode_deal.hpp"
#include "base/memory.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Layout of one row's results of a rank's heads: out, [heads, head_dim_v], then LSE, [heads].
struct HeadResults {
  std::int64_t lse_at = 0;  // byte offset of LSE in the record
  std::int64_t bytes = 0;   // of the record, a multiple of 16

  explicit HeadResults(const AttentionSpec& part);  // `part` has the rank's heads
};

// Output of attention over these heads that writes `rows` contiguous records. Without sinks.
AttentionOutput results_in(std::byte* records, const AttentionSpec& part, std::int64_t rows);

// Joins heads on `stream`: records[i], in the backend's memory, has the results of head part i for the rows of
// `output`.
void join_heads(Backend& backend, const AttentionSpec& spec, const DecodeDeal& deal,
                std::span<std::byte* const> records, const AttentionOutput& output, Stream stream);

}  // namespace ringattn
