// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/top_k_selection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

void check_count(int count) {
  if (count >= 1) return;
  fail(ErrorCode::kUsage, fmt::format("a block mask of the best {} blocks", count), "a mask row has at least one",
       "Use 1 or more.");
}

// The query blocks of a sequence.
TileRange query_blocks_of(const MaskedSequence& of, int query_block) {
  if (of.queries == 0) return {0, 0};
  return {query_block_of(of.position, query_block), query_block_of(of.position + of.queries - 1, query_block) + 1};
}

// The candidate key blocks of a query block. The caller sets `first`.
BlockCandidates candidates_of(const AttentionSpec& spec, const MaskedSequence& of, std::int64_t query_block,
                              int count) {
  const std::int64_t begin = std::max(query_block * spec.block_mask.query_block, of.position);
  const std::int64_t end = std::min((query_block + 1) * spec.block_mask.query_block, of.position + of.queries);
  const TileRange seen = tiles_of(Visibility(spec.mask, of.keys).keys(begin, end - 1), spec.block_mask.key_block);
  if (seen.empty()) return {};
  const std::int64_t diagonal = std::clamp((end - 1) / spec.block_mask.key_block, seen.begin, seen.end - 1);
  const std::int64_t wanted = std::max(count, diagonal == seen.begin ? 1 : 2);
  return {static_cast<std::int32_t>(seen.begin), static_cast<std::int32_t>(seen.end),
          static_cast<std::int32_t>(diagonal), static_cast<std::int32_t>(std::min(wanted, seen.end - seen.begin)), 0};
}

std::int64_t key_blocks_of(const MaskedSequence& of, int key_block) { return (of.keys + key_block - 1) / key_block; }

// Allocates `count` elements in a backend's memory.
template <class Number>
Number* allocate(Backend& backend, std::int64_t count, Buffer& memory) {
  memory = backend.allocate(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(Number));
  return reinterpret_cast<Number*>(memory.data());
}

template <class Number>
void copy(Backend& backend, Number* to, const Number* from, std::int64_t count, Stream stream) {
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(Number));
  if (bytes > 0) backend.copy_rows(to, bytes, from, bytes, bytes, 1, stream);
}

void check_block_mask(const AttentionSpec& spec) {
  const BlockMaskShape& shape = spec.block_mask;
  if (shape.any() && shape.key_block >= 1 && shape.heads >= 1 && spec.kv_heads >= 1 &&
      spec.heads % spec.kv_heads == 0 && spec.heads % shape.heads == 0) {
    return;
  }
  fail(ErrorCode::kUsage,
       fmt::format("a block mask of {} heads, for {} query heads and {} KV heads", shape.heads, spec.heads,
                   spec.kv_heads),
       "each number divides the number of query heads, and blocks have at least one token",
       "Use mask rows for all heads, for each KV head, or for each query head.");
}

void check_rows(const TensorView& rows, const AttentionSpec& spec, int heads, std::int64_t max_rows) {
  if (rows.dtype == spec.dtype && rows.heads == heads && rows.dim == spec.head_dim && rows.tokens >= 1 &&
      rows.tokens <= max_rows) {
    return;
  }
  fail(ErrorCode::kUsage,
       fmt::format("{} rows [{}, {}] of {}", rows.tokens, rows.heads, rows.dim, dtype_name(rows.dtype)),
       fmt::format("1 to {} rows [{}, {}] of {} are to be chosen by", max_rows, heads, spec.head_dim,
                   dtype_name(spec.dtype)),
       "Give q and k of the job.");
}

}  // namespace

void check_top_k(const AttentionSpec& spec, std::span<const MaskedSequence> sequences, int count,
                 const BlockMaskBudget& budget) {
  check_count(count);
  const std::int64_t mask_rows = count_mask_rows(spec.block_mask, sequences, budget);
  std::int64_t entries = 0;
  for (const MaskedSequence& of : sequences) {
    const TileRange blocks = query_blocks_of(of, spec.block_mask.query_block);
    for (std::int64_t q = blocks.begin; q < blocks.end; ++q) {
      entries += std::int64_t{candidates_of(spec, of, q, count).count} * spec.block_mask.heads;
    }
    check_budget(spec.block_mask, block_mask_bytes(mask_rows, entries), budget);
  }
}

RowSource packed_rows(std::span<const MaskedSequence> sequences, const TensorView& q, const TensorView& k) {
  std::vector<std::int64_t> queries{0}, keys{0};  // before each sequence
  for (const MaskedSequence& of : sequences) {
    queries.push_back(queries.back() + of.queries);
    keys.push_back(keys.back() + of.keys);
  }
  if (q.tokens != queries.back() || k.tokens != keys.back()) {
    fail(ErrorCode::kUsage, fmt::format("{} rows of q and {} of k", q.tokens, k.tokens),
         fmt::format("the sequences have {} queries and {} keys", queries.back(), keys.back()),
         "Give those of all sequences, one after the other.");
  }
  return [=](SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t max_rows) {
    const bool of_queries = tensor == SyntheticTensor::kQ;
    TensorView rows = of_queries ? q : k;
    rows.data = rows.at((of_queries ? queries : keys)[sequence] + first, 0);
    rows.tokens = max_rows;
    return rows;
  };
}

TopKSelection::TopKSelection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count,
                             Backend& backend, Stream stream)
    : spec_(spec), sequences_(std::move(sequences)), backend_(backend), stream_(stream) {
  check_count(count);
  check_block_mask(spec);
  std::int64_t max_queries = 0;  // query blocks per sequence
  std::int64_t max_keys = 0;
  std::int64_t key_blocks = 0;
  for (const MaskedSequence& of : sequences_) {
    const TileRange blocks = query_blocks_of(of, spec.block_mask.query_block);
    SequenceOffsets& offsets = offsets_.emplace_back();
    offsets.query_blocks = blocks;
    offsets.first = static_cast<std::int64_t>(candidates_.size());
    offsets.key_block = key_blocks;
    for (std::int64_t q = blocks.begin; q < blocks.end; ++q) {
      BlockCandidates& candidates = candidates_.emplace_back(candidates_of(spec, of, q, count));
      candidates.first = offsets.entries;
      offsets.entries += candidates.count;
    }
    offsets.begin = indptr_.back();
    for (int head = 0; head < spec.block_mask.heads; ++head) {
      for (auto i = static_cast<std::size_t>(offsets.first); i < candidates_.size(); ++i) {
        indptr_.push_back(indptr_.back() + candidates_[i].count);
      }
    }
    max_queries = std::max(max_queries, blocks.end - blocks.begin);
    max_keys = std::max(max_keys, key_blocks_of(of, spec.block_mask.key_block));
    key_blocks += key_blocks_of(of, spec.block_mask.key_block);
  }
  // As many query blocks at a time as fit into the scratch memory and a device's grid.
  constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 16;
  const std::int64_t numbers = spec.block_mask.heads * max_keys + std::int64_t{spec.heads} * spec.head_dim;
  blocks_per_call_ = std::clamp<std::int64_t>(kTopKScratchBytes / static_cast<std::int64_t>(sizeof(float)) / numbers, 1,
                                              std::clamp<std::int64_t>(max_queries, 1, kMaxBlocks));
  const auto buffer = [this]() -> Buffer& { return memory_.emplace_back(); };
  mean_numbers_ = static_cast<std::size_t>(key_blocks * spec.kv_heads * spec.head_dim);
  mean_keys_ = allocate<float>(backend, static_cast<std::int64_t>(mean_numbers_), buffer());
  mean_queries_ = allocate<float>(backend, blocks_per_call_ * spec.heads * spec.head_dim, buffer());
  scores_ = allocate<float>(backend, blocks_per_call_ * spec.block_mask.heads * max_keys, buffer());
  listed_ = allocate<std::int32_t>(backend, indptr_.back(), buffer());
  BlockCandidates* const there =
      allocate<BlockCandidates>(backend, static_cast<std::int64_t>(candidates_.size()), buffer());
  copy(backend, there, candidates_.data(), static_cast<std::int64_t>(candidates_.size()), stream);
  device_candidates_ = there;
}

// Pools the blocks of a sequence's rows at `positions` to their means. Row i is at position all.begin + i.
void TopKSelection::pool(SyntheticTensor tensor, std::size_t sequence, const KeyRange& all, const KeyRange& positions,
                         int block, float* means, const RowSource& rows) {
  const int heads = tensor == SyntheticTensor::kQ ? spec_.heads : spec_.kv_heads;
  for (std::int64_t at = positions.begin; at < positions.end;) {
    heartbeat();
    const TensorView block_rows = rows(tensor, sequence, at - all.begin, positions.end - at);
    check_rows(block_rows, spec_, heads, positions.end - at);
    backend_.pool_rows({block_rows, at, all, block, query_block_of(positions.begin, block), means}, stream_);
    at += block_rows.tokens;
  }
}

TileRange TopKSelection::key_blocks(std::size_t sequence) const {
  return {0, key_blocks_of(sequences_[sequence], spec_.block_mask.key_block)};
}

TileRange TopKSelection::entries(std::size_t sequence, int head, const TileRange& query_blocks) const {
  const SequenceOffsets& offsets = offsets_[sequence];
  const std::int64_t blocks = offsets.query_blocks.end - offsets.query_blocks.begin;
  const auto mask_row = static_cast<std::size_t>(offsets.first * spec_.block_mask.heads + head * blocks +
                                                 query_blocks.begin - offsets.query_blocks.begin);
  return {indptr_[mask_row], indptr_[mask_row + static_cast<std::size_t>(query_blocks.end - query_blocks.begin)]};
}

std::span<float> TopKSelection::mean_keys(std::size_t sequence, const TileRange& key_blocks) const {
  const std::int64_t width = std::int64_t{spec_.kv_heads} * spec_.head_dim;
  return {mean_keys_ + (offsets_[sequence].key_block + key_blocks.begin) * width,
          static_cast<std::size_t>((key_blocks.end - key_blocks.begin) * width)};
}

void TopKSelection::pool_keys(std::size_t sequence, const TileRange& key_blocks, const RowSource& rows) {
  const int block = spec_.block_mask.key_block;
  const std::int64_t keys = sequences_[sequence].keys;
  const KeyRange own{key_blocks.begin * block, std::min(key_blocks.end * block, keys)};
  pool(SyntheticTensor::kK, sequence, {0, keys}, own, block, mean_keys(sequence, key_blocks).data(), rows);
}

void TopKSelection::choose(std::size_t sequence, const TileRange& query_blocks, const RowSource& rows) {
  const MaskedSequence& of = sequences_[sequence];
  const SequenceOffsets& offsets = offsets_[sequence];
  const int block = spec_.block_mask.query_block;
  const std::int64_t key_blocks = key_blocks_of(of, spec_.block_mask.key_block);
  const KeyRange all{of.position, of.position + of.queries};
  for (std::int64_t q = query_blocks.begin; q < query_blocks.end; q += blocks_per_call_) {
    const std::int64_t end = std::min(query_blocks.end, q + blocks_per_call_);
    const KeyRange own{std::max(q * block, all.begin), std::min(end * block, all.end)};
    pool(SyntheticTensor::kQ, sequence, all, own, block, mean_queries_, rows);
    backend_.choose_block_mask({spec_, mean_queries_, mean_keys(sequence, {0, key_blocks}).data(), end - q, key_blocks,
                                device_candidates_ + offsets.first + q - offsets.query_blocks.begin, scores_,
                                offsets.entries, listed_ + offsets.begin},
                               stream_);
  }
}

std::vector<std::int32_t> TopKSelection::fetch() const {
  std::vector<std::int32_t> entries(static_cast<std::size_t>(indptr_.back()));
  copy(backend_, entries.data(), listed_, indptr_.back(), stream_);
  finish();
  return entries;
}

void TopKSelection::finish() const {
  const Deadline deadline = DeviceTimeouts::for_queue();
  backend_.synchronize(stream_, deadline, [&deadline] {
    DeviceTimeouts::check(deadline, "it chooses blocks of keys");
    waiting_heartbeat();
  });
}

BlockMask TopKSelection::block_mask(std::vector<std::int32_t> entries) const {
  return {spec_.block_mask, sequences_, indptr_, std::move(entries)};
}

BlockMask top_k_selection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count,
                          const RowSource& rows, Backend& backend, Stream stream) {
  TopKSelection top(spec, std::move(sequences), count, backend, stream);
  for (std::size_t s = 0; s < top.sequences().size(); ++s) {
    if (!top.selects_any(s)) continue;
    top.pool_keys(s, top.key_blocks(s), rows);
    top.choose(s, top.query_blocks(s), rows);
  }
  return top.block_mask(top.fetch());
}

}  // namespace ringattn
