// SPDX-License-Identifier: Apache-2.0
// What front doors check of the tensors that a run is given.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/tensor.hpp"

namespace ringattn {

// What a tensor must be, strides aside.
struct ShardShape {
  Dtype dtype = Dtype::kBf16;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
};

// Throws kUsage, with both shapes, where a rank's rows are not its share of the job. `door`: whose layout() they
// follow.
void check_shard(std::string_view door, std::string_view name, const TensorView& view, const ShardShape& expected);
// Throws kUsage where an array without a shape is missing though the job has it, or is given though it has none.
// `door`: what the job is described by, "Scan" for ScanSpec and ScanJob.
void check_given(std::string_view door, std::string_view name, const void* data, bool wanted);

}  // namespace ringattn
