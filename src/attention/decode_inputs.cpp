// SPDX-License-Identifier: Apache-2.0
#include "attention/decode_inputs.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "attention/shard_checks.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& remedy) {
  fail(ErrorCode::kUsage, what, why, remedy);
}

void check_rows(std::string_view name, const TensorView& view, const FoldSpec& spec, std::int64_t rows, int heads,
                int dim) {
  if (view.dtype == spec.dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
         fmt::format("this step's is {} [{}, {}, {}]", dtype_name(spec.dtype), rows, heads, dim),
         "Rows lie sequence by sequence; this rank's results are those of Decode::owned().");
}

void check_cache(std::string_view name, const MutableCacheView& view, const FoldSpec& spec, int dim) {
  if (view.dtype == spec.dtype && view.heads == spec.kv_heads && view.dim == dim && view.pages >= 0) return;
  refuse(fmt::format("the cache of {} is {} [{}, {}, {}, {}]", name, dtype_name(view.dtype), view.pages, view.page_size,
                     view.heads, view.dim),
         fmt::format("the job's is {} [pages, page_size, {}, {}]", dtype_name(spec.dtype), spec.kv_heads, dim),
         "Check the job's heads and dims.");
}

bool has_rows(const TensorView& view) { return view.data != nullptr; }

void check_packed(std::string_view name, const CompressedCache& cache, const RowFormat& format, const RowShape& shape) {
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

void check_step(const DecodeJob& job, const DecodeInputs& inputs, const DecodeOutputs& outputs, std::int64_t owned) {
  const FoldSpec& spec = job.spec;
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
  check_sinks("FoldSpec", inputs.sinks, spec.sinks);
  check_caches(job, inputs);
}

void check_caches(const DecodeJob& job, const DecodeInputs& inputs) {
  const FoldSpec& spec = job.spec;
  if (job.format.k.is_plain()) {
    check_cache("k", inputs.k, spec, spec.head_dim);
  } else {
    check_packed("k", inputs.packed_k, job.format.k, {spec.dtype, spec.kv_heads, spec.head_dim});
  }
  const bool in_codes = job.decode_spec().values_in_codes();
  if (in_codes) {
    // Values lie in k.
  } else if (job.format.v.is_plain()) {
    check_cache("v", inputs.v, spec, spec.head_dim_v);
  } else {
    check_packed("v", inputs.packed_v, job.format.v, {spec.dtype, spec.kv_heads, spec.head_dim_v});
  }
  const std::int64_t v_pages = in_codes                  ? cache_pages(job, inputs)
                               : job.format.v.is_plain() ? inputs.v.pages
                                                         : inputs.packed_v.pages;
  const std::int64_t v_page = in_codes                  ? cache_page_size(job, inputs)
                              : job.format.v.is_plain() ? inputs.v.page_size
                                                        : inputs.packed_v.page_size;
  if (cache_pages(job, inputs) != v_pages || cache_page_size(job, inputs) != v_page) {
    refuse(fmt::format("k has {} pages of {} tokens, v {} of {}", cache_pages(job, inputs),
                       cache_page_size(job, inputs), v_pages, v_page),
           "a token's key and value lie at the same place of both", "Give k and v the same pages.");
  }
  const bool has_table = inputs.block_table.pages != nullptr;
  if (job.is_paged() != has_table) {
    refuse(has_table ? "a dense cache has a block table" : "a block table is missing",
           job.is_paged() ? fmt::format("the job has pages of {} tokens", job.page_size) : "the job has no pages",
           "DecodeJob::page_size says whether there are pages.");
  }
  if (!job.is_paged() && cache_pages(job, inputs) < inputs.q.tokens / inputs.rows) {
    refuse(fmt::format("a dense cache of {} sequences", cache_pages(job, inputs)),
           fmt::format("the step has {}", inputs.q.tokens / inputs.rows), "Each sequence has a page of its own.");
  }
  if (job.is_paged() && cache_page_size(job, inputs) != job.page_size) {
    refuse(fmt::format("pages of {} tokens", cache_page_size(job, inputs)),
           fmt::format("the job's have {}", job.page_size), "Prepare for pages of this size.");
  }
  const bool takes_lists = spec.lists.any() && job.best_blocks == 0;
  if (takes_lists != (inputs.lists.blocks != nullptr) || takes_lists != (inputs.lists.counts != nullptr) ||
      inputs.lists.stride < 0) {
    refuse(takes_lists ? "lists of key blocks are missing, or not complete" : "a step has lists of key blocks",
           takes_lists           ? "the job has them, each a row of blocks and how many of them count"
           : job.best_blocks > 0 ? "steps of this job make them"
                                 : "the job has none",
           "FoldSpec::lists and DecodeJob::best_blocks say whether a step is given lists.");
  }
  const SharedPrefixes& prefixes = inputs.prefixes;
  if (prefixes.count < 0 || prefixes.count > job.limits.prefixes) {
    refuse(fmt::format("a step has {} shared prefixes", prefixes.count),
           fmt::format("steps were prepared for up to {}", job.limits.prefixes),
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
  if (inputs.lengths == nullptr && inputs.q.tokens > 0) {
    refuse("the lengths are missing", "every sequence has one", "Give DecodeInputs::lengths.");
  }
}

DecodeInputs part_of_step(const DecodeJob& job, const DecodeInputs& inputs, const SequenceRange& mine) {
  const auto rows_of_mine = [&](const TensorView& all) {
    if (!has_rows(all)) return all;
    TensorView rows = all;
    rows.tokens = mine.count * inputs.rows;
    if (rows.tokens > 0) rows.data = all.at(mine.first * inputs.rows, 0);
    return rows;
  };
  DecodeInputs of = inputs;
  of.q = rows_of_mine(inputs.q);
  of.k_new = rows_of_mine(inputs.k_new);
  of.v_new = rows_of_mine(inputs.v_new);
  of.lengths += mine.first;
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
  if (inputs.lists.counts != nullptr) {
    of.lists.blocks += mine.first * job.spec.lists.heads * inputs.lists.stride;
    of.lists.counts += mine.first * job.spec.lists.heads;
  }
  return of;
}

}  // namespace ringattn
