// SPDX-License-Identifier: Apache-2.0
// An SSM op on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/ssm/ssm.hpp"
#include "ops/ssm/ssm_accuracy.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// This rank's part of a finished SSM op.
struct SsmRankResult {
  std::vector<PackedRun> runs;  // packed tokens of the rows
  Buffer y;                     // [rows, heads, head_dim], the job's dtype
  std::int64_t rows = 0;
  std::vector<PackedRun> sequences;  // the sequences of `states` and `halos`; empty: not requested
  Buffer states;                     // [sequences, heads, head_dim, state_dim] fp32
  Buffer halos;                      // with a convolution: [sequences, channels, width − 1], as in files
  SsmStats stats;
  std::int64_t non_finite = 0;  // values of the input's rows that are NaN or infinite

  TensorView y_view(const SsmSpec& spec) const;
  // The data that sequences pass on: states, [sequences, heads, head_dim · state_dim], or for a job of conv1d only
  // halos, [sequences, channels, width − 1].
  TensorView carried_view(const SsmJob& job) const;
  SsmResultView result_view(const SsmJob& job) const;
  Buffer& carried(const SsmJob& job) { return job.conv1d_only ? halos : states; }
};

// This rank's rows of an SSM op in the memory of its kernel, ready to be computed any number of times. All calls are
// collective over `collective`, in whose world the op was made. The op and the input outlive the object.
class LoadedSsm {
 public:
  // Allocates everything and reads the rows.
  LoadedSsm(const SsmInput& input, Ssm& scan, const Collective& collective, const ProgressCallback& on_progress = {});

  // Starts on all ranks at once and returns when all are done.
  SsmStats run();
  // Returns the rows of the last run, in host memory. The object can't be used afterwards.
  SsmRankResult fetch(const SsmStats& stats);

 private:
  TensorView load_rows(SsmTensorKind which, std::int64_t before, std::int64_t all, const ProgressCallback& on_progress);
  TensorView side_by_side(std::span<const SsmTensorKind> all, const std::function<TensorView(SsmTensorKind)>& load);
  const std::byte* load_bytes(std::span<const std::byte> bytes);
  const float* load_array(std::span<const float> values);
  void load_positions();
  void load_states();
  void allocate_outputs();
  void load(const ProgressCallback& on_progress);

  const SsmInput& input_;
  Ssm& ssm_;
  Collective collective_;
  SsmRankResult result_;
  std::vector<Buffer> buffers_;
  SsmInputs inputs_;
  SsmOutputs outputs_;
  const float* states_before_ = nullptr;  // for an update, which works in place
};

// An input on which the ranks have agreed, and the op class that computes it. All calls are collective; the transport
// outlives the object.
class PreparedSsm {
 public:
  PreparedSsm(SsmInput input, Transport& transport, SsmOptions options);

  Ssm& ssm() { return ssm_; }
  const Ssm& ssm() const { return ssm_; }
  const Collective& collective() const { return collective_; }
  // Reads the input, computes, and copies the result to host memory.
  SsmRankResult compute(const ProgressCallback& on_progress = {});

 private:
  Collective collective_;
  SsmInput input_;
  Ssm ssm_;
};

// Digests of y and of the final states, or of a convolution's final halos, whose sequences count as tokens
// (ops/common/digest.hpp). Empty if a result was not requested.
struct SsmDigests {
  std::string y;
  std::string final_states;
};

// Collective.
SsmDigests digest_ssm(const SsmInput& input, const SsmRankResult& result, const Collective& collective);

// Transposes halos from [sequences, width − 1, channels] to [sequences, channels, width − 1], as in files.
Buffer channels_first(const Buffer& halos, const CausalConv1dSpec& spec);

}  // namespace ringattn
