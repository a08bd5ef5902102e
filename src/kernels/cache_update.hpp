// SPDX-License-Identifier: Apache-2.0
// What happens to a cache before a decode step reads it: its new rows are added to the lengths and written at their
// places, and lengths and block tables are checked. Backends do it, on the host or on a stream
// (Backend::update_cache()). Rows are bytes here: K and V of attention, or whatever else an op keeps of a token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/error.hpp"
#include "base/host_device.hpp"
#include "base/tensor.hpp"
#include "kernels/cache_partition.hpp"
#include "kernels/decode.hpp"

namespace ringattn {

// One tensor of a cache, and the rows that join it: a token has `heads` rows of `row_bytes` bytes. Strides count bytes.
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
};

// `rows`, [sequences · rows, heads, dim], join `cache`.
CacheAppend append_to_cache(const MutableCacheView& cache, const TensorView& rows);

// Why a sequence can't be read.
struct OutOfRangeEntry {
  enum class Kind : std::int64_t {
    kNone,
    kLength,      // value: keys of the sequence; limit: the most that a step may have
    kTableRange,  // value: keys of the partition; limit: tokens that the block table reaches
    kCapacity,    // the same of a dense cache, and tokens that it holds of a sequence
    kPage,        // value: the page at entry `place` of the sequence's block table; limit: pages of the pool
    kPrefix,      // value: the prefix that the sequence names; limit: how many there are
    kPrefixKeys,  // place: the prefix that it names; value: keys of that; limit: keys of the sequence
    kPrefixPage,  // value: as of kPage; limit: the page at the same entry of the first sequence that has the prefix
    kMaskCount,   // value: blocks of list `list` of the sequence; limit: how many it has room for
    kMaskBlock,   // value: the block at entry `place` of list `list`; limit: the one before it, or −1
  };

  Kind kind = Kind::kNone;
  std::int64_t index = 0;
  std::int64_t value = 0;
  std::int64_t limit = 0;
  std::int64_t list = 0;

  bool operator==(const OutOfRangeEntry&) const = default;
};

inline constexpr int kMaxCacheAppends = 4;

// Of `sequences` sequences, in this order: `rows` is added to each length; each is checked; the new rows are written to
// positions lengths[s] − rows … of the sequences without a fault. A row whose position is negative, or belongs to
// another partition, or has no place inside of the table and the pool, is not written. All memory is of the backend's
// kind.
struct CacheUpdate {
  std::int64_t sequences = 0;
  int rows = 1;                           // of a sequence
  const std::int32_t* lengths = nullptr;  // [sequences]
  // [sequences] where lengths + rows are written, which may be `lengths` itself. Null: the lengths count the rows
  // already.
  std::int32_t* new_lengths = nullptr;
  BlockTable block_table;        // none: a dense cache, whose page s is sequence s
  std::int64_t table_pages = 0;  // entries of a sequence
  std::int64_t pages = 0;
  std::int64_t page_size = 0;                                        // tokens
  KvPartition partition;                                             // that the cache holds
  std::int64_t kv_split_keys = 1;                                    // keys of a group
  std::int64_t max_keys = std::numeric_limits<std::int32_t>::max();  // of a sequence, over all shares
  SharedPrefixes prefixes;     // checked, where anything is: pages that they fill must be those of all their sequences
  DecodeBlockMask block_mask;  // checked, where anything is: they ascend
  int mask_heads = 0;          // of a sequence; 0: there are no lists
  CacheAppend appends[kMaxCacheAppends];
  int append_count = 0;  // 0: nothing is written
  // Null: nothing is checked. Else [sequences] what the step may take for the lengths: 0 for those with a fault.
  std::int32_t* checked = nullptr;
  // With `checked`: [sequences] the first fault of each, since somebody has set them to zero bytes.
  OutOfRangeEntry* out_of_range = nullptr;
};

// The length of a sequence of the update when it has new_lengths, which stops at what its type holds.
RINGATTN_HOST_DEVICE inline std::int32_t new_length(const CacheUpdate& update, std::int32_t length) {
  constexpr std::int32_t kMax = 0x7fffffff;
  if (update.new_lengths == nullptr) return length;
  return length > kMax - update.rows ? kMax : length + update.rows;
}

// Entries of a sequence's block table that have pages of its first `length` keys.
RINGATTN_HOST_DEVICE inline std::int64_t pages_of_length(const CacheUpdate& update, std::int64_t length) {
  return (keys_of_partition(update.partition, update.kv_split_keys, length) + update.page_size - 1) / update.page_size;
}

// What is wrong with a length that has new_lengths, whatever the pages are.
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

// What is wrong with entry `place` of a sequence's block table.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry page_out_of_range(const CacheUpdate& update, std::int64_t sequence,
                                                              std::int64_t place) {
  const std::int32_t page = update.block_table.pages[sequence * update.block_table.stride + place];
  if (page >= 0 && page < update.pages) return {};
  return {OutOfRangeEntry::Kind::kPage, place, page, update.pages};
}

// What is wrong with the prefix that a sequence of `length` keys names, whatever its pages are.
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

// Entries of a sequence's block table that it must have in common with others, as its prefix says; for a sequence whose
// prefix has no fault.
RINGATTN_HOST_DEVICE inline std::int64_t prefix_pages(const CacheUpdate& update, std::int64_t sequence) {
  const std::int32_t prefix = update.prefixes.count > 0 ? update.prefixes.of_sequence[sequence] : -1;
  if (prefix < 0 || update.block_table.pages == nullptr) return 0;
  return keys_of_partition(update.partition, update.kv_split_keys, update.prefixes.keys[prefix]) / update.page_size;
}

// What is wrong with entry `place` of a sequence whose prefix sequence `first` has, too.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry prefix_page_mismatch(const CacheUpdate& update, std::int64_t sequence,
                                                                 std::int64_t first, std::int64_t place) {
  const std::int32_t page = update.block_table.pages[sequence * update.block_table.stride + place];
  const std::int32_t other = update.block_table.pages[first * update.block_table.stride + place];
  if (page == other) return {};
  return {OutOfRangeEntry::Kind::kPrefixPage, place, page, other};
}

// What is wrong with the number of blocks of a sequence's list.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry mask_count_out_of_range(const CacheUpdate& update, std::int64_t sequence,
                                                                    int list) {
  const std::int32_t count = update.block_mask.counts[sequence * update.mask_heads + list];
  if (count >= 0 && count <= update.block_mask.stride) return {};
  return {OutOfRangeEntry::Kind::kMaskCount, 0, count, update.block_mask.stride, list};
}

// What is wrong with entry `place` of a list whose number of blocks is right.
RINGATTN_HOST_DEVICE inline OutOfRangeEntry mask_block_out_of_order(const CacheUpdate& update, std::int64_t sequence,
                                                                    int list, std::int64_t place) {
  const std::int32_t* const blocks =
      update.block_mask.blocks + (sequence * update.mask_heads + list) * update.block_mask.stride;
  const std::int32_t before = place == 0 ? -1 : blocks[place - 1];
  if (blocks[place] > before) return {};
  return {OutOfRangeEntry::Kind::kMaskBlock, place, blocks[place], before, list};
}

// Where the row at `position` of a sequence is written; page −1: nowhere.
struct PageSlot {
  std::int64_t page = -1;
  std::int64_t token = 0;  // of the page
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

// The first fault of a sequence whose length and table lie in host memory.
OutOfRangeEntry out_of_range_entry(const CacheUpdate& update, std::int64_t sequence);

// Throws `code` for the first sequence that has a fault, of an update in host memory: naming the sequence, and the page
// or length with its limit. Changes nothing.
void refuse_out_of_range(const CacheUpdate& update, ErrorCode code);
// The same for faults that were found: [sequences].
void refuse_out_of_range(const OutOfRangeEntry* faults, std::int64_t sequences, ErrorCode code);

// Backend::update_cache() for host memory.
void update_host_cache(const CacheUpdate& update);

}  // namespace ringattn
