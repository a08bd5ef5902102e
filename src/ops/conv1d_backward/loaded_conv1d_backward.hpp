// SPDX-License-Identifier: Apache-2.0
// The gradients of the causal convolution on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/conv1d_backward/conv1d_backward_input.hpp"
#include "ops/ssm/ssm_timeline.hpp"

namespace ringattn {

// This rank's part of the result, in host memory.
struct Conv1dBackwardRankResult {
  std::vector<PackedRun> runs;       // packed tokens of the rows
  Buffer dx;                         // [rows, channels]
  std::vector<float> dweight;        // [channels, width], the same on all ranks
  std::vector<float> dbias;          // [channels], or empty
  std::vector<PackedRun> sequences;  // the sequences of dinitial
  Buffer dinitial;                   // [sequences, channels, width − 1]
  std::int64_t non_finite = 0;       // NaN and infinite values of x and dy
  SsmStats stats;

  std::int64_t tokens() const { return total_tokens(runs); }
  TensorView dx_view(const CausalConv1dSpec& spec) const;        // [rows, channels, 1], as in files
  TensorView dinitial_view(const CausalConv1dSpec& spec) const;  // [sequences, channels, width − 1]
};

// Collective, except for the destructor. `input`, `backward` and what `collective` refers to outlive the object.
class LoadedConv1dBackward {
 public:
  // Allocates everything and reads the rows.
  LoadedConv1dBackward(const Conv1dBackwardInput& input, CausalConv1dBackward& backward, const Collective& collective,
                       const ProgressCallback& on_progress = {});

  // Starts on all ranks at once and returns when all are done.
  SsmStats run();
  // Returns the result of the last run. The object can't be used afterwards.
  Conv1dBackwardRankResult fetch(const SsmStats& stats);

 private:
  void load(const ProgressCallback& on_progress);
  const std::byte* load_bytes(std::span<const std::byte> bytes);

  const Conv1dBackwardInput& input_;
  CausalConv1dBackward& backward_;
  Collective collective_;
  std::unique_ptr<Events> marks_;  // 0 and 1: begin and end of the run
  std::deque<Buffer> buffers_;
  CausalConv1dBackwardInputs inputs_;
  CausalConv1dBackwardOutputs outputs_;
  Buffer dweight_, dbias_;
  Conv1dBackwardRankResult result_;
};

}  // namespace ringattn
