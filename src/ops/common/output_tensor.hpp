// SPDX-License-Identifier: Apache-2.0
// Compares a tensor of an output file with what was computed, for files of every op.
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

// The tensor of this name of an output file. Throws kFile where there is none.
TensorSource output_tensor(const SafetensorsFile& file, const std::string& path, const std::string& name);
// Throws kFile unless it has the shape and dtype that the job gives.
void check_output_tensor(const std::string& path, const TensorSource& tensor, std::span<const std::int64_t> shape,
                         FileDtype dtype);
// The first difference of the rows of `runs`, as first_difference(): `second` says Difference::in_lse. Throws kFile.
std::optional<Difference> difference_from_file(const TensorSource& tensor, const RowGrid& grid, bool second,
                                               const TensorView& computed, std::span<const PackedRun> runs);

}  // namespace ringattn
