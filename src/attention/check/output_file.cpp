// SPDX-License-Identifier: Apache-2.0
#include "attention/check/output_file.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& path, const TensorSource& tensor, std::span<const std::int64_t> shape,
                         FileDtype dtype) {
  fail(ErrorCode::kFile, fmt::format("{} can't be compared", path),
       fmt::format("{} is {} {}, the job gives {} {}", tensor.text(), file_dtype_name(tensor.info->dtype),
                   shape_text(tensor.info->shape), file_dtype_name(dtype), shape_text(shape)),
       "Give the job that the file was made with.");
}

// The rows of `runs` as they lie in the file, beside what was computed.
std::optional<Difference> first_difference_from(const TensorSource& tensor, const RowGrid& grid, bool in_lse,
                                                const TensorView& computed, std::span<const PackedRun> runs) {
  const auto values = static_cast<std::size_t>(computed.tokens * computed.heads * computed.dim);
  const Buffer bytes = allocate_host(values * size_of(computed.dtype));
  const MutableTensorView rows =
      dense_view(static_cast<void*>(bytes.data()), computed.dtype, computed.tokens, computed.heads, computed.dim);
  read_rows(tensor, grid, runs, rows);
  return first_difference(in_lse, computed, rows, runs);
}

}  // namespace

OutputFile::OutputFile(const std::string& path, const JobInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), grid_(input.out_grid()) {
  for (const std::string_view name : {"out", "lse"}) {
    if (file_->contains(name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} can't be compared", path), fmt::format("it has no tensor {}", name),
         {setting("against"), " takes an output file of ", command("run"), "."});
  }
  out_ = file_->tensor("out");
  lse_ = file_->tensor("lse");
  const FileDtype dtype = file_dtype(input.job().spec.dtype);
  if (out_.info->shape != grid_.shape() || out_.info->dtype != dtype) refuse(path, out_, grid_.shape(), dtype);
  if (lse_.info->shape != lse_shape(grid_) || lse_.info->dtype != FileDtype::kF32) {
    refuse(path, lse_, lse_shape(grid_), FileDtype::kF32);
  }
}

std::optional<Difference> OutputFile::compare(std::span<const PackedRun> runs, const TensorView& out,
                                              const RowView& lse) const {
  std::optional<Difference> difference = first_difference_from(out_, grid_, false, out, runs);
  if (difference) return difference;
  const TensorView computed = dense_view(static_cast<const void*>(lse.data), Dtype::kF32, out.tokens, out.heads, 1);
  return first_difference_from(lse_, lse_grid(grid_), true, computed, runs);
}

}  // namespace ringattn
