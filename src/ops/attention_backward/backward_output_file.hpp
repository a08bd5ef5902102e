// SPDX-License-Identifier: Apache-2.0
// The gradients of a job: their tensors in files, and bitwise comparisons of results.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.hpp"
#include "io/fingerprint.hpp"
#include "io/safetensors_file.hpp"
#include "ops/attention_backward/backward_input.hpp"
#include "ops/attention_backward/loaded_backward.hpp"
#include "ops/common/difference.hpp"

namespace ringattn {

// dq, dk or dv of a job.
struct GradientTensor {
  std::string_view name;
  GradientAxis axis = GradientAxis::kQueries;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  TensorView (BackwardRankResult::*view)(const BackwardJob& job) const = nullptr;
  Buffer BackwardRankResult::*rows = nullptr;

  const std::vector<PackedRun>& runs(const BackwardRankResult& result) const {
    return axis == GradientAxis::kQueries ? result.q_runs : result.k_runs;
  }
};
// All three, in order.
std::vector<GradientTensor> gradient_tensors(const AttentionSpec& spec);

// The packed token at which each sequence begins on that axis, then the number of tokens.
std::vector<std::int64_t> cumulative_tokens(const Batch& batch, GradientAxis axis);

// "dk at sequence 0, token 17, head 3, dim 5: …"
std::string describe_difference(const GradientTensor& tensor, const Difference& difference, const Batch& batch);
// A description of the first head in which two gradients of the sinks differ; empty if they are equal.
std::string describe_sink_difference(const std::vector<float>& left, const std::vector<float>& right);

// The output file of an earlier run.
class BackwardOutputFile {
 public:
  // Throws kFile unless the file has dq, dk and dv (and dsinks) of a job of this shape.
  BackwardOutputFile(const std::string& path, const BackwardInput& input);

  std::vector<FileFingerprint> fingerprints() const;
  // How the file's job differs from the input's, according to the file's metadata.
  const std::vector<std::string>& other_job() const { return other_job_; }
  // A description of the first difference between the rows of all ranks and the file; empty if there is none.
  // Collective.
  std::string compare(const Collective& collective, const BackwardInput& input, const BackwardRankResult& result) const;

 private:
  std::unique_ptr<const SafetensorsFile> file_;
  std::vector<TensorSource> tensors_;  // as gradient_tensors()
  std::optional<TensorSource> dsinks_;
  std::vector<std::string> other_job_;
};

}  // namespace ringattn
