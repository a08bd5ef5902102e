// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_output.hpp"

#include "ops/common/output_tensor.hpp"

namespace ringattn {

SsmOutputFile::SsmOutputFile(const std::string& path, const SsmInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), y_grid_(input.y_grid()) {
  const SsmSpec& spec = input.job().spec;
  y_ = output_tensor(*file_, path, std::string(rows_name(spec)));
  check_output_tensor(path, y_, input.y_shape(), file_dtype(spec.dtype));
  const SsmJob& job = input.job();
  const std::string_view name = carried_name(job);
  if (!file_->contains(name)) return;
  carried_ = file_->tensor(name);
  const TensorView view = carried_view(job, nullptr, static_cast<std::int64_t>(job.lengths.size()));
  check_output_tensor(path, *carried_, job.conv1d_only ? input.halos_shape() : input.states_shape(),
                      file_dtype(view.dtype));
  carried_grid_ = {AxisOrder::kThd, 1, view.tokens, view.heads, view.dim};
}

std::vector<FileFingerprint> SsmOutputFile::fingerprints() const {
  std::vector<TensorSource> used{y_};
  if (carried_) used.push_back(*carried_);
  return ringattn::fingerprints(used);
}

std::optional<Difference> SsmOutputFile::compare(std::span<const PackedRun> runs, const TensorView& y,
                                                 std::span<const PackedRun> sequences,
                                                 const TensorView& carried) const {
  std::optional<Difference> difference = difference_from_file(y_, y_grid_, false, y, runs);
  if (difference || !carried_) return difference;
  return difference_from_file(*carried_, carried_grid_, true, carried, sequences);
}

}  // namespace ringattn
