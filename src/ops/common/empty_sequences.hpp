// SPDX-License-Identifier: Apache-2.0
// Sequences without tokens, as in packed batches of a server. Their states are copied without any kernel. Called by Ssm
// and CausalConv1d.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/backend.hpp"

namespace ringattn {

// The rank's initial states [initial, initial + count) are copied to its final states [final, final + count).
struct PassThroughStates {
  std::int64_t initial = 0;
  std::int64_t final = 0;
  std::int64_t count = 0;

  bool operator==(const PassThroughStates&) const = default;
};

// The empty sequences of a rank, with adjacent ones merged. `beginning` and `ending`: the sequences whose initial and
// final states the rank has, ascending (state_owners(), attention/tokens/ssm_layout.hpp).
std::vector<PassThroughStates> empty_sequences(std::span<const std::int64_t> lengths,
                                               std::span<const std::int32_t> beginning,
                                               std::span<const std::int32_t> ending);

// Copies the states, or writes zeros if `initial` is null. `final` is null if final states are not wanted, and may be
// equal to `initial`. States are dense, `state_bytes` each. Ordered on `stream`.
void pass_states_through(std::span<const PassThroughStates> passed, const void* initial, void* final,
                         std::int64_t state_bytes, Backend& backend, Stream stream);

// Index of a sequence in an ascending list that contains it.
std::int64_t index_of(std::span<const std::int32_t> sequences, std::int32_t sequence);

}  // namespace ringattn
