// SPDX-License-Identifier: Apache-2.0
// A whole job of any op in one call, from its input to a file:
//
//   const auto open = [] { return AttentionOpJob::make(JobInput(FileInput{"qkv.safetensors"}, Numerics{}), {}); };
//   OutputRequest output;
//   output.path = "out.safetensors";
//   const OpJobResult result = run_op_job(open, *transport, options, output);  // collective
//
// Each rank reads and writes its own rows. The output file is the same byte for byte for any number of ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ops/jobs/op_job.hpp"

namespace ringattn {

struct OpJobResult {
  RankFigures figures;                // of this rank
  std::vector<ResultDigest> digests;  // equal on all ranks
};

// Opens the input, checks that all ranks have the same one and that the output can be written, computes, and writes.
// Callers that show what they are about to do take the steps of OpJob themselves. `output`: nothing is written without
// a path. Collective. Throws what the steps throw.
OpJobResult run_op_job(const std::function<std::unique_ptr<OpJob>()>& open, Transport& world, const Options& options,
                       const OutputRequest& output = {});

}  // namespace ringattn
