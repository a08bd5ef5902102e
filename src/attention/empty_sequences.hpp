// SPDX-License-Identifier: Apache-2.0
// Sequences without tokens, as packed batches of a server have them: their state passes through. No kernel sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.hpp"

namespace ringattn {

// States [initial, initial + count) of a rank's initial ones, which become its final states [final, final + count).
struct PassThroughStates {
  std::int64_t initial = 0;
  std::int64_t final = 0;
  std::int64_t count = 0;

  bool operator==(const PassThroughStates&) const = default;
};

// The empty sequences of a rank, neighbours together. `beginning` and `ending`: the sequences whose initial and final
// states the rank has, ascending (state_owners(), attention/tokens/ssm_layout.hpp).
std::vector<PassThroughStates> empty_sequences(std::span<const std::int64_t> lengths,
                                               std::span<const std::int32_t> beginning,
                                               std::span<const std::int32_t> ending);

// Copies them, or writes zeros where `initial` is null. `final`: null where final states are not wanted; it may be
// `initial`. States are dense, of `state_bytes` each. Ordered on `stream`.
void pass_states_through(std::span<const PassThroughStates> passed, const void* initial, void* final,
                         std::int64_t state_bytes, Backend& backend, Stream stream);

// The index of a sequence in an ascending list that holds it.
std::int64_t index_of(std::span<const std::int32_t> sequences, std::int32_t sequence);

}  // namespace ringattn
