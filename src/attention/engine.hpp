// SPDX-License-Identifier: Apache-2.0
// The one loop that holds both a Transport and a Backend: walks the plan, the next block in flight while this one
// folds.
#pragma once

#include "attention/attention.hpp"
#include "attention/workspace.hpp"

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
  std::byte* workspace;  // as `layout` says
  const WorkspaceLayout& layout;
  Stream stream;
  const BlockDone& block_done;
};

RunStats run_engine(const EngineRun& run);

}  // namespace ringattn
