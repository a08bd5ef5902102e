// SPDX-License-Identifier: Apache-2.0
#include "tests/support/decode_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "attention/tokens/cost.hpp"
#include "ops/decode/decode_inputs.hpp"
#include "ops/rope/rope.hpp"
#include "tests/support/device_pool.hpp"
#include "tests/support/poison.hpp"

namespace ringattn::testing {

namespace {

constexpr std::int64_t kSparePages = 3;   // that no sequence owns
constexpr std::int64_t kSpareTokens = 5;  // after the longest sequence of a dense cache

std::size_t at_least_one(std::int64_t bytes) { return static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)); }

std::int64_t longest(const Job& job) {
  std::int64_t keys = 1;
  for (const Sequence& sequence : job.batch.sequences) keys = std::max(keys, sequence.k_len);
  return keys;
}

std::int64_t max_rows(const Decode& decode) { return decode.job().limits.sequences * decode.job().limits.rows; }

std::int64_t page_tokens(const Decode& decode, const CacheLayout& layout) {
  return layout.page_size > 0 ? layout.page_size : decode.cache_tokens(decode.job().limits.keys) + kSpareTokens;
}

// Enough pages that sequences never share any.
std::int64_t pool_pages(const Decode& decode, const Job& job, const CacheLayout& layout) {
  std::int64_t pages = layout.page_size > 0 ? kSparePages : 0;
  const std::int64_t size = page_tokens(decode, layout);
  for (const Sequence& sequence : job.batch.sequences) {
    pages += layout.page_size > 0 ? (decode.cache_tokens(sequence.k_len) + size - 1) / size : 1;
  }
  return pages;
}

std::size_t cache_size(const Decode& decode, const Job& job, const CacheLayout& layout, std::int64_t token_bytes) {
  return at_least_one(pool_pages(decode, job, layout) * page_tokens(decode, layout) * token_bytes);
}

// The maximum number of blocks of a mask row, and one more.
std::int64_t list_width(const Decode& decode) {
  const DecodeJob& job = decode.job();
  return job.spec.block_mask.any() && job.top_k_blocks == 0 ? max_mask_blocks(job) + 1 : 0;
}
std::int64_t list_count(const Decode& decode, const Job& job) {
  return static_cast<std::int64_t>(job.batch.sequences.size()) * decode.job().spec.block_mask.heads;
}

std::int64_t table_width(const Decode& decode, const Job& job, const CacheLayout& layout) {
  return layout.page_size > 0 ? decode.cache_tokens(longest(job)) / layout.page_size + 2 : 0;
}

}  // namespace

DecodeJob decode_job(const Job& job, int rows, const CacheLayout& layout) {
  const auto prefixes = static_cast<int>(layout.prefix_keys.size());
  return {job.spec,
          {static_cast<std::int64_t>(job.batch.sequences.size()), rows, longest(job), 0, prefixes},
          layout.page_size};
}

JobTensors rotated_tensors(const Job& job, const JobTensors& tensors, const RopeSpec& spec) {
  JobTensors rotated = tensors;
  RopeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  Rope rope(spec, options);
  const auto rotate = [&](std::vector<std::byte>& rows, const std::vector<std::int64_t>& positions, int heads) {
    const auto count = static_cast<std::int64_t>(positions.size());
    const MutableTensorView view = dense_view(static_cast<void*>(rows.data()), spec.dtype, count, heads, spec.head_dim);
    const RopeTensor tensor{view, view};
    rope.run({{positions.data(), true, count}, {&tensor, 1}});
  };
  std::vector<std::int64_t> queries, keys;
  for (const Sequence& sequence : job.batch.sequences) {
    for (std::int64_t i = 0; i < sequence.q_len; ++i) queries.push_back(sequence.q_offset + i);
    for (std::int64_t i = 0; i < sequence.k_len; ++i) keys.push_back(i);
  }
  rotate(rotated.q, queries, job.spec.heads);
  rotate(rotated.k, keys, job.spec.kv_heads);
  return rotated;
}

DecodeRank::DecodeRank(Decode& decode, const Job& job, const JobTensors& tensors, const CacheLayout& layout)
    : table_pages(table_width(decode, job, layout)),
      prefix_of(layout.prefix_of),
      prefix_keys(layout.prefix_keys),
      decode_(decode),
      job_(job),
      tensors_(tensors),
      head_major_(layout.head_major),
      page_size_(page_tokens(decode, layout)),
      pages_(pool_pages(decode, job, layout)),
      cu_q_(job.batch.cu_q()),
      cu_k_(job.batch.cu_k()),
      k_(decode.backend(), cache_size(decode, job, layout, k_token_bytes(job.spec))),
      v_(decode.backend(), cache_size(decode, job, layout, v_token_bytes(job.spec))),
      q_(decode.backend(), at_least_one(max_rows(decode) * q_token_bytes(job.spec))),
      k_new_(decode.backend(), at_least_one(max_rows(decode) * k_token_bytes(job.spec))),
      v_new_(decode.backend(), at_least_one(max_rows(decode) * v_token_bytes(job.spec))),
      out_(decode.backend(), at_least_one(max_rows(decode) * out_token_bytes(job.spec))),
      lse_(decode.backend(), at_least_one(max_rows(decode) * lse_token_bytes(job.spec))),
      lengths_(decode.backend(), at_least_one(static_cast<std::int64_t>(job.batch.sequences.size()) * 4)),
      table_(decode.backend(), at_least_one(static_cast<std::int64_t>(job.batch.sequences.size()) * table_pages * 4)),
      prefix_of_(decode.backend(), at_least_one(static_cast<std::int64_t>(layout.prefix_of.size()) * 4)),
      prefix_keys_(decode.backend(), at_least_one(static_cast<std::int64_t>(layout.prefix_keys.size()) * 4)),
      sinks_(decode.backend(), at_least_one(static_cast<std::int64_t>(tensors.sinks.size()) * 4)),
      mask_indices_(decode.backend(), at_least_one(list_count(decode, job) * list_width(decode) * 4)),
      mask_counts_(decode.backend(), at_least_one(list_count(decode, job) * 4)) {
  mask_stride_ = list_width(decode);
  lengths.assign(job.batch.sequences.size(), 0);
  sinks_.write(bytes_of(tensors.sinks));
  make_pages(layout);
}

void DecodeRank::make_pages(const CacheLayout& layout) {
  if (table_pages == 0) return;
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages_));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(layout.shuffle + static_cast<std::uint64_t>(decode_.partition().first));
  std::shuffle(order.begin(), order.end(), generator);
  table.assign(job_.batch.sequences.size() * static_cast<std::size_t>(table_pages), kNoPage);
  std::size_t next = 0;
  const std::int64_t shared = decode_.cache_tokens(layout.shared);
  const auto columns = static_cast<std::size_t>(table_pages);
  for (std::size_t s = 0; s < job_.batch.sequences.size(); ++s) {
    const std::int64_t tokens = decode_.cache_tokens(job_.batch.sequences[s].k_len);
    std::int32_t* const entries = table.data() + s * columns;
    // The sequence whose first pages are this one's, too, and how many tokens lie there.
    std::size_t first = 0;
    std::int64_t in_common = shared;
    if (!prefix_of.empty()) {
      first = static_cast<std::size_t>(std::ranges::find(prefix_of, prefix_of[s]) - prefix_of.begin());
      in_common = prefix_of[s] < 0 ? 0 : decode_.cache_tokens(prefix_keys[static_cast<std::size_t>(prefix_of[s])]);
    }
    for (std::int64_t i = 0; i * page_size_ < tokens; ++i) {
      const bool is_shared = s > first && (i + 1) * page_size_ <= in_common;
      entries[i] = is_shared ? table[first * columns + static_cast<std::size_t>(i)] : order[next++];
    }
  }
}

MutableCacheView DecodeRank::view(std::byte* data, int dim) const {
  const int heads = decode_.kv_heads().count;
  return head_major_ ? head_major_cache_view(data, job_.spec.dtype, pages_, page_size_, heads, dim)
                     : cache_view(data, job_.spec.dtype, pages_, page_size_, heads, dim);
}

// Where the rank keeps the key at `position` of a sequence, if it does.
void DecodeRank::put_row(std::vector<std::byte>& cache, const std::vector<std::byte>& rows, int dim,
                         std::size_t sequence, std::int64_t position) const {
  if (!holds_key(decode_.partition(), decode_.kv_split_keys(), position)) return;
  const std::int64_t token = token_of_key(decode_.partition(), decode_.kv_split_keys(), position);
  const std::size_t entry =
      sequence * static_cast<std::size_t>(table_pages) + static_cast<std::size_t>(token / page_size_);
  const std::int64_t page = table_pages > 0 ? table[entry] : static_cast<std::int64_t>(sequence);
  const MutableCacheView to = view(cache.data(), dim);
  const std::size_t element = size_of(to.dtype);
  const HeadRange heads = decode_.kv_heads();
  for (int head = 0; head < heads.count; ++head) {
    const std::int64_t at = page * to.page_stride + token % page_size_ * to.token_stride + head * to.head_stride;
    const std::int64_t from = ((cu_k_[sequence] + position) * job_.spec.kv_heads + heads.first + head) * dim;
    std::memcpy(cache.data() + static_cast<std::size_t>(at) * element,
                rows.data() + static_cast<std::size_t>(from) * element, static_cast<std::size_t>(dim) * element);
  }
}

void DecodeRank::fill(const std::vector<std::int64_t>& filled) {
  const AttentionSpec& spec = job_.spec;
  const auto size = [&](std::int64_t token_bytes) { return at_least_one(pages_ * page_size_ * token_bytes); };
  std::vector<std::byte> k(size(k_token_bytes(spec)), kPoison);
  std::vector<std::byte> v(size(v_token_bytes(spec)), kPoison);
  for (std::size_t s = 0; s < filled.size(); ++s) {
    for (std::int64_t position = 0; position < filled[s]; ++position) {
      put_row(k, tensors_.k, spec.head_dim, s, position);
      put_row(v, tensors_.v, spec.head_dim_v, s, position);
    }
  }
  k_.write(k);
  v_.write(v);
  lengths.assign(filled.begin(), filled.end());
  upload();
}

void DecodeRank::set_block_mask(const BlockMask& block_mask, int rows) {
  DecodeBlockMaskArrays arrays = block_mask_of_heads(decode_block_mask(block_mask, job_.spec.mask, rows, mask_stride_),
                                                     decode_.job().spec, decode_.kv_heads());
  list_blocks = std::move(arrays.blocks);
  list_counts = std::move(arrays.counts);
}

void DecodeRank::upload() {
  if (mask_stride_ > 0) {
    mask_indices_.write(bytes_of(list_blocks));
    mask_counts_.write(bytes_of(list_counts));
  }
  lengths_.write(bytes_of(lengths));
  table_.write(bytes_of(table));
  prefix_of_.write(bytes_of(prefix_of));
  prefix_keys_.write(bytes_of(prefix_keys));
}

void DecodeRank::load(const std::vector<std::int64_t>& step, int rows) {
  step_ = step;
  rows_ = rows;
  const AttentionSpec& spec = job_.spec;
  const auto gather = [&](DeviceArray& to, const std::vector<std::byte>& from, std::int64_t token_bytes,
                          const std::vector<std::int64_t>& cu, bool queries) {
    std::vector<std::byte> bytes(at_least_one(static_cast<std::int64_t>(step.size()) * rows * token_bytes), kPoison);
    for (std::size_t s = 0; s < step.size(); ++s) {
      for (int i = 0; i < rows; ++i) {
        const std::int64_t position = step[s] - rows + i;
        const std::int64_t token = queries ? position - job_.batch.sequences[s].q_offset : position;
        if (token < 0) continue;  // no such key
        std::memcpy(bytes.data() + (static_cast<std::int64_t>(s) * rows + i) * token_bytes,
                    from.data() + (cu[s] + token) * token_bytes, static_cast<std::size_t>(token_bytes));
      }
    }
    to.write(bytes);
  };
  gather(q_, tensors_.q, q_token_bytes(spec), cu_q_, true);
  gather(k_new_, tensors_.k, k_token_bytes(spec), cu_k_, false);
  gather(v_new_, tensors_.v, v_token_bytes(spec), cu_k_, false);
}

DecodeInputs DecodeRank::inputs(bool update, bool append) {
  const AttentionSpec& spec = job_.spec;
  const std::int64_t tokens = static_cast<std::int64_t>(step_.size()) * rows_;
  const auto rows = [&](DeviceArray& array, int heads, int dim) {
    return dense_view(static_cast<const void*>(array.data()), spec.dtype, tokens, heads, dim);
  };
  DecodeInputs inputs;
  inputs.q = rows(q_, spec.heads, spec.head_dim);
  inputs.rows = rows_;
  inputs.k = view(k_.data(), spec.head_dim);
  inputs.v = view(v_.data(), spec.head_dim_v);
  if (table_pages > 0) {
    inputs.block_table = {reinterpret_cast<const std::int32_t*>(table_.data()), table_pages};
    inputs.table_pages = table_pages;
  }
  if (!prefix_keys.empty()) {
    inputs.prefixes = {reinterpret_cast<const std::int32_t*>(prefix_of_.data()),
                       reinterpret_cast<const std::int32_t*>(prefix_keys_.data()),
                       static_cast<int>(prefix_keys.size())};
  }
  if (mask_stride_ > 0) {
    inputs.block_mask = {reinterpret_cast<const std::int32_t*>(mask_indices_.data()),
                         reinterpret_cast<const std::int32_t*>(mask_counts_.data()), mask_stride_};
  }
  auto* const counts = reinterpret_cast<std::int32_t*>(lengths_.data());
  if (update) {
    inputs.lengths_before = counts;
  } else {
    inputs.lengths = counts;
  }
  inputs.update_lengths = update;
  inputs.sinks = spec.sinks ? sinks_.floats() : nullptr;
  if (append) {
    inputs.k_new = rows(k_new_, spec.kv_heads, spec.head_dim);
    inputs.v_new = rows(v_new_, spec.kv_heads, spec.head_dim_v);
  }
  return inputs;
}

DecodeOutputs DecodeRank::outputs() {
  const AttentionSpec& spec = job_.spec;
  const std::int64_t rows = decode_.owned(static_cast<std::int64_t>(step_.size())).count * rows_;
  return {dense_view(static_cast<void*>(out_.data()), spec.dtype, rows, spec.heads, spec.head_dim_v),
          {lse_.floats(), spec.heads, 1}};
}

std::string DecodeRank::difference(const JobResult& reference) {
  const std::vector<std::byte> out = out_.read();
  const std::vector<float> lse = lse_.read_floats();
  out_.clear();
  lse_.clear();
  const auto row_bytes = static_cast<std::size_t>(out_token_bytes(job_.spec));
  const auto heads = static_cast<std::size_t>(job_.spec.heads);
  const SequenceRange mine = decode_.owned(static_cast<std::int64_t>(step_.size()));
  std::string found;
  for (std::int64_t s = mine.first; s < mine.end(); ++s) {
    const auto sequence = static_cast<std::size_t>(s);
    for (int i = 0; i < rows_; ++i) {
      const std::int64_t position = step_[sequence] - rows_ + i;
      const auto row = static_cast<std::size_t>((s - mine.first) * rows_ + i);
      const auto token = static_cast<std::size_t>(cu_q_[sequence] + position - job_.batch.sequences[sequence].q_offset);
      const bool same =
          std::memcmp(out.data() + row * row_bytes, reference.out.data() + token * row_bytes, row_bytes) == 0 &&
          std::memcmp(lse.data() + row * heads, reference.lse.data() + token * heads, heads * sizeof(float)) == 0;
      if (!same) found += fmt::format("sequence {}, position {} differs; ", s, position);
    }
  }
  return found;
}

bool DecodeRank::is_empty(std::int64_t sequence) {
  const std::vector<std::byte> out = out_.read();
  const std::vector<float> lse = lse_.read_floats();
  const std::int64_t first =
      (sequence - decode_.owned(static_cast<std::int64_t>(step_.size())).first) * rows_ * job_.spec.heads;
  const std::int64_t bytes = out_token_bytes(job_.spec) / job_.spec.heads;
  const std::int64_t count = std::int64_t{rows_} * job_.spec.heads;
  return std::all_of(out.begin() + first * bytes, out.begin() + (first + count) * bytes,
                     [](std::byte byte) { return byte == std::byte{0}; }) &&
         std::all_of(lse.begin() + first, lse.begin() + first + count,
                     [](float value) { return std::isinf(value) && value < 0.0F; });
}

bool DecodeRank::untouched() {
  const std::vector<std::byte> out = out_.read();
  const std::vector<float> lse = lse_.read_floats();
  return std::ranges::all_of(out, [](std::byte byte) { return byte == kPoison; }) &&
         std::ranges::all_of(lse, [](float value) { return std::isnan(value); });
}

std::vector<std::byte> DecodeRank::cache_bytes() {
  std::vector<std::byte> bytes = k_.read();
  const std::vector<std::byte> v = v_.read();
  bytes.insert(bytes.end(), v.begin(), v.end());
  return bytes;
}

std::vector<std::int32_t> DecodeRank::lengths_now() {
  const std::vector<std::byte> bytes = lengths_.read();
  std::vector<std::int32_t> now(bytes.size() / sizeof(std::int32_t));
  std::memcpy(now.data(), bytes.data(), now.size() * sizeof(std::int32_t));
  return now;
}

}  // namespace ringattn::testing
