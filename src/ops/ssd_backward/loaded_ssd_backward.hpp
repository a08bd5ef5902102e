// SPDX-License-Identifier: Apache-2.0
// The gradients of SSD on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/ssd_backward/ssd_backward.hpp"
#include "ops/ssd_backward/ssd_backward_input.hpp"

namespace ringattn {

// A gradient of rows: its name in files, and the shape of its rows.
struct SsdGradientRows {
  std::string_view name;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  MutableTensorView SsdBackwardOutputs::*view = nullptr;
};
// dx, ddt, dB, dC and, with a gate, dz.
std::vector<SsdGradientRows> gradient_rows(const SsmSpec& spec);

// A gradient of a parameter that the spec has.
struct SsdGradientParameter {
  std::string_view name;
  std::vector<float> SsdParameterGradients::*values = nullptr;
};
std::vector<SsdGradientParameter> gradient_parameters(const SsmSpec& spec);

// This rank's part of the result, in host memory.
struct SsdBackwardRankResult {
  std::vector<PackedRun> runs;       // packed tokens of the rows
  std::vector<Buffer> rows;          // as gradient_rows(): [rows, heads, dim] of the gradients' dtype
  std::vector<PackedRun> sequences;  // the sequences of initial_gradients
  Buffer initial_gradients;          // [sequences, heads, head_dim, state_dim] fp32
  SsdParameterGradients parameters;  // the same on all ranks
  SsmStats stats;
  std::int64_t non_finite = 0;  // values of the input's rows that are NaN or infinite

  std::int64_t tokens() const { return total_tokens(runs); }
  TensorView rows_view(const SsdBackwardJob& job, std::size_t tensor) const;
  TensorView initial_view(const SsdBackwardJob& job) const;  // [sequences, heads, head_dim · state_dim]
};

// This rank's rows in the memory of the kernel, ready to be computed any number of times. All calls are collective over
// `collective`, in whose world `backward` was made. `backward` and the input outlive the object.
class LoadedSsdBackward {
 public:
  // Allocates everything and reads the rows.
  LoadedSsdBackward(const SsdBackwardInput& input, SsdBackward& backward, const Collective& collective,
                    const ProgressCallback& on_progress = {});

  // Starts on all ranks at once and returns when all are done.
  SsmStats run();
  // Returns the result of the last run. The object can't be used afterwards.
  SsdBackwardRankResult fetch(const SsmStats& stats);

 private:
  void load(const ProgressCallback& on_progress);
  const float* load_array(std::span<const float> values);

  const SsdBackwardInput& input_;
  SsdBackward& backward_;
  Collective collective_;
  SsdBackwardRankResult result_;
  std::deque<Buffer> buffers_;
  SsdBackwardInputs inputs_;
  SsdBackwardOutputs outputs_;
};

}  // namespace ringattn
