// SPDX-License-Identifier: Apache-2.0
// The input of a backward job: q, k and v as in the forward, with O, LSE and their gradients. They come from a file, or
// are functions of a seed; then the forward computes O and LSE.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/attention_backward/attention_backward.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

// Whether the file has a gradient of O, which makes it the input of a backward pass.
bool holds_gradient(const TensorFile& file);

// Axes of a result tensor: tokens of queries or of keys.
enum class GradientAxis { kQueries, kKeys };

class BackwardInput {
 public:
  // Throws the errors of JobInput, kFile for tensors of a file that don't match its queries, and kUnsupported for keys
  // in caches.
  explicit BackwardInput(const OpRequest& request);

  const BackwardJob& job() const { return job_; }
  const JobInput& forward() const { return forward_; }
  bool is_synthetic() const { return file_ == nullptr; }
  bool has_dlse() const { return dlse_.has_value() || made_dlse_; }
  // Whether measured runs include the forward, which computes out and lse.
  bool with_forward() const { return with_forward_; }

  // Rows of packed query tokens, in host memory. out and lse can only be read from a file. Throw kFile.
  void read_out(std::span<const PackedRun> runs, const MutableTensorView& rows) const;
  void read_dout(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  void read_lse(std::span<const PackedRun> runs, std::span<float> rows) const;                // [tokens, heads]
  void read_dlse(std::span<const PackedRun> runs, std::span<float> rows, int threads) const;  // [tokens, heads]

  // The layout in a file of a gradient with these heads and dims: that of q or of k.
  RowGrid grid(GradientAxis axis, std::int64_t heads, std::int64_t dim) const;

  std::vector<FileFingerprint> fingerprints() const { return ringattn::fingerprints(used_); }
  UnreadTensors unread() const;
  std::string source() const { return forward_.source(); }

 private:
  void find(const FileInput& input, JobShare& share);
  void refuse_unread() const;
  void make(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;

  JobInput forward_;
  BackwardJob job_;
  std::shared_ptr<const InputFile> file_;  // null: synthetic
  std::optional<TensorSource> out_, lse_, dout_, dlse_;
  bool made_dlse_ = false;  // dlse is a function of the seed
  bool with_forward_ = false;
  std::vector<TensorSource> used_;  // all tensors of the file that the job reads
};

}  // namespace ringattn
