// SPDX-License-Identifier: Apache-2.0
// A rank's part of attention → SSM → attention on one set of shards: attention's layout is striped, SSM's ranks
// have neighbouring super-segments, and rows go from one to the other between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"

namespace ringattn::testing {

// Rows of attention are rows of the SSM layer: heads · dim = ssm_heads · ssm_dim. A window keeps attention short.
struct HybridStack {
  std::string backend = "cpu";
  LayoutKind layout = LayoutKind::kStriped;
  int heads = 2;
  int dim = 16;
  int ssm_heads = 2;
  int ssm_dim = 16;
  int state_dim = 8;

  // A sequence that SSM has on several ranks, and others.
  static std::vector<std::int64_t> lengths();
  std::int64_t row_bytes() const { return std::int64_t{2} * heads * dim; }  // of bf16
  std::int64_t packed_bytes() const;
};

// Everything is enqueued before anything is waited for. Leaves the rank's rows of the last layer's O in `packed`, which
// has packed_bytes(). Collective.
void run_hybrid_rank(const HybridStack& stack, Transport& transport, std::vector<std::byte>& packed);

// Says where the packed rows tell nothing: they are finite, and the last two differ.
std::string what_is_empty(const HybridStack& stack, const std::vector<std::byte>& packed);

}  // namespace ringattn::testing
