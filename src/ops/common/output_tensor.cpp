// SPDX-License-Identifier: Apache-2.0
#include "ops/common/output_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace ringattn {

TensorSource output_tensor(const SafetensorsFile& file, const std::string& path, const std::string& name) {
  if (!file.contains(name)) {
    fail(ErrorCode::kFile, fmt::format("{} can't be compared", path), fmt::format("it has no tensor {}", name),
         {setting("against"), " takes an output file of ", command("run"), "."});
  }
  return file.tensor(name);
}

void check_output_tensor(const std::string& path, const TensorSource& tensor, std::span<const std::int64_t> shape,
                         FileDtype dtype) {
  if (std::ranges::equal(tensor.info->shape, shape) && tensor.info->dtype == dtype) return;
  fail(ErrorCode::kFile, fmt::format("{} can't be compared", path),
       fmt::format("{} is {} {}, the job gives {} {}", tensor.text(), file_dtype_name(tensor.info->dtype),
                   shape_text(tensor.info->shape), file_dtype_name(dtype), shape_text(shape)),
       "Give the job that the file was made with.");
}

std::optional<Difference> difference_from_file(const TensorSource& tensor, const RowGrid& grid, bool second,
                                               const TensorView& computed, std::span<const PackedRun> runs) {
  const auto values = static_cast<std::size_t>(computed.tokens * computed.heads * computed.dim);
  const Buffer bytes = allocate_host(values * size_of(computed.dtype));
  const MutableTensorView rows =
      dense_view(static_cast<void*>(bytes.data()), computed.dtype, computed.tokens, computed.heads, computed.dim);
  read_rows(tensor, grid, runs, rows);
  return first_difference(second, computed, rows, runs);
}

}  // namespace ringattn
