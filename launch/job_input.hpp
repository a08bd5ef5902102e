// SPDX-License-Identifier: Apache-2.0
// The job that the options name: its shape from a file's header or from the shape flags, and its rows on demand.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/files/input_tensors.hpp"
#include "attention/files/safetensors_file.hpp"
#include "attention/files/safetensors_rows.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/synthetic.hpp"
#include "launch/config.hpp"

namespace ringattn {

class JobInput {
 public:
  // Checks the options against each other and, with --input, against the file's header. Reads no rows. Throws kUsage
  // and kFile. `require_source`: one of --input and --synthetic must be given; otherwise the shape flags alone will do.
  JobInput(const Config& config, bool require_source);

  // The job of synthetic input of another length.
  JobInput(const Config& config, std::int64_t seq);

  // Synthetic input for a job that the caller made.
  static JobInput synthetic(Job job, std::uint64_t seed);

  const Job& job() const { return job_; }
  const std::vector<float>& sinks() const { return sinks_; }  // [heads], or empty
  // How out lies in a file.
  const RowGrid& out_grid() const { return out_grid_; }
  // Of synthetic input.
  const std::optional<std::uint64_t>& seed() const { return seed_; }
  // Fills `rows`, in host memory, with the tokens of `runs` (packed tokens of q, or of k and v). `tensor` is kQ, kK or
  // kV. Synthetic input is made by `threads` threads.
  void read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // One line for people: the file, or the seed.
  std::string source() const;

 private:
  JobInput() = default;
  void open_file(const JobOptions& options);
  void make_synthetic(const JobOptions& options, std::int64_t seq);
  void take_numerics(const Config& config);

  std::string path_;
  std::shared_ptr<const SafetensorsFile> file_;
  TensorSource tensors_[3];  // q, k, v
  RowGrid grids_[3];
  std::optional<std::uint64_t> seed_;
  Job job_;
  std::vector<float> sinks_;
  RowGrid out_grid_;
};

}  // namespace ringattn
