// SPDX-License-Identifier: Apache-2.0
// Sends states, or gradients of states, between ranks: exchange s moves those of one head range from runs of step s
// to runs of step s + 1. Owns the send and receive buffers. Called by StateRelay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/ssm_layout.hpp"
#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// The state of one sequence: fp32, dense, heads first.
struct StateSize {
  int heads = 0;
  std::size_t head_bytes = 0;

  StateSize(int state_heads, std::int64_t head_floats)
      : heads(state_heads), head_bytes(static_cast<std::size_t>(head_floats) * sizeof(float)) {}
  StateSize(const SsmSpec& spec) : StateSize(spec.heads, std::int64_t{spec.head_dim} * spec.state_dim) {}

  std::size_t bytes() const { return static_cast<std::size_t>(heads) * head_bytes; }
};

class StateExchange {
 public:
  // Allocates the buffers. `hops`, `transport` and `ranges` (the head ranges that are sent separately) outlive the
  // object. `what`: the name of what is sent, for messages.
  StateExchange(const StateSize& state, const StateHops& hops, std::span<const HeadRange> ranges, Transport& transport,
                Backend& backend, std::string_view what = "states");

  // Bytes that rank `rank` allocates.
  static std::size_t bytes(const StateSize& state, const StateHops& hops, int rank);

  // Announces the receive buffers to the peers. Collective.
  void announce(const Deadline& deadline);
  // The same, and creates the channels of device memory. States are few and small, so the creation of a channel would
  // dominate the latency of the first one.
  void connect(const Collective& collective, Backend& backend);

  // Number of exchanges of a head range.
  int steps() const { return static_cast<int>(hops_.hops.size()); }
  // The state that this rank receives before run `run`, or sends after it; null if it doesn't. [heads, …]
  float* received(std::int64_t run) const;
  float* sent(std::int64_t run) const;
  // True if this rank receives states in exchange `step`; false for step >= steps().
  bool receives(int step) const;

  // Enqueues exchange `step` of a head range. All ranks post and wait for exchanges in the same order.
  Ticket post(std::size_t range, int step, Stream stream);

 private:
  Exchange exchange_of(std::size_t range, int step) const;
  // Byte offset and size of a head range in a state.
  std::size_t offset_of(const HeadRange& heads) const { return static_cast<std::size_t>(heads.first) * head_bytes_; }
  std::size_t size_of(const HeadRange& heads) const { return static_cast<std::size_t>(heads.count) * head_bytes_; }

  const StateHops& hops_;
  std::span<const HeadRange> ranges_;
  Transport& transport_;
  std::size_t head_bytes_;
  std::string_view what_;
  Buffer memory_;                     // at least one byte for each rank
  std::vector<std::byte*> received_;  // [runs]
  std::vector<std::byte*> sent_;      // [runs]
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
