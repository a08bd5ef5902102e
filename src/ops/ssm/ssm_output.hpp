// SPDX-License-Identifier: Apache-2.0
// Compares an SSM op's result with the output file of an earlier run of the same job, bit for bit.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "io/fingerprint.hpp"
#include "io/safetensors_file.hpp"
#include "ops/common/difference.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

class SsmOutputFile {
 public:
  // Throws kFile unless the file holds y of a job of this shape and, if final_states are there, those; for only a
  // convolution final_conv_state.
  SsmOutputFile(const std::string& path, const SsmInput& input);

  bool has_carried() const { return carried_.has_value(); }
  std::vector<FileFingerprint> fingerprints() const;
  // The first difference of this rank's part from the file's: y, [rows, heads, head_dim], of the tokens of `runs`, then
  // what `sequences` hand on, as carried_view() has it, where the file has it. In host memory. Throws kFile.
  std::optional<Difference> compare(std::span<const PackedRun> runs, const TensorView& y,
                                    std::span<const PackedRun> sequences, const TensorView& carried) const;

 private:
  std::unique_ptr<const SafetensorsFile> file_;
  TensorSource y_;
  std::optional<TensorSource> carried_;
  RowGrid y_grid_;
  RowGrid carried_grid_;
};

}  // namespace ringattn
