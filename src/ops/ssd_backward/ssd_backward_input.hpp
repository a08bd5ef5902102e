// SPDX-License-Identifier: Apache-2.0
// The input of the gradients of SSD: that of the forward, with the gradients of y and, if the file has them, of the
// final states. It comes from a file, or consists of functions of a seed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/jobs/op_entry.hpp"
#include "ops/ssd_backward/ssd_backward.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// Whether the file has a gradient of y and dt or delta, which is the input of this op.
bool holds_ssd_gradient(const TensorFile& file);

class SsdBackwardInput {
 public:
  // Throws the errors of SsmInput, kFile for gradients that don't match the layer, and kUnsupported for a layer without
  // a backward pass.
  explicit SsdBackwardInput(const OpRequest& request);

  const SsdBackwardJob& job() const { return job_; }
  const SsmInput& forward() const { return forward_; }

  // Rows of dy of packed tokens, in host memory. Throws kFile.
  void read_dy(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Gradients of the final states of these sequences, [sequences, heads, head_dim, state_dim]. Throws kFile.
  void read_final_gradients(std::span<const std::int32_t> sequences, std::span<float> states) const;

  // The layout in a file of a gradient with these heads and dims: that of x.
  RowGrid grid(std::int64_t heads, std::int64_t dim) const;

  std::vector<FileFingerprint> fingerprints() const;
  UnreadTensors unread() const;
  std::string source() const { return forward_.source(); }

 private:
  SsmInput forward_;
  SsdBackwardJob job_;
  std::shared_ptr<const TensorFile> file_;  // null: synthetic
  std::optional<TensorSource> dy_, final_gradients_;
  std::vector<TensorSource> used_;  // all tensors of the file that the job reads
};

}  // namespace ringattn
