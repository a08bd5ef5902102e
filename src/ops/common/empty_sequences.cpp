// SPDX-License-Identifier: Apache-2.0
#include "ops/common/empty_sequences.hpp"

#include <algorithm>

namespace ringattn {

std::int64_t index_of(std::span<const std::int32_t> sequences, std::int32_t sequence) {
  return std::ranges::lower_bound(sequences, sequence) - sequences.begin();
}

std::vector<PassThroughStates> empty_sequences(std::span<const std::int64_t> lengths,
                                               std::span<const std::int32_t> beginning,
                                               std::span<const std::int32_t> ending) {
  std::vector<PassThroughStates> passed;
  for (std::size_t at = 0; at < ending.size(); ++at) {
    if (lengths[static_cast<std::size_t>(ending[at])] > 0) continue;
    const PassThroughStates one{index_of(beginning, ending[at]), static_cast<std::int64_t>(at), 1};
    if (!passed.empty()) {
      PassThroughStates& last = passed.back();
      if (last.initial + last.count == one.initial && last.final + last.count == one.final) {
        ++last.count;
        continue;
      }
    }
    passed.push_back(one);
  }
  return passed;
}

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
