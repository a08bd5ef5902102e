// SPDX-License-Identifier: Apache-2.0
#include "kernels/fold_task.hpp"

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
       fmt::format("{} of a fold task is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("the kernel was made for {} [tokens, {}, {}]", dtype_name(dtype), heads, dim));
}

// No piece lies in two pages: a page is cut into pieces, whatever row the first one begins with.
void check_pages(std::int64_t page_size, int piece_keys) {
  if (page_size >= kLeastPieceKeys && std::has_single_bit(static_cast<std::uint64_t>(page_size)) &&
      page_size % piece_keys == 0) {
    return;
  }
  fail(ErrorCode::kInternal, fmt::format("a fold task reads pages of {} rows in pieces of {}", page_size, piece_keys),
       fmt::format("a page is a power of two from {} on, and a multiple of a piece", kLeastPieceKeys));
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

void check_positions(const FoldSpec& spec, const FoldTask& task) {
  const int heads = task.positions == nullptr ? 0 : task.positions->heads();
  bool fits = heads == spec.positions;
  if (fits && heads > 0) {
    const std::span<const KeptSequence> sequences = task.positions->sequences();
    fits = sequences.size() == task.key_lengths.size();
    for (std::size_t s = 0; fits && s < sequences.size(); ++s) fits = sequences[s].keys == task.key_lengths[s];
  }
  if (fits) return;
  fail(ErrorCode::kInternal, fmt::format("a fold task has positions of keys for {} heads", heads),
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

void check_fold_task(const FoldSpec& spec, int key_tile, const FoldTask& task) {
  check_view("q", task.q, spec.dtype, spec.heads, spec.head_dim);
  for (const KeySource& source : task.sources) {
    check_view("k", source.k, spec.dtype, spec.kv_heads, spec.head_dim);
    check_view("v", source.v, spec.dtype, spec.kv_heads, spec.head_dim_v);
    if (source.page_size != 0) check_pages(source.page_size, key_tile / std::max(1, task.pieces));
  }
  const int piece = task.pieces < 1 ? 0 : key_tile / task.pieces;
  if (piece * task.pieces != key_tile || (task.pieces > 1 && piece % kLeastPieceKeys != 0)) {
    fail(ErrorCode::kInternal, fmt::format("a fold task has tiles of {} keys in {} pieces", key_tile, task.pieces),
         fmt::format("a piece is the whole tile, or a multiple of {} keys", kLeastPieceKeys));
  }
  if (task.state == nullptr && task.q.tokens > 0 && (task.resume || task.save)) {
    fail(ErrorCode::kInternal, "a fold task has no state", "it resumes or saves one");
  }
  check_lists(spec, task);
  check_positions(spec, task);
  if (task.finish == nullptr) return;
  check_view("out", task.finish->out, spec.dtype, spec.heads, spec.head_dim_v);
  if (spec.sinks != (task.finish->sinks != nullptr)) {
    fail(ErrorCode::kInternal, fmt::format("a fold task has {}sinks", spec.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", spec.sinks ? "with" : "without"));
  }
}

}  // namespace ringattn
