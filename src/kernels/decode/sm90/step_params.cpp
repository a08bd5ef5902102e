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

// Sets what a step and a merge share: `rows` query tokens of each sequence, `all` query tokens in total.
void set_shape(const AttentionSpec& spec, const AttentionOutput& output, int rows, std::int64_t all,
               const std::int32_t* lengths, cuda::AttentionParams& p, DecodeRows& query_rows) {
  p.mask = spec.mask;
  p.rows = all;
  p.heads = spec.heads;
  p.kv_heads = spec.kv_heads;
  p.head_dim = spec.head_dim;
  p.head_dim_v = spec.head_dim_v;
  p.dtype = static_cast<std::int32_t>(spec.dtype);
  p.softmax = cuda::softmax_of(spec);
  p.out = {output.out.data, output.out.token_stride, output.out.head_stride};
  p.lse = {output.lse.data, output.lse.token_stride, output.lse.head_stride};
  p.sinks = output.sinks;
  p.finish = true;
  const auto side = [](std::int64_t row_range) {  // no key is farther away
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(row_range, -1, kMaxDecodeKeys));
  };
  query_rows.left = side(spec.mask.left);
  query_rows.right = side(spec.mask.right);
  query_rows.per_sequence = rows;
  query_rows.lengths = lengths;
}

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

void set_step(const AttentionSpec& spec, const DecodeStep& step, int block_rows, WorkTileParams& p) {
  set_shape(spec, step.output, step.rows, step.q.tokens, step.lengths, p.attention, p.rows);
  p.attention.q = {step.q.data, step.q.token_stride, step.q.head_stride};
  const int masks = mask_heads_of(spec.block_mask);
  RowBlocks& blocks = p.blocks;
  blocks.sequences = static_cast<std::int32_t>(step.q.tokens / step.rows) * masks;
  blocks.kv_heads = spec.kv_heads / masks;
  blocks.ratio = spec.heads / spec.kv_heads;
  blocks.rows = block_rows;
  blocks.count = (step.rows * blocks.ratio + block_rows - 1) / block_rows;
  blocks.by_ratio = cuda::Divider(blocks.ratio);
  blocks.by_count = cuda::Divider(blocks.count);
  blocks.by_stride = cuda::Divider(std::int64_t{blocks.kv_heads} * blocks.count);
  p.splits = {step.partition.first, step.partition.stride};
  p.partials = {step.partials.data, step.partials.kv_splits};
}

void set_pages(const DecodeStep& step, int key_tile, int box_rows, WorkTileParams& p) {
  p.boxes.rows = box_rows;
  if (step.block_table.pages != nullptr) {
    p.table = {step.block_table.pages, step.block_table.stride,
               std::countr_zero(static_cast<std::uint64_t>(step.k.page_size))};
    // A box lies in one page. gcd() of the two is a power of two, as page sizes are.
    p.boxes.rows = static_cast<std::int32_t>(std::gcd(std::int64_t{box_rows}, step.k.page_size));
  }
  p.boxes.per_tile = key_tile / p.boxes.rows;
  p.boxes.by_per_tile = cuda::Divider(p.boxes.per_tile);
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
  set_shape(spec, merge.output, merge.rows, merge.output.out.tokens, merge.lengths, p.attention, p.rows);
  p.partial_splits = merge.kv_splits;
  p.kv_split_keys = static_cast<std::int32_t>(kv_split_keys);
  p.partitions = static_cast<std::int32_t>(merge.partitions.size());
  std::ranges::copy(merge.partitions, p.partials);
  p.whole = whole;
  launch_merge(p, spec.dtype, stream);
}

}  // namespace ringattn::sm90
