// SPDX-License-Identifier: Apache-2.0
// A rank's part of attention → a layer with states → attention on one set of shards. The middle layer is an SSM, a
// gated delta rule or linear attention, whose ranks have adjacent whole units of tokens. Either attention's layout is
// another one, and rows are moved between the layers, or attention has the middle layer's runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::testing {

enum class StateLayer { kSsd, kGatedDelta, kLinearAttention };

// Rows of attention are rows of the middle layer: heads · dim = state_heads · state_head_dim. A window keeps attention
// short.
struct HybridStack {
  std::string backend = "cpu";
  StateLayer middle = StateLayer::kSsd;
  bool shared_runs = false;                  // attention has the runs of the middle layer, and no row is moved
  LayoutKind layout = LayoutKind::kStriped;  // of attention, without shared_runs
  // A sequence that an SSM has on several ranks, and others.
  std::vector<std::int64_t> lengths{kSuperSegmentTokens + 300, 517, 90};
  int heads = 2;
  int dim = 16;
  int state_heads = 2;
  int state_head_dim = 16;
  int state_dim = 8;  // of B and C, or of q and k

  std::int64_t row_bytes() const { return std::int64_t{2} * heads * dim; }  // of bf16
  std::int64_t packed_bytes() const;
};

// Everything is enqueued before anything is waited for. Leaves the rank's rows of the last layer's O in `packed`, which
// has packed_bytes(), and returns the bytes that moving rows between the layers sends to this rank. Collective.
std::int64_t run_hybrid_rank(const HybridStack& stack, Transport& transport, std::vector<std::byte>& packed);

// Says where the packed rows tell nothing: they are finite, and the last two differ.
std::string what_is_empty(const HybridStack& stack, const std::vector<std::byte>& packed);

}  // namespace ringattn::testing
