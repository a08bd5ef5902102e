// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "kernels/cache_view.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) { fail(ErrorCode::kInternal, what, why); }

void check_rows(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t rows, std::int64_t heads,
                std::int64_t dim) {
  if (view.dtype == dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} of a decode step is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                     view.dim),
         fmt::format("{} [{}, {}, {}] was expected", dtype_name(dtype), rows, heads, dim));
}

struct Pool {
  std::int64_t pages = 0;
  std::int64_t page_size = 0;
};

Pool check_cache(std::string_view name, const CacheView& view, Dtype dtype, std::int64_t heads, std::int64_t dim) {
  if (view.dtype == dtype && view.heads == heads && view.dim == dim) return {view.pages, view.page_size};
  refuse(fmt::format("{} of a decode step is {} [pages, tokens, {}, {}]", name, dtype_name(view.dtype), view.heads,
                     view.dim),
         fmt::format("the kernel was made for {} [pages, tokens, {}, {}]", dtype_name(dtype), heads, dim));
}

Pool check_cache(std::string_view name, const CompressedCache& cache, const RowFormat& format, const RowShape& shape) {
  if (cache.format == format && cache.shape == shape) return {cache.pages, cache.page_size};
  refuse(fmt::format("{} of a decode step is {} of {} [pages, tokens, {}, {}]", name, describe(cache.format),
                     dtype_name(cache.shape.dtype), cache.shape.heads, cache.shape.dim),
         fmt::format("the kernel was made for {} of {} [pages, tokens, {}, {}]", describe(format),
                     dtype_name(shape.dtype), shape.heads, shape.dim));
}

void check_output(const FoldSpec& fold, const FoldOutput& output, std::int64_t rows) {
  check_rows("out", output.out, fold.dtype, rows, fold.heads, fold.head_dim_v);
  if (fold.sinks == (output.sinks != nullptr)) return;
  refuse(fmt::format("a decode step has {}sinks", fold.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", fold.sinks ? "with" : "without"));
}

}  // namespace

std::string describe(const DecodeSpec& spec) {
  const std::string text = "decode, " + describe(spec.fold) + (spec.values_in_keys ? ", values in the keys" : "");
  if (spec.format.is_plain()) return text;
  return text + ", cache of " + (spec.values_in_codes() ? describe(spec.format.k) : describe(spec.format));
}

std::int64_t share_groups(std::int64_t keys, int shares, std::int64_t group_keys) {
  const std::int64_t groups = (keys + group_keys - 1) / group_keys;
  return (groups + shares - 1) / shares;
}

void check_decode_step(const DecodeSpec& spec, const DecodeLimits& limits, const DecodeStep& step) {
  const FoldSpec& fold = spec.fold;
  if (step.rows < 1 || step.rows > limits.rows || step.q.tokens % step.rows != 0 ||
      step.q.tokens / step.rows > limits.sequences) {
    refuse(fmt::format("a decode step has {} query rows, {} a sequence", step.q.tokens, step.rows),
           fmt::format("the kernel was reserved for {} sequences of up to {} rows", limits.sequences, limits.rows));
  }
  check_rows("q", step.q, fold.dtype, step.q.tokens, fold.heads, fold.head_dim);
  if (step.partials.records == nullptr) {
    check_output(fold, step.output, step.q.tokens);
    if (!step.share.is_whole()) refuse("a share of the keys gives whole rows", "it leaves partials");
  } else if (step.share.every < 1 || step.share.first < 0 || step.share.first >= step.share.every) {
    refuse(fmt::format("share {} of {}", step.share.first, step.share.every), "shares are numbered from 0");
  }
  const Pool k = spec.format.k.is_plain()
                     ? check_cache("k", step.k, fold.dtype, fold.kv_heads, fold.head_dim)
                     : check_cache("k", step.packed_k, spec.format.k, {fold.dtype, fold.kv_heads, fold.head_dim});
  const Pool v = spec.values_in_codes() ? k
                 : spec.format.v.is_plain()
                     ? check_cache("v", step.v, fold.dtype, fold.kv_heads, fold.head_dim_v)
                     : check_cache("v", step.packed_v, spec.format.v, {fold.dtype, fold.kv_heads, fold.head_dim_v});
  if (k.pages != v.pages || k.page_size != v.page_size) {
    refuse(fmt::format("k has {} pages of {} tokens, v {} of {}", k.pages, k.page_size, v.pages, v.page_size),
           "a token's key and value lie at the same place of both");
  }
  if (spec.values_in_keys && !spec.values_in_codes() &&
      (step.v.data != step.k.data || step.v.page_stride != step.k.page_stride ||
       step.v.token_stride != step.k.token_stride || step.v.head_stride != step.k.head_stride)) {
    refuse("v of a decode step lies by itself", "the kernel was made for values in the keys");
  }
  if (fold.lists.any() != (step.lists.blocks != nullptr) || fold.lists.any() != (step.lists.counts != nullptr)) {
    refuse(fmt::format("a decode step has {}lists", fold.lists.any() ? "no " : ""),
           fmt::format("the kernel was made {} them", fold.lists.any() ? "with" : "without"));
  }
  if (fold.lists.any() && (step.prefixes.count > 0 || !step.share.is_whole() || step.partials.records != nullptr)) {
    refuse("a decode step with lists has prefixes, or a share of the keys", "groups follow from the lists");
  }
  const SharedPrefixes& prefixes = step.prefixes;
  if (prefixes.count < 0 || prefixes.count > limits.prefixes) {
    refuse(fmt::format("a decode step has {} shared prefixes", prefixes.count),
           fmt::format("the kernel was reserved for {}", limits.prefixes));
  }
  if (prefixes.count > 0 &&
      (prefixes.of_sequence == nullptr || prefixes.keys == nullptr || step.block_table.pages == nullptr)) {
    refuse("shared prefixes of a decode step are not complete",
           "they have sequences, keys, and pages in a block table");
  }
  const std::int64_t sequences = step.q.tokens / step.rows;
  if (step.block_table.pages == nullptr) {
    if (k.pages >= sequences) return;
    refuse(fmt::format("a dense cache of {} sequences serves {}", k.pages, sequences), "each has a page of its own");
  }
  check_page_size(k.page_size);
}

namespace {

// A dense cache has a page for each sequence.
void skip_pages(std::int64_t pages, CacheView& view) {
  if (view.data == nullptr) return;
  view.data = view.at(pages, 0, 0);
  view.pages -= pages;
}
void skip_pages(std::int64_t pages, CompressedCache& cache) {
  for (PagedStream& stream : cache.streams) {
    if (stream.data != nullptr) stream.data = stream.at(pages, 0, 0);
  }
  cache.pages -= pages;
}

// Tables whose first axis is the sequence, as tails are. Other tables are there once.
void skip_tables(std::int64_t sequences, CompressedCache& cache) {
  const std::vector<FormatTable> of_one = format_tables(cache.format, cache.shape, 1);
  const std::vector<FormatTable> of_two = format_tables(cache.format, cache.shape, 2);
  for (std::size_t i = 0; i < of_one.size(); ++i) {
    const std::int64_t bytes = of_two[i].bytes(cache.shape.dtype) - of_one[i].bytes(cache.shape.dtype);
    if (cache.tables[i] != nullptr) cache.tables[i] += sequences * bytes;
  }
}

}  // namespace

DecodeStep step_of_sequences(const DecodeSpec& spec, const DecodeStep& step, std::int64_t first, std::int64_t count,
                             std::int64_t record_floats) {
  const std::int64_t row = first * step.rows;
  DecodeStep part = step;
  part.q.data = step.q.at(row, 0);
  part.q.tokens = count * step.rows;
  if (step.output.out.data != nullptr) part.output.out.data = step.output.out.at(row, 0);
  part.output.out.tokens = part.q.tokens;
  if (step.output.lse.data != nullptr) part.output.lse.data = &step.output.lse.at(row, 0);
  if (step.partials.records != nullptr) {
    part.partials.records += row * step.partials.groups * spec.fold.heads * record_floats;
  }
  part.lengths += first;
  if (step.block_table.pages != nullptr) {
    part.block_table.pages += first * step.block_table.stride;
  } else {
    skip_pages(first, part.k);
    skip_pages(first, part.v);
    skip_pages(first, part.packed_k);
    skip_pages(first, part.packed_v);
  }
  if (!spec.format.k.is_plain()) skip_tables(first, part.packed_k);
  if (!spec.format.v.is_plain()) skip_tables(first, part.packed_v);
  if (step.prefixes.count > 0) part.prefixes.of_sequence += first;
  if (step.lists.blocks != nullptr) {
    part.lists.blocks += first * spec.fold.lists.heads * step.lists.stride;
    part.lists.counts += first * spec.fold.lists.heads;
  }
  return part;
}

void check_decode_merge(const DecodeSpec& spec, const DecodeMerge& merge) {
  if (merge.shares.empty() || merge.groups < 1 || merge.rows < 1 || merge.output.out.tokens % merge.rows != 0) {
    refuse(fmt::format("a merge of {} rows, {} a sequence, from {} shares of {} groups", merge.output.out.tokens,
                       merge.rows, merge.shares.size(), merge.groups),
           "there is at least one of each, and every sequence has its rows");
  }
  check_output(spec.fold, merge.output, merge.output.out.tokens);
}

void DecodeKernel::check(const DecodeLimits&, int) const {}

}  // namespace ringattn
