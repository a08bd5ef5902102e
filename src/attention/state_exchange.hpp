// SPDX-License-Identifier: Apache-2.0
// How the ranks of a Ssm hand on states: exchange s moves those between runs of step s and runs of step s + 1, of one
// range of heads. It has the memory on both ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/ssm_layout.hpp"
#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

class StateExchange {
 public:
  // Allocates. `hops`, `transport` and `ranges` outlive the object; `ranges` are the ranges of heads that states travel
  // in.
  StateExchange(const SsmSpec& spec, const StateHops& hops, std::span<const HeadRange> ranges, Transport& transport,
                Backend& backend);

  // Bytes that rank `rank` allocates.
  static std::size_t bytes(const SsmSpec& spec, const StateHops& hops, int rank);

  // Tells peers where states will land. Collective.
  void announce(const Deadline& deadline);

  // Of the states that travel; at least a byte for each rank.
  std::byte* memory() const { return memory_.data(); }

  // How many exchanges a range of heads takes.
  int steps() const { return static_cast<int>(hops_.hops.size()); }
  // The state that this rank receives in front of its run, or sends on from behind it; null where it doesn't. [heads,
  // head_dim, state_dim]
  float* received(std::int64_t run) const;
  float* sent(std::int64_t run) const;
  // Whether this rank receives states in an exchange; false for steps() and more.
  bool receives(int step) const;

  // Enqueues exchange `step` of a range. All ranks post the same exchanges in the same order, and wait for them so.
  Ticket post(std::size_t range, int step, Stream stream);

 private:
  Exchange exchange_of(std::size_t range, int step) const;
  // The part of a state that belongs to a range of heads.
  std::size_t offset_of(const HeadRange& heads) const { return static_cast<std::size_t>(heads.first) * head_bytes_; }
  std::size_t size_of(const HeadRange& heads) const { return static_cast<std::size_t>(heads.count) * head_bytes_; }

  const StateHops& hops_;
  std::span<const HeadRange> ranges_;
  Transport& transport_;
  std::size_t head_bytes_ = 0;
  Buffer memory_;
  std::vector<std::byte*> received_;  // [runs]
  std::vector<std::byte*> sent_;      // [runs]
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
