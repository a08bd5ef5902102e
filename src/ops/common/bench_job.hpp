// SPDX-License-Identifier: Apache-2.0
// The job of a benchmark's point.
#pragma once

#include <cstdint>
#include <string>

namespace ringattn {

// What makes points comparable, beside the number of ranks.
struct BenchJob {
  std::int64_t tokens = 0;  // queries, of all sequences
  std::int64_t batch = 0;   // sequences
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  std::string dtype;
  std::string mask;    // "causal", "full", "window 1023,0", followed by all else that changes the computation
  std::string source;  // a file; empty: made up
  // Only decode steps have these.
  bool decode = false;
  std::int64_t keys = 0;       // of all sequences
  std::int64_t page_size = 0;  // tokens; 0: no pages
  std::int64_t prefix = 0;     // tokens that all sequences share
  // Only MLA has these. Head dims are then those of the expanded keys and values.
  std::string form = {};
  int rope_dim = 0;
  int latent_dim = 0;
  // Only SSM ops have these. They have no K/V heads, and `mask` says what is computed besides the scan.
  std::string ssm = {};  // the op
  int state_dim = 0;
  int groups = 0;

  bool operator==(const BenchJob&) const = default;
  std::int64_t seq() const { return batch > 0 ? (decode ? keys : tokens) / batch : 0; }
};

}  // namespace ringattn
