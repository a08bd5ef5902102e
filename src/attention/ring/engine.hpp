// SPDX-License-Identifier: Apache-2.0
// The one loop that holds both a Transport and a Backend: walks the plan, the next block in flight while this one
// folds.
#pragma once

#include <array>
#include <cstddef>

#include "attention/attention.hpp"
#include "attention/ring/workspace.hpp"

namespace ringattn {

struct EngineRun {
  const Plan& plan;
  const FoldSpec& spec;
  const Options& options;
  Transport& transport;
  Backend& backend;
  FoldKernel& kernel;
  const Inputs& inputs;
  const Outputs& outputs;
  std::byte* state;               // FoldKernel::state_bytes()
  std::array<KvRows, 2> buffers;  // block b uses buffers[b % 2]
  KvRows staged;                  // for the dense copy of a strided shard
  Stream stream;
  const BlockDone& block_done;
  RunMode mode;
};

RunStats run_engine(const EngineRun& run);

}  // namespace ringattn
