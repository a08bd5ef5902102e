// SPDX-License-Identifier: Apache-2.0
// The states of sequences that a rank has, and those among them that no kernel computes: sequences without tokens, as
// in packed batches of a server, pass their states through. A halo of a convolution is a state, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// States [initial, initial + count) of the initial states are copied to [final, final + count) of the final states.
struct PassThroughStates {
  std::int64_t initial = 0;
  std::int64_t final = 0;
  std::int64_t count = 0;
};

inline std::int64_t length_of(const Layout& layout, std::int32_t sequence) {
  const auto s = static_cast<std::size_t>(sequence);
  return layout.cu()[s + 1] - layout.cu()[s];
}

struct OwnedStates {
  OwnedStates() = default;
  OwnedStates(const Layout& layout, int rank);

  // Index of a sequence's state in the rank's initial or final states.
  std::int64_t initial_index(std::int32_t sequence) const;
  std::int64_t final_index(std::int32_t sequence) const;

  // Makes the rank's `runs` read `initial` and write `final` where a sequence begins or ends: dense states of `floats`
  // elements each. Null: the job has none.
  template <class Run>
  void bind(const Layout& layout, int rank, const float* initial, float* final, std::int64_t floats,
            std::vector<Run>& runs) const {
    const std::span<const TokenRun> tokens = layout.runs(rank);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const std::int32_t sequence = tokens[i].sequence;
      if (tokens[i].begin == 0 && initial != nullptr) runs[i].initial = initial + initial_index(sequence) * floats;
      if (tokens[i].end == length_of(layout, sequence) && final != nullptr) {
        runs[i].final = final + final_index(sequence) * floats;
      }
    }
  }

  // The sequences whose initial and final states the rank has, ascending (state_owners(),
  // attention/tokens/ssm_layout.hpp).
  std::vector<std::int32_t> beginning;
  std::vector<std::int32_t> ending;
  std::vector<PassThroughStates> empty;  // sequences without tokens; adjacent ones are merged
};

// Copies the states, or writes zeros if `initial` is null. `final` is null if final states are not wanted, and may be
// equal to `initial`. States are dense, `state_bytes` each. Ordered on `stream`.
void pass_states_through(std::span<const PassThroughStates> passed, const void* initial, void* final,
                         std::int64_t state_bytes, Backend& backend, Stream stream);

}  // namespace ringattn
