// SPDX-License-Identifier: Apache-2.0
// The job of a benchmark's point.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ringattn {

// What limits the job, which determines the figures that are shown.
enum class BenchKind {
  kRing,    // computation, while K/V blocks travel around the ring: FLOP/s, exposed communication
  kStep,    // reading a KV cache: microseconds per step, bytes per second
  kStream,  // reading and writing rows: tokens and bytes per second
};

// A number, or a word.
using BenchValue = std::variant<std::int64_t, std::string>;

// The values that must be equal for points to be comparable, besides the number of ranks.
struct BenchJob {
  std::string op;
  BenchKind kind = BenchKind::kRing;
  std::int64_t tokens = 0;  // queries, of all sequences
  std::int64_t seq = 0;     // tokens of a sequence; for a decode step its keys
  std::int64_t batch = 0;   // sequences
  // Other values that determine the job, by name: "heads", "dtype", "mask".
  std::vector<std::pair<std::string, BenchValue>> members;
  std::string source;  // a file; empty: synthetic

  // The number with that name, or 0.
  std::int64_t number(std::string_view name) const;
  // "16384 tokens, 1 sequence, attention, heads 8, kv_heads 2, head_dim 128, bf16, causal"
  std::string label() const;
  // Whether two lines are of the same job, whichever program wrote them and in any order of members.
  bool operator==(const BenchJob& other) const;
};

}  // namespace ringattn
