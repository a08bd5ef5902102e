// SPDX-License-Identifier: Apache-2.0
#include "kernels/fold_task.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t heads, std::int64_t dim) {
  if (view.dtype == dtype && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kInternal,
       fmt::format("{} of a fold task is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("the kernel was made for {} [tokens, {}, {}]", dtype_name(dtype), heads, dim));
}

}  // namespace

void check_fold_task(const FoldSpec& spec, const FoldTask& task) {
  check_view("q", task.q, spec.dtype, spec.heads, spec.head_dim);
  for (const KeySource& source : task.sources) {
    check_view("k", source.k, spec.dtype, spec.kv_heads, spec.head_dim);
    check_view("v", source.v, spec.dtype, spec.kv_heads, spec.head_dim_v);
  }
  if (task.state == nullptr && task.q.tokens > 0 && (task.resume || task.save)) {
    fail(ErrorCode::kInternal, "a fold task has no state", "it resumes or saves one");
  }
  if (task.finish == nullptr) return;
  check_view("out", task.finish->out, spec.dtype, spec.heads, spec.head_dim_v);
  if (spec.sinks != (task.finish->sinks != nullptr)) {
    fail(ErrorCode::kInternal, fmt::format("a fold task has {}sinks", spec.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", spec.sinks ? "with" : "without"));
  }
}

}  // namespace ringattn
