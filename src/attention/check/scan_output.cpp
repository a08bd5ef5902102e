// SPDX-License-Identifier: Apache-2.0
#include "attention/check/scan_output.hpp"

#include "attention/check/output_tensor.hpp"

namespace ringattn {

ScanOutputFile::ScanOutputFile(const std::string& path, const ScanInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), y_grid_(input.y_grid()) {
  const ScanSpec& spec = input.job().spec;
  y_ = output_tensor(*file_, path, "y");
  check_output_tensor(path, y_, input.y_shape(), file_dtype(spec.dtype));
  if (!file_->contains("final_states")) return;
  states_ = file_->tensor("final_states");
  check_output_tensor(path, *states_, input.states_shape(), FileDtype::kF32);
  states_grid_ = {AxisOrder::kThd, 1, static_cast<std::int64_t>(input.job().lengths.size()), spec.heads,
                  std::int64_t{spec.head_dim} * spec.state_dim};
}

std::vector<FileFingerprint> ScanOutputFile::fingerprints() const {
  std::vector<TensorSource> used{y_};
  if (states_) used.push_back(*states_);
  return ringattn::fingerprints(used);
}

std::optional<Difference> ScanOutputFile::compare(std::span<const PackedRun> runs, const TensorView& y,
                                                  std::span<const PackedRun> sequences,
                                                  const TensorView& states) const {
  std::optional<Difference> difference = difference_from_file(y_, y_grid_, false, y, runs);
  if (difference || !states_) return difference;
  return difference_from_file(*states_, states_grid_, true, states, sequences);
}

}  // namespace ringattn
