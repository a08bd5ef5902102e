// SPDX-License-Identifier: Apache-2.0
// A rank's part of a stack: attention, a layer with states, attention. The middle layer is an SSM, a gated delta rule
// or linear attention, and each rank has adjacent whole units of its tokens. Either attention has another layout, and
// rows are moved between the layers, or attention has the middle layer's runs.
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

// Rows of attention are rows of the middle layer: heads · dim = state_heads · state_head_dim. A window makes attention
// cheap.
struct HybridStack {
  std::string backend = "cpu";
  StateLayer middle = StateLayer::kSsd;
  bool shared_runs = false;                  // attention has the runs of the middle layer, and no row is moved
  LayoutKind layout = LayoutKind::kStriped;  // of attention, without shared_runs
  // One sequence that an SSM distributes over several ranks, and shorter ones.
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

// Why a comparison of the packed rows would be meaningless: a row is not finite, or the last two are equal. Empty if it
// would not.
std::string what_is_empty(const HybridStack& stack, const std::vector<std::byte>& packed);

}  // namespace ringattn::testing
