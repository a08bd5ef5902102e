// SPDX-License-Identifier: Apache-2.0
// Updates of a KV cache before a decode step reads it: lengths are increased by the step's new rows, lengths and block
// tables are checked, and the new rows are appended. Backends run it on the host or on a stream
// (Backend::update_cache()). Rows are bytes here: K and V of attention, or whatever else an op stores per token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/error.hpp"
#include "base/host_device.hpp"
#include "base/tensor.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/rope/rope.hpp"

namespace ringattn {

// One tensor of a cache and its new rows. A token has `heads` rows of `row_bytes` bytes. Strides count bytes.
struct CacheAppend {
  std::byte* cache = nullptr;  // [pages, page_size, heads] rows
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  const std::byte* rows = nullptr;  // [sequences · rows, heads] rows
  std::int64_t new_token_stride = 0;
  std::int64_t new_head_stride = 0;
  std::int64_t heads = 0;
  std::int64_t row_bytes = 0;
  // Row i of sequence s is stored as token i of page s of `cache`, without a block table, a partition or a check.
  bool by_row = false;
};

// Appends `rows`, [sequences · rows, heads, dim], to `cache`.
CacheAppend append_to_cache(const MutableCacheView& cache, const TensorView& rows);
// Stores `from` as `to`, of the same shape; `rows`: per sequence.
CacheAppend store_rows(const MutableTensorView& to, const TensorView& from, int rows);

// A length, page, prefix or block-mask entry of a sequence that is out of range.
struct OutOfRangeEntry {
  enum class Kind : std::int64_t {
    kNone,
    kLength,      // value: keys of the sequence; limit: the maximum for a step
    kTableRange,  // value: keys of the partition; limit: tokens that the block table covers
    kCapacity,    // value: keys of the partition; limit: tokens per sequence of a dense cache
    kPage,        // value: the page at entry `index` of the sequence's block table; limit: pages of the pool
    kPrefix,      // value: the sequence's prefix; limit: number of prefixes
    kPrefixKeys,  // index: the sequence's prefix; value: its keys; limit: keys of the sequence
    kPrefixPage,  // index and value: as for kPage; limit: the page at that entry of the prefix's first sequence
    kMaskCount,   // value: key blocks of mask row `mask_row` of the sequence; limit: its capacity
    kMaskBlock,   // value: the key block at entry `index` of mask row `mask_row`; limit: the one before it, or −1
  };

  Kind kind = Kind::kNone;
  std::int64_t index = 0;
  std::int64_t value = 0;
  std::int64_t limit = 0;
  std::int64_t mask_row = 0;

  bool operator==(const OutOfRangeEntry&) const = default;
};

inline constexpr int kMaxCacheAppends = 4;
inline constexpr int kMaxRotatedAppends = 2;  // queries and keys

// For each of `sequences` sequences, in this order: adds `rows` to its length, checks it, and, if it has no
// out-of-range entry, writes the new rows to positions lengths[s] − rows and up. A row is not written if its position
// is negative, belongs to another partition, or is outside the block table or the pool. Rows of `rotated` are rotated
// by RoPE on the way, each by its position, with the bits of a RoPE kernel. All memory is of the backend's kind.
struct CacheUpdate {
  std::int64_t sequences = 0;
  int rows = 1;                           // rows per sequence
  const std::int32_t* lengths = nullptr;  // [sequences]
  // [sequences] receives lengths + rows; may be `lengths` itself. Null: the lengths already include the rows.
  std::int32_t* new_lengths = nullptr;
  BlockTable block_table;        // null: a dense cache, whose page s is sequence s
  std::int64_t table_pages = 0;  // entries per sequence
  std::int64_t pages = 0;
  std::int64_t page_size = 0;                                        // tokens
  KvPartition partition;                                             // the part of the keys that the cache holds
  std::int64_t kv_split_keys = 1;                                    // keys per KV split
  std::int64_t max_keys = std::numeric_limits<std::int32_t>::max();  // per sequence, over all partitions
  SharedPrefixes prefixes;     // if checking: the pages that a prefix fills must be the same in all its sequences
  DecodeBlockMask block_mask;  // if checking: each mask row must ascend
  int mask_heads = 0;          // mask rows per sequence; 0: no block mask
  CacheAppend appends[kMaxCacheAppends];
  int append_count = 0;
  RowRotation rotation;  // of `rotated`, whose rows have its dtype and head_dim
  CacheAppend rotated[kMaxRotatedAppends];
  int rotated_count = 0;
  // Null: nothing is checked. Otherwise [sequences] receives the lengths for the step: 0 for sequences with an
  // out-of-range entry.
  std::int32_t* checked = nullptr;
  // With `checked`: [sequences] the first out-of-range entry of each since the caller zeroed them.
  OutOfRangeEntry* out_of_range = nullptr;
};

// A sequence's length after the update, saturated to the type's maximum.
RINGATTN_HOST_DEVICE inline std::int32_t new_length(const CacheUpdate& update, std::int32_t length) {
  constexpr std::int32_t kMax = 0x7fffffff;
  if (update.new_lengths == nullptr) return length;
  return length > kMax - update.rows ? kMax : length + update.rows;
}

// Entries of a sequence's block table that hold its first `length` keys.
RINGATTN_HOST_DEVICE inline std::int64_t pages_of_length(const CacheUpdate& update, std::int64_t length) {
  return (keys_of_partition(update.partition, update.kv_split_keys, length) + update.page_size - 1) / update.page_size;
}

// Checks an updated length, without the pages.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry length_out_of_range(const CacheUpdate& update, std::int64_t length) {
  if (update.new_lengths != nullptr && length < update.rows)
    return {OutOfRangeEntry::Kind::kLength, 0, length - update.rows, update.max_keys};
  if (length < 0 || length > update.max_keys) return {OutOfRangeEntry::Kind::kLength, 0, length, update.max_keys};
  const std::int64_t keys = keys_of_partition(update.partition, update.kv_split_keys, length);
  if (update.block_table.pages == nullptr) {
    if (keys <= update.page_size) return {};
    return {OutOfRangeEntry::Kind::kCapacity, 0, keys, update.page_size};
  }
  if (pages_of_length(update, length) <= update.table_pages) return {};
  return {OutOfRangeEntry::Kind::kTableRange, 0, keys, update.table_pages * update.page_size};
}

// Checks entry `index` of a sequence's block table.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry page_out_of_range(const CacheUpdate& update, std::int64_t sequence,
                                                              std::int64_t index) {
  const std::int32_t page = update.block_table.pages[sequence * update.block_table.stride + index];
  if (page >= 0 && page < update.pages) return {};
  return {OutOfRangeEntry::Kind::kPage, index, page, update.pages};
}

// Checks the prefix of a sequence of `length` keys, without its pages.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry prefix_out_of_range(const CacheUpdate& update, std::int64_t sequence,
                                                                std::int64_t length) {
  const SharedPrefixes& prefixes = update.prefixes;
  const std::int32_t prefix = prefixes.count > 0 ? prefixes.of_sequence[sequence] : -1;
  if (prefix == -1) return {};
  if (prefix < 0 || prefix >= prefixes.count) return {OutOfRangeEntry::Kind::kPrefix, 0, prefix, prefixes.count};
  const std::int64_t keys = prefixes.keys[prefix];
  if (keys < 0 || keys > length) return {OutOfRangeEntry::Kind::kPrefixKeys, prefix, keys, length};
  return {};
}

// Leading entries of a sequence's block table that must equal those of the other sequences with its prefix. The prefix
// must be in range.
RINGATTN_HOST_DEVICE inline std::int64_t prefix_pages(const CacheUpdate& update, std::int64_t sequence) {
  const std::int32_t prefix = update.prefixes.count > 0 ? update.prefixes.of_sequence[sequence] : -1;
  if (prefix < 0 || update.block_table.pages == nullptr) return 0;
  return keys_of_partition(update.partition, update.kv_split_keys, update.prefixes.keys[prefix]) / update.page_size;
}

// Checks entry `index` of a sequence against sequence `first`, which has the same prefix.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry prefix_page_mismatch(const CacheUpdate& update, std::int64_t sequence,
                                                                 std::int64_t first, std::int64_t index) {
  const std::int32_t page = update.block_table.pages[sequence * update.block_table.stride + index];
  const std::int32_t other = update.block_table.pages[first * update.block_table.stride + index];
  if (page == other) return {};
  return {OutOfRangeEntry::Kind::kPrefixPage, index, page, other};
}

// Checks the number of key blocks in a sequence's mask row.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry mask_count_out_of_range(const CacheUpdate& update, std::int64_t sequence,
                                                                    int mask_row) {
  const std::int32_t count = update.block_mask.counts[sequence * update.mask_heads + mask_row];
  if (count >= 0 && count <= update.block_mask.stride) return {};
  return {OutOfRangeEntry::Kind::kMaskCount, 0, count, update.block_mask.stride, mask_row};
}

// Checks entry `index` of a mask row whose number of key blocks is in range.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry mask_block_out_of_order(const CacheUpdate& update, std::int64_t sequence,
                                                                    int mask_row, std::int64_t index) {
  const std::int32_t* const blocks =
      update.block_mask.blocks + (sequence * update.mask_heads + mask_row) * update.block_mask.stride;
  const std::int32_t before = index == 0 ? -1 : blocks[index - 1];
  if (blocks[index] > before) return {};
  return {OutOfRangeEntry::Kind::kMaskBlock, index, blocks[index], before, mask_row};
}

// Where the row at `position` of a sequence is stored. Page −1: nowhere.
struct PageSlot {
  std::int64_t page = -1;
  std::int64_t token = 0;  // token in the page
};
RINGATTN_HOST_DEVICE inline PageSlot page_slot_of(const CacheUpdate& update, std::int64_t sequence,
                                                  std::int64_t position) {
  if (position < 0 || !holds_key(update.partition, update.kv_split_keys, position)) return {};
  const std::int64_t token = token_of_key(update.partition, update.kv_split_keys, position);
  const std::int64_t entry = token / update.page_size;
  if (update.block_table.pages == nullptr) {
    return entry == 0 && sequence < update.pages ? PageSlot{sequence, token} : PageSlot{};
  }
  if (entry >= update.table_pages) return {};
  const std::int32_t page = update.block_table.pages[sequence * update.block_table.stride + entry];
  return page >= 0 && page < update.pages ? PageSlot{page, token % update.page_size} : PageSlot{};
}

// The first out-of-range entry of a sequence; lengths and tables are in host memory.
OutOfRangeEntry out_of_range_entry(const CacheUpdate& update, std::int64_t sequence);

// Throws `code` for the first sequence of an update in host memory with an out-of-range entry. The message names the
// sequence, and the page or length with its limit. Changes nothing.
void refuse_out_of_range(const CacheUpdate& update, ErrorCode code);
// The same for entries that were found before: [sequences].
void refuse_out_of_range(const OutOfRangeEntry* entries, std::int64_t sequences, ErrorCode code);

// Backend::update_cache() for host memory.
void update_host_cache(const CacheUpdate& update);

}  // namespace ringattn
