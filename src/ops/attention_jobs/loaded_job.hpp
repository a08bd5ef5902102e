// SPDX-License-Identifier: Apache-2.0
// A job on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/ring_op.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/mla/mla_weights.hpp"

namespace ringattn {

// This rank's rows of a finished job.
struct RankResult {
  std::vector<PackedRun> runs;  // packed query tokens of the rows
  Buffer out;                   // [q_rows, heads, head_dim_v], the job's dtype
  Buffer lse;                   // [q_rows, heads] fp32
  std::int64_t rows = 0;
  RunStats stats;
  NonFinite non_finite;

  TensorView out_view(const AttentionSpec& spec) const;
  RowView lse_view(const AttentionSpec& spec) const;
};

// Reports progress: the finished steps of `what` ("row of input", "block").
using ProgressCallback = std::function<void(std::string_view what, const StepCount& steps)>;

// This rank's rows of a job in the memory of its kernel, ready to be computed any number of times. All calls are
// collective over `collective`, in whose world the op was made. The op outlives the object.
class LoadedJob {
 public:
  // Allocates everything and reads the rows; for MLA also the matrices of all heads.
  LoadedJob(const JobInput& input, Attention& attention, const Collective& collective,
            const ProgressCallback& on_progress = {});
  LoadedJob(const JobInput& input, Mla& latent, const Collective& collective, const ProgressCallback& on_progress = {});
  LoadedJob(const LoadedJob&) = delete;  // run_ refers to the object
  LoadedJob& operator=(const LoadedJob&) = delete;

  // Starts on all ranks at once and returns when all are done.
  RunStats run(RunMode mode = RunMode::kWhole, const ProgressCallback& on_progress = {});
  // Returns the rows of the last run, in host memory. The object can't be used afterwards.
  RankResult fetch(const RunStats& stats);

 private:
  // One of the op's inputs.
  struct Tensor {
    SyntheticTensor tensor;
    std::vector<PackedRun> runs;
    std::int64_t heads;
    std::int64_t dim;
    std::int64_t NonFinite::*non_finite;
    bool packed = false;  // FP8 rows of latents, as 16-bit halves
  };

  LoadedJob(const RingOp& ring, const Collective& collective) : ring_(ring), collective_(collective) {}
  // Packed queries and keys of this rank.
  std::vector<PackedRun> query_runs(const JobInput& input) const;
  std::vector<PackedRun> key_runs(const JobInput& input) const;
  // Fills inputs_ in the tensors' order, and allocates outputs and workspace.
  void load(const JobInput& input, const std::vector<Tensor>& tensors, const ProgressCallback& on_progress);
  const float* load_sinks(const JobInput& input);
  // The rank's rows of a compressed tensor, and all of its tables.
  CompressedRows load_compressed(const JobInput& input, const CompressedSource& source);

  RingOp ring_;
  Collective collective_;
  RankResult result_;
  std::vector<Buffer> buffers_;
  std::vector<MutableTensorView> inputs_;
  MlaWeights weights_;  // MLA only
  Buffer sinks_, workspace_;
  MutableTensorView out_;
  RowView lse_;
  std::function<RunStats(const BlockDone& block_done, RunMode mode)> run_;
};

}  // namespace ringattn
