// SPDX-License-Identifier: Apache-2.0
// Compares an SSM op's result bit for bit with the output file of an earlier run of the same job.
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
  // Throws kFile unless the file has the y of a job of this shape and, if it has final_states, those too; for a job of
  // conv1d only, final_conv_state.
  SsmOutputFile(const std::string& path, const SsmInput& input);

  bool has_carried() const { return carried_.has_value(); }
  std::vector<FileFingerprint> fingerprints() const;
  // The first difference between this rank's part and the file: in y, [rows, heads, head_dim], of the tokens of `runs`,
  // then, if the file has it, in the data that `sequences` pass on, as in carried_view(). In host memory. Throws kFile.
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
