// SPDX-License-Identifier: Apache-2.0
// Compares a result bit for bit with the output file of an earlier run of the same job.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "io/fingerprint.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/common/difference.hpp"

namespace ringattn {

class OutputFile {
 public:
  // Throws kFile unless the file holds out and lse of a job of this shape.
  OutputFile(const std::string& path, const JobInput& input);

  // Differences between the file's job and the input's that change bits, according to the file's metadata: "the file is
  // of the absorbed form, the job of the expanded".
  const std::vector<std::string>& other_job() const { return other_job_; }
  std::vector<FileFingerprint> fingerprints() const { return ringattn::fingerprints(std::array{out_, lse_}); }
  // The first difference between this rank's rows, those of `runs`, and the file: in out, [rows, heads, head_dim_v],
  // then in lse, [rows, heads]. All in host memory. Throws kFile.
  std::optional<Difference> compare(std::span<const PackedRun> runs, const TensorView& out, const RowView& lse) const;

 private:
  std::unique_ptr<const SafetensorsFile> file_;
  TensorSource out_;
  TensorSource lse_;
  RowGrid grid_;
  std::vector<std::string> other_job_;
};

}  // namespace ringattn
