// SPDX-License-Identifier: Apache-2.0
#include "attention/shard_checks.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

void check_shard(std::string_view door, std::string_view name, const TensorView& view, const ShardShape& expected) {
  if (view.dtype == expected.dtype && view.tokens == expected.tokens && view.heads == expected.heads &&
      view.dim == expected.dim) {
    return;
  }
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
       fmt::format("this rank's share of the job is {} [{}, {}, {}]", dtype_name(expected.dtype), expected.tokens,
                   expected.heads, expected.dim),
       fmt::format("Rows follow {}::layout().", door));
}

void check_given(std::string_view door, std::string_view name, const void* data, bool wanted) {
  if ((data != nullptr) == wanted) return;
  fail(ErrorCode::kUsage, fmt::format("{} {}", name, wanted ? "is missing" : "is given"),
       wanted ? "the job has it, and this rank a part in it" : "the job has none for this rank",
       fmt::format("{0}Spec and {0}Job say what there is.", door));
}

}  // namespace ringattn
