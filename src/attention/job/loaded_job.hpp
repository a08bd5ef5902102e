// SPDX-License-Identifier: Apache-2.0
// A job on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "attention/attention.hpp"
#include "attention/files/job_input.hpp"
#include "attention/job/non_finite.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

// This rank's rows of a finished job.
struct RankResult {
  std::vector<PackedRun> runs;  // packed query tokens of the rows
  Buffer out;                   // [q_rows, heads, head_dim_v], the job's dtype
  Buffer lse;                   // [q_rows, heads] fp32
  std::int64_t rows = 0;
  RunStats stats;
  NonFinite non_finite;

  TensorView out_view(const FoldSpec& spec) const;
  RowView lse_view(const FoldSpec& spec) const;
};

// Called with the steps that are done of all of `what` ("row of input", "block"); for progress displays.
using StepDone = std::function<void(std::string_view what, std::int64_t done, std::int64_t all)>;

// This rank's rows of a job in the memory of its kernel, ready to be computed any number of times. All calls are
// collective over `meeting`, in whose world `attention` was made; `attention` outlives the object.
class LoadedJob {
 public:
  // Allocates everything and reads the rows.
  LoadedJob(const JobInput& input, Attention& attention, const Meeting& meeting, const StepDone& step_done = {});

  // Begins on all ranks at once and returns when all are done.
  RunStats run(RunMode mode = RunMode::kWhole, const StepDone& step_done = {});
  // The rows of the last run, in host memory. Ends the object's use.
  RankResult fetch(const RunStats& stats);

 private:
  Attention& attention_;
  Meeting meeting_;
  RankResult result_;
  Buffer q_, k_, v_, sinks_, workspace_;
  Inputs inputs_;
  Outputs outputs_;
};

// Loads, runs once and fetches.
RankResult execute_job(const JobInput& input, Attention& attention, const Meeting& meeting,
                       const StepDone& step_done = {});

}  // namespace ringattn
