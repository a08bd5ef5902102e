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

void check_lists(const FoldSpec& spec, const FoldTask& task) {
  if (spec.lists != (task.lists == nullptr ? ListShape{} : task.lists->shape())) {
    fail(ErrorCode::kInternal,
         fmt::format("a fold task has {}", task.lists == nullptr ? "no lists" : "other lists of tiles"),
         "the kernel was made for those of its spec");
  }
  if (task.lists == nullptr) return;
  const std::span<const ListedSequence> sequences = task.lists->sequences();
  bool fits = sequences.size() == task.key_lengths.size();
  for (std::size_t s = 0; fits && s < sequences.size(); ++s) fits = sequences[s].keys == task.key_lengths[s];
  for (const QueryRun& run : task.queries) {
    if (!fits) break;
    const ListedSequence& of = sequences[static_cast<std::size_t>(run.sequence)];
    fits = run.rows == 0 || (run.position >= of.position && run.position + run.rows <= of.position + of.queries);
  }
  if (!fits) fail(ErrorCode::kInternal, "the lists of a fold task are those of other sequences", "lengths differ");
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
  check_lists(spec, task);
  if (task.finish == nullptr) return;
  check_view("out", task.finish->out, spec.dtype, spec.heads, spec.head_dim_v);
  if (spec.sinks != (task.finish->sinks != nullptr)) {
    fail(ErrorCode::kInternal, fmt::format("a fold task has {}sinks", spec.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", spec.sinks ? "with" : "without"));
  }
}

}  // namespace ringattn
