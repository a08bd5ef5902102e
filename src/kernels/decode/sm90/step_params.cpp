// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/sm90/step_params.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/error.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/merge.hpp"

namespace ringattn::sm90 {

namespace {

// Sets the fields that a step and a merge share: `rows` query tokens of each sequence, `all` query tokens in total.
void set_shape(const AttentionSpec& spec, const AttentionOutput& output, int rows, std::int64_t all, DecodeParams& p) {
  p.attention.mask = spec.mask;
  p.attention.rows = all;
  p.attention.heads = spec.heads;
  p.attention.kv_heads = spec.kv_heads;
  p.attention.head_dim = spec.head_dim;
  p.attention.head_dim_v = spec.head_dim_v;
  p.attention.dtype = static_cast<std::int32_t>(spec.dtype);
  p.attention.softmax = cuda::softmax_of(spec);
  p.attention.out = {output.out.data, output.out.token_stride, output.out.head_stride};
  p.attention.lse = {output.lse.data, output.lse.token_stride, output.lse.head_stride};
  p.attention.sinks = output.sinks;
  p.attention.finish = true;
  const auto side = [](std::int64_t row_range) {  // no key is farther away
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(row_range, -1, kMaxDecodeKeys));
  };
  p.left = side(spec.mask.left);
  p.right = side(spec.mask.right);
  p.rows = rows;
  p.sequences = static_cast<std::int32_t>(all / rows) * mask_heads_of(spec.block_mask);
  p.ratio = spec.heads / spec.kv_heads;
  p.mask_kv_heads = spec.kv_heads / mask_heads_of(spec.block_mask);
}

}  // namespace

namespace {

void check_partitions(std::string_view kernel, std::size_t shares) {
  if (shares <= kMaxPartitions) return;
  fail(ErrorCode::kUnsupported, fmt::format("a decode step whose keys are dealt to {} ranks", shares),
       fmt::format("{} merges the results of up to {}", kernel, kMaxPartitions), "Use fewer ranks.");
}

}  // namespace

void check_limits(std::string_view kernel, const DecodeLimits& limits, int shares) {
  check_partitions(kernel, static_cast<std::size_t>(shares));
  if (limits.keys > kMaxDecodeKeys) {
    fail(ErrorCode::kUnsupported, fmt::format("a decode step over {} keys", limits.keys),
         fmt::format("{} decodes sequences of up to {}", kernel, kMaxDecodeKeys), "Use shorter ones.");
  }
}

void set_step(const AttentionSpec& spec, const DecodeStep& step, int block_rows, DecodeParams& p) {
  set_shape(spec, step.output, step.rows, step.q.tokens, p);
  p.attention.q = {step.q.data, step.q.token_stride, step.q.head_stride};
  p.block_rows = block_rows;
  p.blocks = (step.rows * p.ratio + block_rows - 1) / block_rows;
  p.by_ratio = cuda::Divider(p.ratio);
  p.by_blocks = cuda::Divider(p.blocks);
  p.by_stride = cuda::Divider(std::int64_t{p.mask_kv_heads} * p.blocks);
  p.lengths = step.lengths;
  if (spec.block_mask.any()) {
    p.mask_block_indices = step.block_mask.blocks;
    p.mask_block_counts = step.block_mask.counts;
    p.mask_row_stride = step.block_mask.stride;
    p.by_mask_rows = cuda::Divider(spec.block_mask.heads);
  }
  p.first_split = step.partition.first;
  p.split_stride = step.partition.stride;
  p.partials = step.partials.data;
  p.partial_splits = step.partials.kv_splits;
}

void set_pages(const DecodeStep& step, int key_tile, int box_rows, DecodeParams& p) {
  p.box_rows = box_rows;
  if (step.block_table.pages != nullptr) {
    p.pages = step.block_table.pages;
    p.table_stride = step.block_table.stride;
    p.page_log = std::countr_zero(static_cast<std::uint64_t>(step.k.page_size));
    // A box lies in one page. gcd() of the two is a power of two, as page sizes are.
    p.box_rows = static_cast<std::int32_t>(std::gcd(std::int64_t{box_rows}, step.k.page_size));
  }
  p.boxes = key_tile / p.box_rows;
  p.by_boxes = cuda::Divider(p.boxes);
}

MappedPages mapped_pages(std::string_view kernel, const CacheView& view) {
  const MappedPages pages{{view.data, view.page_size, view.heads, view.dim, view.token_stride, view.head_stride},
                          view.pages,
                          view.page_stride};
  if (!can_map(pages)) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't read this cache", kernel),
         "its start and its strides must be multiples of 16 bytes, and it must have less than 2^31 pages and tokens",
         "Use a cache with such a layout.");
  }
  return pages;
}

void merge_partitions(std::string_view kernel, const AttentionSpec& spec, std::int64_t kv_split_keys,
                      const DecodeMerge& merge, Stream stream, const std::int32_t* whole) {
  check_partitions(kernel, merge.partitions.size());
  if (merge.output.out.tokens == 0) return;
  MergeParams p{};
  set_shape(spec, merge.output, merge.rows, merge.output.out.tokens, p.step);
  p.step.lengths = merge.lengths;
  p.step.partial_splits = merge.kv_splits;
  p.kv_split_keys = static_cast<std::int32_t>(kv_split_keys);
  p.partitions = static_cast<std::int32_t>(merge.partitions.size());
  std::ranges::copy(merge.partitions, p.partials);
  p.whole = whole;
  launch_merge(p, spec.dtype, stream);
}

}  // namespace ringattn::sm90
