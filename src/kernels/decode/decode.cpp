// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/decode.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/common/registry.hpp"

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

void check_output(const AttentionSpec& attention, const AttentionOutput& output, std::int64_t rows) {
  check_rows("out", output.out, attention.dtype, rows, attention.heads, attention.head_dim_v);
  if (attention.sinks == (output.sinks != nullptr)) return;
  refuse(fmt::format("a decode step has {}sinks", attention.sinks ? "no " : ""),
         fmt::format("the kernel was made {} them", attention.sinks ? "with" : "without"));
}

}  // namespace

std::string describe(const DecodeSpec& spec) {
  const std::string text = "decode, " + describe(spec.attention) + (spec.values_in_keys ? ", values in the keys" : "");
  if (spec.format.is_plain()) return text;
  return text + ", cache of " + (spec.quantized_values_in_keys() ? describe(spec.format.k) : describe(spec.format));
}

std::int64_t splits_per_partition(std::int64_t keys, int partitions, std::int64_t kv_split_keys) {
  const std::int64_t groups = (keys + kv_split_keys - 1) / kv_split_keys;
  return (groups + partitions - 1) / partitions;
}

void check_decode_step(const DecodeSpec& spec, const DecodeLimits& limits, const DecodeStep& step) {
  const AttentionSpec& attention = spec.attention;
  if (step.rows < 1 || step.rows > limits.rows || step.q.tokens % step.rows != 0 ||
      step.q.tokens / step.rows > limits.sequences) {
    refuse(fmt::format("a decode step has {} query rows, {} a sequence", step.q.tokens, step.rows),
           fmt::format("the kernel was reserved for {} sequences of up to {} rows", limits.sequences, limits.rows));
  }
  check_rows("q", step.q, attention.dtype, step.q.tokens, attention.heads, attention.head_dim);
  if (step.partials.data == nullptr) {
    check_output(attention, step.output, step.q.tokens);
    if (!step.partition.is_whole()) refuse("whole rows are requested of a partition", "it gives partials");
  } else if (step.partition.stride < 1 || step.partition.first < 0 || step.partition.first >= step.partition.stride) {
    refuse(fmt::format("partition {} of {}", step.partition.first, step.partition.stride),
           "partitions are numbered from 0");
  }
  const Pool k = spec.format.k.is_plain()
                     ? check_cache("k", step.k, attention.dtype, attention.kv_heads, attention.head_dim)
                     : check_cache("k", step.quantized_k, spec.format.k,
                                   {attention.dtype, attention.kv_heads, attention.head_dim});
  const Pool v = spec.quantized_values_in_keys() ? k
                 : spec.format.v.is_plain()
                     ? check_cache("v", step.v, attention.dtype, attention.kv_heads, attention.head_dim_v)
                     : check_cache("v", step.quantized_v, spec.format.v,
                                   {attention.dtype, attention.kv_heads, attention.head_dim_v});
  if (k.pages != v.pages || k.page_size != v.page_size) {
    refuse(fmt::format("k has {} pages of {} tokens, v {} of {}", k.pages, k.page_size, v.pages, v.page_size),
           "a token's key and value are in the same page slot of both");
  }
  if (spec.values_in_keys && !spec.quantized_values_in_keys() &&
      (step.v.data != step.k.data || step.v.page_stride != step.k.page_stride ||
       step.v.token_stride != step.k.token_stride || step.v.head_stride != step.k.head_stride)) {
    refuse("v of a decode step is a separate tensor", "the kernel was made for values in the keys");
  }
  if (attention.block_mask.any() != (step.block_mask.blocks != nullptr) ||
      attention.block_mask.any() != (step.block_mask.counts != nullptr)) {
    refuse(fmt::format("a decode step has {}block mask", attention.block_mask.any() ? "no " : "a "),
           fmt::format("the kernel was made {} it", attention.block_mask.any() ? "with" : "without"));
  }
  if (attention.block_mask.any() &&
      (step.prefixes.count > 0 || !step.partition.is_whole() || step.partials.data != nullptr)) {
    refuse("a decode step with a block mask has prefixes, or a partition of the keys",
           "KV splits follow from the block mask");
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

// A dense cache has one page per sequence.
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

// Skips sequences in tables whose first axis is the sequence, as in tails. Other tables are shared.
void skip_tables(std::int64_t sequences, CompressedCache& cache) {
  const std::vector<FormatTable> of_one = format_tables(cache.format, cache.shape, 1);
  const std::vector<FormatTable> of_two = format_tables(cache.format, cache.shape, 2);
  for (std::size_t i = 0; i < of_one.size(); ++i) {
    const std::int64_t bytes = of_two[i].bytes(cache.shape.dtype) - of_one[i].bytes(cache.shape.dtype);
    if (cache.tables[i] != nullptr) cache.tables[i] += sequences * bytes;
  }
}

}  // namespace

DecodeStep sub_batch(const DecodeSpec& spec, const DecodeStep& step, std::int64_t first, std::int64_t count,
                     std::int64_t partial_floats) {
  const std::int64_t row = first * step.rows;
  DecodeStep batch = step;
  batch.q.data = step.q.at(row, 0);
  batch.q.tokens = count * step.rows;
  if (step.output.out.data != nullptr) batch.output.out.data = step.output.out.at(row, 0);
  batch.output.out.tokens = batch.q.tokens;
  if (step.output.lse.data != nullptr) batch.output.lse.data = &step.output.lse.at(row, 0);
  if (step.partials.data != nullptr) {
    batch.partials.data += row * step.partials.kv_splits * spec.attention.heads * partial_floats;
  }
  batch.lengths += first;
  if (step.block_table.pages != nullptr) {
    batch.block_table.pages += first * step.block_table.stride;
  } else {
    skip_pages(first, batch.k);
    skip_pages(first, batch.v);
    skip_pages(first, batch.quantized_k);
    skip_pages(first, batch.quantized_v);
  }
  if (!spec.format.k.is_plain()) skip_tables(first, batch.quantized_k);
  if (!spec.format.v.is_plain()) skip_tables(first, batch.quantized_v);
  if (step.prefixes.count > 0) batch.prefixes.of_sequence += first;
  if (step.block_mask.blocks != nullptr) {
    batch.block_mask.blocks += first * spec.attention.block_mask.heads * step.block_mask.stride;
    batch.block_mask.counts += first * spec.attention.block_mask.heads;
  }
  return batch;
}

void check_decode_merge(const DecodeSpec& spec, const DecodeMerge& merge) {
  if (merge.partitions.empty() || merge.kv_splits < 1 || merge.rows < 1 || merge.output.out.tokens % merge.rows != 0) {
    refuse(fmt::format("a merge of {} rows, {} a sequence, from {} partitions of {} KV splits", merge.output.out.tokens,
                       merge.rows, merge.partitions.size(), merge.kv_splits),
           "there is at least one of each, and every sequence has its rows");
  }
  check_output(spec.attention, merge.output, merge.output.out.tokens);
}

void DecodeKernel::check(const DecodeLimits&, int) const {}

}  // namespace ringattn
