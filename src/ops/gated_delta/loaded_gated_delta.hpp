// SPDX-License-Identifier: Apache-2.0
// A gated delta rule on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/gated_delta/gated_delta.hpp"
#include "ops/gated_delta/gated_delta_input.hpp"

namespace ringattn {

// This rank's part of a finished job, in host memory.
struct GatedDeltaResult {
  std::vector<PackedRun> runs;  // packed tokens of the rows
  Buffer o;                     // [rows, value_heads, value_dim], the job's dtype
  std::int64_t rows = 0;
  std::vector<PackedRun> sequences;  // the sequences of `states`; empty: not requested
  Buffer states;                     // [sequences, value_heads, key_dim, value_dim] fp32
  SsmStats stats;
  std::int64_t non_finite = 0;  // values of the input's rows that are NaN or infinite

  TensorView o_view(const GatedDeltaSpec& spec) const;
  // [sequences, value_heads, key_dim · value_dim]
  TensorView states_view(const GatedDeltaSpec& spec) const;
};

// This rank's rows in the memory of its kernel, ready to be computed any number of times. All calls are collective over
// `collective`, in whose world the op was made. The op and the input outlive the object.
class LoadedGatedDelta {
 public:
  // Allocates everything and reads the rows.
  LoadedGatedDelta(const GatedDeltaInput& input, GatedDelta& rule, const Collective& collective,
                   const ProgressCallback& on_progress = {});

  // Starts on all ranks at once and returns when all are done.
  SsmStats run();
  // Returns the rows of the last run, in host memory. The object can't be used afterwards.
  GatedDeltaResult fetch(const SsmStats& stats);

 private:
  TensorView load_rows(DeltaTensor tensor, const ProgressCallback& on_progress);
  void load(const ProgressCallback& on_progress);

  const GatedDeltaInput& input_;
  GatedDelta& rule_;
  Collective collective_;
  GatedDeltaResult result_;
  std::vector<Buffer> buffers_;
  GatedDeltaInputs inputs_;
  GatedDeltaOutputs outputs_;
  const float* states_before_ = nullptr;  // for an update, which works in place
};

}  // namespace ringattn
