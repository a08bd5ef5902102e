// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode_inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "ops/common/shard_checks.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

void check_rows(std::string_view name, const TensorView& view, const AttentionSpec& spec, std::int64_t rows, int heads,
                int dim) {
  if (view.dtype == spec.dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
         fmt::format("this step's is {} [{}, {}, {}]", dtype_name(spec.dtype), rows, heads, dim),
         "Rows lie sequence by sequence; this rank's results are those of Decode::owned().");
}

void check_cache(std::string_view name, const MutableCacheView& view, const AttentionSpec& spec, int dim) {
  if (view.dtype == spec.dtype && view.heads == spec.kv_heads && view.dim == dim && view.pages >= 0) return;
  refuse(fmt::format("the cache of {} is {} [{}, {}, {}, {}]", name, dtype_name(view.dtype), view.pages, view.page_size,
                     view.heads, view.dim),
         fmt::format("this rank's is {} [pages, page_size, {}, {}]", dtype_name(spec.dtype), spec.kv_heads, dim),
         spec.block_mask.any() ? "With a block mask, each of several ranks keeps the heads Decode::kv_heads()."
                               : "Check the job's heads and dims.");
}

bool has_rows(const TensorView& view) { return view.data != nullptr; }

void check_lengths(const DecodeInputs& inputs) {
  const bool with_rows = inputs.lengths != nullptr, before = inputs.lengths_before != nullptr;
  if (with_rows && before) {
    refuse("lengths and lengths_before are given", "one counts the rows of this step, and the other doesn't",
           "Give exactly one of them.");
  }
  if (inputs.q.tokens > 0 && !with_rows && !before) {
    refuse("the lengths are missing", "every sequence has one",
           "Give lengths, which count the rows of this step, or lengths_before, which don't.");
  }
  if (inputs.update_lengths && with_rows) {
    refuse("update_lengths is set beside lengths", "they count the rows of this step already",
           "Give lengths_before, or leave update_lengths out.");
  }
}

void check_compressed_cache(std::string_view name, const CompressedCache& cache, const RowFormat& format,
                            const RowShape& shape) {
  bool complete = cache.format == format && cache.shape == shape && cache.pages >= 0;
  for (std::size_t i = 0; complete && i < format_tables(format, shape, 1).size(); ++i) {
    complete = cache.tables[i] != nullptr;
  }
  if (complete) return;
  refuse(fmt::format("the cache of {} is {} of {} [{}, {}, {}, {}]", name, describe(cache.format),
                     dtype_name(cache.shape.dtype), cache.pages, cache.page_size, cache.shape.heads, cache.shape.dim),
         fmt::format("the job's is {} of {} [pages, page_size, {}, {}], with all its tables", describe(format),
                     dtype_name(shape.dtype), shape.heads, shape.dim),
         "DecodeJob::format says how k and v are stored.");
}

}  // namespace

void check_mean_keys(const DecodeJob& job, const DecodeInputs& inputs) {
  if (job.top_k_blocks == 0) {
    refuse("mean keys are requested", "steps of this job select no blocks", "Set DecodeJob::top_k_blocks.");
  }
  if (inputs.lengths_before != nullptr) {
    refuse("mean keys are requested with lengths_before", "they include the keys of the step",
           "Give lengths, which count the step's rows.");
  }
}

void check_step_shapes(const DecodeJob& job, const DecodeInputs& inputs, const DecodeOutputs& outputs,
                       std::int64_t owned) {
  const AttentionSpec& spec = job.spec;
  const DecodeLimits& limits = job.limits;
  if (inputs.rows < 1 || inputs.rows > limits.rows || inputs.q.tokens % inputs.rows != 0 ||
      inputs.q.tokens / inputs.rows > limits.sequences) {
    refuse(fmt::format("a step has {} query rows, {} a sequence", inputs.q.tokens, inputs.rows),
           fmt::format("steps were prepared for up to {} sequences of up to {} rows", limits.sequences, limits.rows),
           "Prepare for larger steps, or split this one.");
  }
  check_rows("q", inputs.q, spec, inputs.q.tokens, spec.heads, spec.head_dim);
  check_rows("out", outputs.out, spec, owned * inputs.rows, spec.heads, spec.head_dim_v);
  check_apart("out", outputs.out, "q", inputs.q);
  if (has_rows(inputs.k_new) != has_rows(inputs.v_new)) {
    refuse("one of k_new and v_new is missing", "a token has a key and a value", "Give both, or neither.");
  }
  if (has_rows(inputs.k_new)) {
    check_rows("k_new", inputs.k_new, spec, inputs.q.tokens, spec.kv_heads, spec.head_dim);
    check_rows("v_new", inputs.v_new, spec, inputs.q.tokens, spec.kv_heads, spec.head_dim_v);
  }
  check_sinks("AttentionSpec", inputs.sinks, spec.sinks);
}

void check_caches(const DecodeJob& part, const DecodeInputs& inputs) {
  const AttentionSpec& spec = part.spec;
  if (part.format.k.is_plain()) {
    check_cache("k", inputs.k, spec, spec.head_dim);
  } else {
    check_compressed_cache("k", inputs.quantized_k, part.format.k, {spec.dtype, spec.kv_heads, spec.head_dim});
  }
  const bool is_quantized = part.decode_spec().quantized_values_in_keys();
  if (is_quantized) {
    // v is the first columns of k.
  } else if (part.format.v.is_plain()) {
    check_cache("v", inputs.v, spec, spec.head_dim_v);
  } else {
    check_compressed_cache("v", inputs.quantized_v, part.format.v, {spec.dtype, spec.kv_heads, spec.head_dim_v});
  }
  const std::int64_t v_pages = is_quantized               ? cache_pages(part, inputs)
                               : part.format.v.is_plain() ? inputs.v.pages
                                                          : inputs.quantized_v.pages;
  const std::int64_t v_page = is_quantized               ? cache_page_size(part, inputs)
                              : part.format.v.is_plain() ? inputs.v.page_size
                                                         : inputs.quantized_v.page_size;
  if (cache_pages(part, inputs) != v_pages || cache_page_size(part, inputs) != v_page) {
    refuse(fmt::format("k has {} pages of {} tokens, v {} of {}", cache_pages(part, inputs),
                       cache_page_size(part, inputs), v_pages, v_page),
           "a token's key and value have the same index in both", "Give k and v the same pages.");
  }
  const bool has_table = inputs.block_table.pages != nullptr;
  if (part.is_paged() != has_table) {
    refuse(has_table ? "a dense cache has a block table" : "a block table is missing",
           part.is_paged() ? fmt::format("the job has pages of {} tokens", part.page_size) : "the job has no pages",
           "DecodeJob::page_size says whether there are pages.");
  }
  if (!part.is_paged() && cache_pages(part, inputs) < inputs.q.tokens / inputs.rows) {
    refuse(fmt::format("a dense cache of {} sequences", cache_pages(part, inputs)),
           fmt::format("the step has {}", inputs.q.tokens / inputs.rows), "Each sequence has a page of its own.");
  }
  if (part.is_paged() && cache_page_size(part, inputs) != part.page_size) {
    refuse(fmt::format("pages of {} tokens", cache_page_size(part, inputs)),
           fmt::format("the job's have {}", part.page_size), "Prepare for pages of this size.");
  }
  const bool takes_block_mask = spec.block_mask.any() && part.top_k_blocks == 0;
  if (takes_block_mask != (inputs.block_mask.blocks != nullptr) ||
      takes_block_mask != (inputs.block_mask.counts != nullptr) || inputs.block_mask.stride < 0) {
    refuse(takes_block_mask ? "the block mask is missing or incomplete" : "a step has a block mask",
           takes_block_mask        ? "the job needs indices and counts of key blocks"
           : part.top_k_blocks > 0 ? "steps of this job select the blocks"
                                   : "the job has none",
           "AttentionSpec::block_mask and DecodeJob::top_k_blocks say whether a step is given a block mask.");
  }
  const SharedPrefixes& prefixes = inputs.prefixes;
  if (prefixes.count < 0 || prefixes.count > part.limits.prefixes) {
    refuse(fmt::format("a step has {} shared prefixes", prefixes.count),
           fmt::format("steps were prepared for up to {}", part.limits.prefixes),
           "Prepare for more: DecodeLimits::prefixes.");
  }
  if (prefixes.count > 0 && (prefixes.of_sequence == nullptr || prefixes.keys == nullptr)) {
    refuse("shared prefixes are not complete", "each has a number of keys, and each sequence says which it has",
           "Give both, or no prefixes.");
  }
  if (inputs.table_pages < 0 || inputs.table_pages > inputs.block_table.stride) {
    refuse(fmt::format("a block table of {} pages a sequence", inputs.table_pages),
           fmt::format("its rows are {} apart", inputs.block_table.stride), "Give DecodeInputs::table_pages.");
  }
  check_lengths(inputs);
}

void check_host_copies(const DecodeJob& job, const DecodeInputs& inputs) {
  const bool has_host_table = inputs.host_table.pages != nullptr;
  if (inputs.host_lengths == nullptr ? has_host_table : has_host_table != job.is_paged()) {
    refuse("host copies of lengths and block table are not complete", "one is checked by the other",
           "Give host_lengths, and with pages host_table; or neither.");
  }
  if (inputs.host_prefixes.count != (inputs.host_lengths == nullptr ? 0 : inputs.prefixes.count)) {
    refuse("host copies of the shared prefixes are not complete", "they are checked by lengths and block table",
           "Give host_prefixes with host_lengths if the step has prefixes; otherwise leave them out.");
  }
}

std::int64_t longest_sequence(const DecodeJob& job, const DecodeInputs& inputs, bool on_device) {
  const std::int32_t* const known = on_device ? inputs.host_lengths : given_lengths(inputs);
  if (known == nullptr) return job.limits.keys;
  const std::int64_t more = !on_device && inputs.lengths == nullptr ? inputs.rows : 0;
  std::int64_t longest = 1;
  for (std::int64_t s = 0; s < inputs.q.tokens / inputs.rows; ++s) longest = std::max(longest, known[s] + more);
  return longest;
}

DecodeInputs rank_step(const DecodeJob& job, const DecodeInputs& inputs, const SequenceRange& mine,
                       const HeadRange& kv_heads) {
  const HeadRange heads = query_heads(job.spec, kv_heads);
  const auto part_of = [&](const TensorView& all, const HeadRange& of) {
    if (!has_rows(all)) return all;
    TensorView part = all;
    part.tokens = mine.count * inputs.rows;
    part.heads = of.count;
    if (part.tokens > 0) part.data = all.at(mine.first * inputs.rows, of.first);
    return part;
  };
  DecodeInputs of = inputs;
  of.q = part_of(inputs.q, heads);
  of.k_new = part_of(inputs.k_new, kv_heads);
  of.v_new = part_of(inputs.v_new, kv_heads);
  if (inputs.sinks != nullptr) of.sinks += heads.first;
  if (of.lengths != nullptr) of.lengths += mine.first;
  if (of.lengths_before != nullptr) of.lengths_before += mine.first;
  if (inputs.host_lengths != nullptr) of.host_lengths += mine.first;
  if (job.is_paged()) {
    of.block_table.pages += mine.first * inputs.block_table.stride;
    if (inputs.host_table.pages != nullptr) of.host_table.pages += mine.first * inputs.host_table.stride;
  } else {
    for (MutableCacheView* cache : {&of.k, &of.v}) {
      cache->data = static_cast<std::byte*>(cache->data) +
                    mine.first * cache->page_stride * static_cast<std::int64_t>(size_of(cache->dtype));
      cache->pages -= mine.first;
    }
  }
  if (inputs.block_mask.counts != nullptr) {
    const std::int64_t mask_heads = mine.first * spec_of_heads(job.spec, kv_heads).block_mask.heads;
    of.block_mask.blocks += mask_heads * inputs.block_mask.stride;
    of.block_mask.counts += mask_heads;
  }
  return of;
}

DecodeBlockMaskArrays block_mask_of_heads(const DecodeBlockMaskArrays& all, const AttentionSpec& spec,
                                          const HeadRange& kv_heads) {
  const int mask_heads = spec_of_heads(spec, kv_heads).block_mask.heads;
  if (mask_heads == spec.block_mask.heads) return all;
  const std::int64_t first = std::int64_t{kv_heads.first} * spec.block_mask.heads / spec.kv_heads;
  DecodeBlockMaskArrays part;
  part.stride = all.stride;
  for (auto at = static_cast<std::size_t>(first); at < all.counts.size();
       at += static_cast<std::size_t>(spec.block_mask.heads)) {
    for (std::size_t list = at; list < at + static_cast<std::size_t>(mask_heads); ++list) {
      const auto begin = all.blocks.begin() + static_cast<std::int64_t>(list) * all.stride;
      part.counts.push_back(all.counts[list]);
      part.blocks.insert(part.blocks.end(), begin, begin + all.stride);
    }
  }
  return part;
}

}  // namespace ringattn
