// SPDX-License-Identifier: Apache-2.0
// Compares a tensor of an output file with a computed result, for files of every op.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"
#include "ops/common/difference.hpp"

namespace ringattn {

// The output file's tensor of this name. Throws kFile if there is none.
TensorSource output_tensor(const SafetensorsFile& file, const std::string& path, const std::string& name);
// Throws kFile unless it has the shape and dtype of the job's result.
void check_output_tensor(const std::string& path, const TensorSource& tensor, std::span<const std::int64_t> shape,
                         FileDtype dtype);
// The first difference in the rows of `runs`, as first_difference(). `second`: Difference::in_lse. Throws kFile.
std::optional<Difference> difference_from_file(const TensorSource& tensor, const RowGrid& grid, bool second,
                                               const TensorView& computed, std::span<const PackedRun> runs);

}  // namespace ringattn
