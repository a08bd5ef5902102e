// SPDX-License-Identifier: Apache-2.0
// A backward job on this rank: its rows of the input, the computation, its rows of the gradients.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_backward/attention_backward.hpp"
#include "ops/attention_backward/backward_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/common/non_finite.hpp"

namespace ringattn {

// This rank's rows of a finished job, in host memory.
struct BackwardRankResult {
  std::vector<PackedRun> q_runs;  // packed tokens of this rank's queries
  std::vector<PackedRun> k_runs;  // packed tokens of this rank's keys
  Buffer dq;                      // [q_rows, heads, head_dim], the dtype of gradients
  Buffer dk;                      // [k_rows, kv_heads, head_dim]
  Buffer dv;                      // [k_rows, kv_heads, head_dim_v]
  std::vector<float> dsinks;      // [heads], the same on all ranks; empty without sinks
  Buffer out;                     // O of the forward, [q_rows, heads, head_dim_v] of the job's dtype
  Buffer lse;                     // LSE of the forward, [q_rows, heads] fp32
  RunStats stats;
  NonFinite non_finite;

  std::int64_t q_rows() const { return total_tokens(q_runs); }
  std::int64_t k_rows() const { return total_tokens(k_runs); }
  TensorView dq_view(const BackwardJob& job) const;
  TensorView dk_view(const BackwardJob& job) const;
  TensorView dv_view(const BackwardJob& job) const;
  TensorView out_view(const AttentionSpec& spec) const;
  RowView lse_view(const AttentionSpec& spec) const;
};

// This rank's rows in the memory of the kernel, ready to be computed any number of times. All calls are collective over
// `collective`, in whose world `backward` was made. `backward` outlives the object.
class LoadedBackward {
 public:
  // Allocates everything and reads the rows. O and LSE of synthetic input are computed by the forward, on the same
  // ranks and in the same layout: once, or in each run (BackwardInput::with_forward()).
  LoadedBackward(const BackwardInput& input, AttentionBackward& backward, const Collective& collective,
                 Transport& transport, const ProgressCallback& on_progress = {});
  LoadedBackward(const LoadedBackward&) = delete;
  LoadedBackward& operator=(const LoadedBackward&) = delete;

  // Starts on all ranks at once and returns when all are done. Times include those of a forward in the run.
  RunStats run(RunMode mode = RunMode::kWhole, const ProgressCallback& on_progress = {});
  // Returns the rows of the last run. The object can't be used afterwards.
  BackwardRankResult fetch(const RunStats& stats);

 private:
  void load(const BackwardInput& input, const ProgressCallback& on_progress);
  RunStats run_forward(RunMode mode, const ProgressCallback& on_progress);

  AttentionBackward& backward_;
  Collective collective_;
  BackwardRankResult result_;
  BackwardInputs inputs_;
  BackwardOutputs outputs_;
  Buffer q_, k_, v_, dout_, dlse_, sinks_, dsinks_, workspace_;
  std::optional<Attention> forward_;
  Buffer forward_workspace_;
};

}  // namespace ringattn
