// SPDX-License-Identifier: Apache-2.0
#include "attention/check/scan_output.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace ringattn {

namespace {

void check_tensor(const std::string& path, const TensorSource& tensor, const std::vector<std::int64_t>& shape,
                  FileDtype dtype) {
  if (tensor.info->shape == shape && tensor.info->dtype == dtype) return;
  fail(ErrorCode::kFile, fmt::format("{} can't be compared", path),
       fmt::format("{} is {} {}, the job gives {} {}", tensor.text(), file_dtype_name(tensor.info->dtype),
                   shape_text(tensor.info->shape), file_dtype_name(dtype), shape_text(shape)),
       "Give the job that the file was made with.");
}

// What was computed, beside the same rows as they lie in the file.
std::optional<Difference> first_difference_from(const TensorSource& tensor, const RowGrid& grid, bool states,
                                                const TensorView& computed, std::span<const PackedRun> runs) {
  const auto values = static_cast<std::size_t>(computed.tokens * computed.heads * computed.dim);
  const Buffer bytes = allocate_host(values * size_of(computed.dtype));
  const MutableTensorView rows =
      dense_view(static_cast<void*>(bytes.data()), computed.dtype, computed.tokens, computed.heads, computed.dim);
  read_rows(tensor, grid, runs, rows);
  return first_difference(states, computed, rows, runs);
}

}  // namespace

ScanOutputFile::ScanOutputFile(const std::string& path, const ScanInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), y_grid_(input.y_grid()) {
  if (!file_->contains("y")) {
    fail(ErrorCode::kFile, fmt::format("{} can't be compared", path), "it has no tensor y",
         {setting("against"), " takes an output file of ", command("run"), "."});
  }
  const ScanSpec& spec = input.job().spec;
  y_ = file_->tensor("y");
  check_tensor(path, y_, input.y_shape(), file_dtype(spec.dtype));
  if (!file_->contains("final_states")) return;
  states_ = file_->tensor("final_states");
  check_tensor(path, *states_, input.states_shape(), FileDtype::kF32);
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
  std::optional<Difference> difference = first_difference_from(y_, y_grid_, false, y, runs);
  if (difference || !states_) return difference;
  return first_difference_from(*states_, states_grid_, true, states, sequences);
}

}  // namespace ringattn
