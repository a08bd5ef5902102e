// SPDX-License-Identifier: Apache-2.0
// Options of attention and MLA over a ring. Only the kernel may change bits of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

struct Options {
  KernelRequest kernel;
  LayoutRequest layout;
  // The caller's own distribution instead of `layout`: [ranks], the token runs of each rank.
  std::optional<std::vector<std::vector<TokenRun>>> query_runs;
  std::optional<std::vector<std::vector<TokenRun>>> key_runs;
  std::int64_t block_tokens = 0;  // tokens per KV block; 0: from the machine model and the memory budget
  std::size_t memory_budget = 0;  // bytes a rank may use, inputs and outputs included; 0: no limit
  bool overlap = true;            // receive the next block while this one is computed
  bool checksum = false;          // verify a checksum of each message part on arrival
  bool state_out = false;         // a run also writes Outputs::state
  bool shorter_lengths = false;   // Attention::set_lengths() will be called
  int threads = 0;                // of a host kernel; 0: this rank's share of the processors it may use
  // Timeout of a wait for a peer that should be ready and sends no heartbeats. A wait for a peer that computes is
  // longer by ten times the estimated compute time (comm/timeouts.hpp).
  double timeout_seconds = 60.0;
  // Machine model of the plan and the deadlines. If not set, default_machine() of the kernel.
  MachineModel machine;
};

}  // namespace ringattn
