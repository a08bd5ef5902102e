// SPDX-License-Identifier: Apache-2.0
#include "ops/common/shard_checks.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "ops/common/memory_shape.hpp"

namespace ringattn {

void check_apart(std::string_view name, const TensorView& result, std::string_view other, const TensorView& view) {
  if (!are_apart(MemoryShape(result), MemoryShape(view))) refuse_overlap(name, other);
}

void refuse_overlap(std::string_view name, std::string_view other) {
  fail(ErrorCode::kUsage, fmt::format("{} overlaps {}", name, other),
       "its rows are written while others are still read", fmt::format("Give {} memory of its own.", name));
}

void check_shard(std::string_view op, std::string_view name, const TensorView& view, const ShardShape& expected) {
  if (view.dtype == expected.dtype && view.tokens == expected.tokens && view.heads == expected.heads &&
      view.dim == expected.dim) {
    return;
  }
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
       fmt::format("this rank's share of the job is {} [{}, {}, {}]", dtype_name(expected.dtype), expected.tokens,
                   expected.heads, expected.dim),
       fmt::format("Rows follow {}::layout().", op));
}

void check_given(std::string_view op, std::string_view name, const void* data, bool wanted) {
  if ((data != nullptr) == wanted) return;
  fail(ErrorCode::kUsage, fmt::format("{} {}", name, wanted ? "is missing" : "is given"),
       wanted ? "the job has it, and this rank a part in it" : "the job has none for this rank",
       fmt::format("{0}Spec and {0}Job say what there is.", op));
}

void check_sinks(std::string_view spec, const float* sinks, bool wanted) {
  if ((sinks != nullptr) == wanted) return;
  fail(ErrorCode::kUsage, wanted ? "sinks are missing" : "sinks are given",
       wanted ? "the job has them" : "the job has none", fmt::format("{}::sinks says whether a job has sinks.", spec));
}

}  // namespace ringattn
