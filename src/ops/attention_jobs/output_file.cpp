// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/output_file.hpp"

#include <fmt/format.h>

#include "ops/common/output_tensor.hpp"

namespace ringattn {

namespace {

std::vector<std::string> other_job(const SafetensorsFile& file, const JobInput& input) {
  std::vector<std::string> differences;
  const std::string* const form = file.metadata("form");
  if (form != nullptr && input.mla() != nullptr && *form != form_name(input.form().form)) {
    differences.push_back(
        fmt::format("the file is of the {} form, the job of the {}", *form, form_name(input.form().form)));
  }
  const std::string scale = fmt::format("{}", input.job().spec.softmax_scale);
  const std::string* const other = file.metadata("softmax_scale");
  if (other != nullptr && *other != scale) {
    differences.push_back(fmt::format("the file's scores are scaled by {}, the job's by {}", *other, scale));
  }
  return differences;
}

}  // namespace

OutputFile::OutputFile(const std::string& path, const JobInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), grid_(input.out_grid()) {
  out_ = output_tensor(*file_, path, "out");
  lse_ = output_tensor(*file_, path, "lse");
  check_output_tensor(path, out_, grid_.shape(), file_dtype(input.job().spec.dtype));
  check_output_tensor(path, lse_, lse_shape(grid_), FileDtype::kF32);
  other_job_ = ringattn::other_job(*file_, input);
}

std::optional<Difference> OutputFile::compare(std::span<const PackedRun> runs, const TensorView& out,
                                              const RowView& lse) const {
  std::optional<Difference> difference = difference_from_file(out_, grid_, false, out, runs);
  if (difference) return difference;
  const TensorView computed = dense_view(static_cast<const void*>(lse.data), Dtype::kF32, out.tokens, out.heads, 1);
  return difference_from_file(lse_, lse_grid(grid_), true, computed, runs);
}

}  // namespace ringattn
