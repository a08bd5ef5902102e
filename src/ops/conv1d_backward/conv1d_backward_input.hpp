// SPDX-License-Identifier: Apache-2.0
// The input of the gradients of the causal convolution: that of the forward, with the gradient of y. It comes from a
// file, or consists of functions of a seed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/conv1d/causal_conv1d_backward.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// Whether the file has a gradient of y and a convolution without an SSM layer, which is the input of this op.
bool holds_conv1d_gradient(const TensorFile& file);

class Conv1dBackwardInput {
 public:
  // Throws the errors of SsmInput, kFile for a gradient that doesn't match the convolution, and kUnsupported for decode
  // steps and for gradients of final states.
  explicit Conv1dBackwardInput(const OpRequest& request);

  const CausalConv1dJob& job() const { return job_; }
  const CausalConv1dSpec& spec() const { return job_.spec; }
  const SsmInput& forward() const { return forward_; }

  // Rows of dy of packed tokens, in host memory. Throws kFile.
  void read_dy(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;

  std::vector<FileFingerprint> fingerprints() const { return ringattn::fingerprints(used_); }
  UnreadTensors unread() const;
  std::string source() const { return forward_.source(); }

 private:
  SsmInput forward_;
  CausalConv1dJob job_;
  std::shared_ptr<const TensorFile> file_;  // null: synthetic
  std::optional<TensorSource> dy_;
  std::vector<TensorSource> used_;  // all tensors of the file that the job reads
};

}  // namespace ringattn
