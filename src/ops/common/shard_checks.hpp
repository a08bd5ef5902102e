// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors that are passed to a run. Called by all ops.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/tensor.hpp"

namespace ringattn {

// The required shape of a tensor.
struct ShardShape {
  Dtype dtype = Dtype::kBf16;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
};

// Throws kUsage, with both shapes, if a tensor doesn't have the rank's rows of the job. `op`: the op whose layout()
// assigns the rows.
void check_shard(std::string_view op, std::string_view name, const TensorView& view, const ShardShape& expected);
// Throws kUsage if an array that the job needs is missing, or if one is given that the job doesn't have. `op`: prefix
// of the spec and job types, "Ssm" for SsmSpec and SsmJob.
void check_given(std::string_view op, std::string_view name, const void* data, bool wanted);

// The same for sinks. `spec`: the type whose member `sinks` says if they are wanted, "AttentionSpec".
void check_sinks(std::string_view spec, const float* sinks, bool wanted);

// Throws kUsage if `result` and `view` may share an element. Threads and KV blocks write rows in any order, so no
// overlap is safe. Tensors whose rows or heads interleave in one range of memory, as columns of a fused projection do,
// do not overlap.
void check_apart(std::string_view name, const TensorView& result, std::string_view other, const TensorView& view);
[[noreturn]] void refuse_overlap(std::string_view name, std::string_view other);

}  // namespace ringattn
