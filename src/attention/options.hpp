// SPDX-License-Identifier: Apache-2.0
// How a job is run. Nothing here changes a bit of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

struct Options {
  KernelRequest kernel;
  LayoutRequest layout;
  // The caller's own distribution instead of `layout`, if its data lie otherwise: for each rank, its tokens.
  std::optional<std::vector<std::vector<TokenRun>>> query_runs;
  std::optional<std::vector<std::vector<TokenRun>>> key_runs;
  std::int64_t block_tokens = 0;  // 0: from the machine model and the memory budget
  std::size_t memory_budget = 0;  // bytes a rank may use, inputs and outputs included; 0: no limit
  bool overlap = true;            // the next block travels while this one is folded
  bool checksum = false;          // verify each part of a block after its travels
  bool state_out = false;         // a run also writes Outputs::state
  bool shorter_lengths = false;   // runs of shorter sequences will come, too: Attention::set_lengths()
  int threads = 0;                // of a host kernel; 0: this rank's share of the processors it may use
  // Of a wait for a peer that should be ready and gives no signs of life. A wait for one that computes lasts longer by
  // ten times what the machine model predicts (comm/timeouts.hpp).
  double timeout_seconds = 60.0;
  // What the plan and the deadlines assume; left as it is, default_machine() of the kernel.
  MachineModel machine;
};

}  // namespace ringattn
