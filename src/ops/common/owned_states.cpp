// SPDX-License-Identifier: Apache-2.0
#include "ops/common/owned_states.hpp"

#include <algorithm>

#include "attention/tokens/ssm_layout.hpp"

namespace ringattn {

namespace {

std::int64_t index_in(std::span<const std::int32_t> sequences, std::int32_t sequence) {
  return std::ranges::lower_bound(sequences, sequence) - sequences.begin();
}

}  // namespace

OwnedStates::OwnedStates(const Layout& layout, int rank) {
  const StateOwners owners = state_owners(layout);
  beginning = sequences_of(owners.initial, rank);
  ending = sequences_of(owners.final, rank);
  for (std::size_t at = 0; at < ending.size(); ++at) {
    if (length_of(layout, ending[at]) > 0) continue;
    const PassThroughStates one{initial_index(ending[at]), static_cast<std::int64_t>(at), 1};
    if (!empty.empty()) {
      PassThroughStates& last = empty.back();
      if (last.initial + last.count == one.initial && last.final + last.count == one.final) {
        ++last.count;
        continue;
      }
    }
    empty.push_back(one);
  }
}

std::int64_t OwnedStates::initial_index(std::int32_t sequence) const { return index_in(beginning, sequence); }
std::int64_t OwnedStates::final_index(std::int32_t sequence) const { return index_in(ending, sequence); }

void pass_states_through(std::span<const PassThroughStates> passed, const void* initial, void* final,
                         std::int64_t state_bytes, Backend& backend, Stream stream) {
  if (final == nullptr) return;
  for (const PassThroughStates& states : passed) {
    std::byte* const to = static_cast<std::byte*>(final) + states.final * state_bytes;
    const std::int64_t bytes = states.count * state_bytes;
    if (initial == nullptr) {
      backend.fill_bytes(to, std::byte{0}, static_cast<std::size_t>(bytes), stream);
      continue;
    }
    const std::byte* const from = static_cast<const std::byte*>(initial) + states.initial * state_bytes;
    if (from != to) backend.copy_rows(to, bytes, from, bytes, bytes, 1, stream);
  }
}

}  // namespace ringattn
