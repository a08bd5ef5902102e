// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/attention_task.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t heads, std::int64_t dim) {
  if (view.dtype == dtype && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kInternal,
       fmt::format("{} of an attention task is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("the kernel was made for {} [tokens, {}, {}]", dtype_name(dtype), heads, dim));
}

// Checks that no page run spans two pages: a page must be a multiple of the run.
void check_pages(std::int64_t page_size, int page_run_keys) {
  if (page_size >= kMinPageRunKeys && std::has_single_bit(static_cast<std::uint64_t>(page_size)) &&
      page_size % page_run_keys == 0) {
    return;
  }
  fail(ErrorCode::kInternal,
       fmt::format("an attention task reads pages of {} rows in page runs of {}", page_size, page_run_keys),
       fmt::format("a page is a power of two of at least {}, and a multiple of a page run", kMinPageRunKeys));
}

void check_block_mask(const AttentionSpec& spec, const AttentionTask& task) {
  if (spec.block_mask != (task.block_mask == nullptr ? BlockMaskShape{} : task.block_mask->shape())) {
    fail(ErrorCode::kInternal,
         fmt::format("an attention task has {}", task.block_mask == nullptr ? "no block mask" : "another block mask"),
         "the kernel was made for its spec's");
  }
  if (task.block_mask == nullptr) return;
  const std::span<const MaskedSequence> sequences = task.block_mask->sequences();
  bool fits = sequences.size() == task.key_lengths.size();
  for (std::size_t s = 0; fits && s < sequences.size(); ++s) fits = sequences[s].keys == task.key_lengths[s];
  for (const QueryRun& run : task.queries) {
    if (!fits) break;
    const MaskedSequence& of = sequences[static_cast<std::size_t>(run.sequence)];
    fits = run.rows == 0 || (run.position >= of.position && run.position + run.rows <= of.position + of.queries);
  }
  if (!fits) fail(ErrorCode::kInternal, "the block mask of an attention task is for other sequences", "lengths differ");
}

void check_positions(const AttentionSpec& spec, const AttentionTask& task) {
  const int heads = task.positions == nullptr ? 0 : task.positions->heads();
  bool fits = heads == spec.positions;
  if (fits && heads > 0) {
    const std::span<const KeptSequence> sequences = task.positions->sequences();
    fits = sequences.size() == task.key_lengths.size();
    for (std::size_t s = 0; fits && s < sequences.size(); ++s) fits = sequences[s].keys == task.key_lengths[s];
  }
  if (fits) return;
  fail(ErrorCode::kInternal, fmt::format("an attention task has key positions for {} heads", heads),
       fmt::format("the kernel was made for {}, or lengths differ", spec.positions));
}

}  // namespace

PoolSource pool_source(const CacheView& k, const CacheView& v) {
  const auto rows_of = [](const CacheView& view, std::int64_t page_rows) {
    const std::int64_t rows = view.pages == 0 ? 0 : (view.pages - 1) * page_rows + view.page_size;
    return TensorView{view.data, view.dtype, rows, view.heads, view.dim, view.token_stride, view.head_stride};
  };
  const auto pages_apart = [](const CacheView& view) {
    return view.token_stride > 0 && view.page_stride % view.token_stride == 0 ? view.page_stride / view.token_stride
                                                                              : 0;
  };
  const std::int64_t apart = pages_apart(k);
  if (apart > 0 && apart == pages_apart(v)) return {{rows_of(k, apart), rows_of(v, apart)}, apart};
  return {{rows_of(k, k.page_size), rows_of(v, v.page_size), k.page_size, k.page_stride, v.page_stride}, k.page_size};
}

void check_attention_task(const AttentionSpec& spec, int key_tile, const AttentionTask& task) {
  check_view("q", task.q, spec.dtype, spec.heads, spec.head_dim);
  for (const KeySource& source : task.sources) {
    check_view("k", source.k, spec.dtype, spec.kv_heads, spec.head_dim);
    check_view("v", source.v, spec.dtype, spec.kv_heads, spec.head_dim_v);
    if (source.page_size != 0) check_pages(source.page_size, key_tile / std::max(1, task.page_runs));
  }
  const int page_run_keys = task.page_runs < 1 ? 0 : key_tile / task.page_runs;
  if (page_run_keys * task.page_runs != key_tile || (task.page_runs > 1 && page_run_keys % kMinPageRunKeys != 0)) {
    fail(ErrorCode::kInternal,
         fmt::format("an attention task has tiles of {} keys in {} page runs", key_tile, task.page_runs),
         fmt::format("a page run is the whole tile, or a multiple of {} keys", kMinPageRunKeys));
  }
  if (task.state == nullptr && task.q.tokens > 0 && (task.resume || task.save)) {
    fail(ErrorCode::kInternal, "an attention task has no state", "it resumes or saves one");
  }
  check_block_mask(spec, task);
  check_positions(spec, task);
  if (task.finish == nullptr) return;
  check_view("out", task.finish->out, spec.dtype, spec.heads, spec.head_dim_v);
  if (spec.sinks != (task.finish->sinks != nullptr)) {
    fail(ErrorCode::kInternal, fmt::format("an attention task has {}sinks", spec.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", spec.sinks ? "with" : "without"));
  }
}

}  // namespace ringattn
