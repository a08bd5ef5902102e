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

// Throws kUsage, with both shapes, where a rank's rows are not its share of the job. `op`: whose layout() they
// follow.
void check_shard(std::string_view op, std::string_view name, const TensorView& view, const ShardShape& expected);
// Throws kUsage where an array without a shape is missing though the job has it, or is given though it has none.
// `op`: what the job is described by, "Ssm" for SsmSpec and SsmJob.
void check_given(std::string_view op, std::string_view name, const void* data, bool wanted);

// The same of sinks. `spec`: whose member `sinks` says whether they are wanted, "AttentionSpec".
void check_sinks(std::string_view spec, const float* sinks, bool wanted);

// Throws kUsage where a number that a run writes to `result` could be one that it reads of another tensor, or has yet
// to read: threads, and blocks of keys, come to rows in any order. Tensors whose rows or heads take turns in one
// stretch of memory, as columns of a fused projection do, are apart.
void check_apart(std::string_view name, const TensorView& result, std::string_view other, const TensorView& view);
[[noreturn]] void refuse_overlap(std::string_view name, std::string_view other);

}  // namespace ringattn
