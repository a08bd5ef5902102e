// SPDX-License-Identifier: Apache-2.0
// Another system's result of a job: a file with out and, optionally, lse.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "io/fingerprint.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

class PeerFile {
 public:
  // Throws kFile unless the file has an out of the job's shape and dtype, and no lse or an fp32 one of its shape.
  PeerFile(const std::string& path, const JobInput& input);

  bool has_lse() const { return lse_.has_value(); }
  std::vector<FileFingerprint> fingerprints() const;

  struct Rows {
    Buffer out_bytes, lse_bytes;
    TensorView out;  // [total_tokens(runs), heads, head_dim_v]
    RowView lse;     // [total_tokens(runs), heads]; no data: the file has none
  };
  // Reads the tokens of `runs`, in order, to host memory. Throws kFile.
  Rows read(std::span<const PackedRun> runs, Dtype dtype) const;

 private:
  std::unique_ptr<const SafetensorsFile> file_;
  TensorSource out_;
  std::optional<TensorSource> lse_;
  RowGrid grid_;
};

}  // namespace ringattn
