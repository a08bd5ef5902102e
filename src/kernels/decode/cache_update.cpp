// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/cache_update.hpp"

#include <fmt/format.h>

#include <cstring>
#include <optional>
#include <string>

#include "kernels/rope/token_rotation.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(std::int64_t sequence, const OutOfRangeEntry& entry, ErrorCode code) {
  switch (entry.kind) {
    case OutOfRangeEntry::Kind::kLength:
      fail(code, fmt::format("sequence {} has {} keys", sequence, entry.value),
           entry.value < 0 ? "a length is not negative" : fmt::format("a step may have at most {}", entry.limit),
           "Check the lengths, or prepare for longer sequences.");
    case OutOfRangeEntry::Kind::kTableRange:
      fail(code, fmt::format("sequence {} has {} keys in this cache", sequence, entry.value),
           fmt::format("its block table covers {} tokens", entry.limit), "Give it more pages.");
    case OutOfRangeEntry::Kind::kCapacity:
      fail(code, fmt::format("sequence {} has {} keys in this cache", sequence, entry.value),
           fmt::format("the cache holds {} tokens of a sequence", entry.limit), "Make the cache longer, or use pages.");
    case OutOfRangeEntry::Kind::kPage:
      fail(code,
           fmt::format("sequence {} has page {} at index {} of its block table", sequence, entry.value, entry.index),
           fmt::format("the pool has {} pages", entry.limit), "Check the block table.");
    case OutOfRangeEntry::Kind::kPrefix:
      fail(code, fmt::format("sequence {} shares prefix {}", sequence, entry.value),
           fmt::format("the step has {}, and −1 says that it shares none", entry.limit), "Check the prefixes.");
    case OutOfRangeEntry::Kind::kPrefixKeys:
      fail(code, fmt::format("sequence {} shares prefix {} of {} keys", sequence, entry.index, entry.value),
           entry.value < 0 ? "a length is not negative" : fmt::format("the sequence has {}", entry.limit),
           "Check the prefixes.");
    case OutOfRangeEntry::Kind::kPrefixPage:
      fail(code,
           fmt::format("sequence {} has page {} at index {} of its block table", sequence, entry.value, entry.index),
           fmt::format("the first sequence with the same prefix has page {} there", entry.limit),
           "Let sequences share a prefix only if they share its pages.");
    case OutOfRangeEntry::Kind::kMaskCount:
      fail(code, fmt::format("mask row {} of sequence {} has {} blocks", entry.mask_row, sequence, entry.value),
           fmt::format("it holds at most {}", entry.limit), "Check DecodeBlockMask::counts.");
    case OutOfRangeEntry::Kind::kMaskBlock:
      fail(code,
           fmt::format("mask row {} of sequence {} has block {} at index {}, after {}", entry.mask_row, sequence,
                       entry.value, entry.index, entry.limit),
           "a mask row ascends, and begins with 0 or more", "Sort each mask row, and name a block once.");
    case OutOfRangeEntry::Kind::kNone:
      break;
  }
  fail(ErrorCode::kInternal, fmt::format("an out-of-range entry of an unknown kind at sequence {}", sequence));
}

}  // namespace

CacheAppend append_to_cache(const MutableCacheView& cache, const TensorView& rows) {
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  CacheAppend append;
  append.cache = static_cast<std::byte*>(cache.data);
  append.page_stride = cache.page_stride * element;
  append.token_stride = cache.token_stride * element;
  append.head_stride = cache.head_stride * element;
  append.rows = static_cast<const std::byte*>(rows.data);
  append.new_token_stride = rows.token_stride * element;
  append.new_head_stride = rows.head_stride * element;
  append.heads = cache.heads;
  append.row_bytes = cache.dim * element;
  return append;
}

CacheAppend store_rows(const MutableTensorView& to, const TensorView& from, int rows) {
  const MutableCacheView pages{to.data,       to.dtype, from.tokens / rows,     rows,
                               to.heads,      to.dim,   rows * to.token_stride, to.token_stride,
                               to.head_stride};
  CacheAppend append = append_to_cache(pages, from);
  append.by_row = true;
  return append;
}

namespace {

OutOfRangeEntry mask_out_of_range(const CacheUpdate& update, std::int64_t sequence) {
  for (int mask_row = 0; mask_row < update.mask_heads; ++mask_row) {
    const OutOfRangeEntry entry = mask_count_out_of_range(update, sequence, mask_row);
    if (entry.kind != OutOfRangeEntry::Kind::kNone) return entry;
    const std::int32_t count = update.block_mask.counts[sequence * update.mask_heads + mask_row];
    for (std::int64_t place = 0; place < count; ++place) {
      const OutOfRangeEntry bad = mask_block_out_of_order(update, sequence, mask_row, place);
      if (bad.kind != OutOfRangeEntry::Kind::kNone) return bad;
    }
  }
  return {};
}

}  // namespace

OutOfRangeEntry out_of_range_entry(const CacheUpdate& update, std::int64_t sequence) {
  const std::int32_t length = new_length(update, update.lengths[sequence]);
  const OutOfRangeEntry of_length = length_out_of_range(update, length);
  const OutOfRangeEntry entry =
      of_length.kind != OutOfRangeEntry::Kind::kNone ? of_length : mask_out_of_range(update, sequence);
  if (entry.kind != OutOfRangeEntry::Kind::kNone || update.block_table.pages == nullptr) return entry;
  const std::int64_t pages = pages_of_length(update, length);
  for (std::int64_t place = 0; place < pages; ++place) {
    const OutOfRangeEntry bad = page_out_of_range(update, sequence, place);
    if (bad.kind != OutOfRangeEntry::Kind::kNone) return bad;
  }
  const OutOfRangeEntry of_prefix = prefix_out_of_range(update, sequence, length);
  if (of_prefix.kind != OutOfRangeEntry::Kind::kNone) return of_prefix;
  std::int64_t first = 0;
  const std::int64_t shared = prefix_pages(update, sequence);
  if (shared > 0) {
    while (update.prefixes.of_sequence[first] != update.prefixes.of_sequence[sequence]) ++first;
  }
  for (std::int64_t place = 0; place < shared; ++place) {
    const OutOfRangeEntry bad = prefix_page_mismatch(update, sequence, first, place);
    if (bad.kind != OutOfRangeEntry::Kind::kNone) return bad;
  }
  return {};
}

void refuse_out_of_range(const CacheUpdate& update, ErrorCode code) {
  for (std::int64_t s = 0; s < update.sequences; ++s) {
    const OutOfRangeEntry entry = out_of_range_entry(update, s);
    if (entry.kind != OutOfRangeEntry::Kind::kNone) refuse(s, entry, code);
  }
}

void refuse_out_of_range(const OutOfRangeEntry* entries, std::int64_t sequences, ErrorCode code) {
  for (std::int64_t s = 0; s < sequences; ++s) {
    if (entries[s].kind != OutOfRangeEntry::Kind::kNone) refuse(s, entries[s], code);
  }
}

namespace {

// Calls with(from, to) for each head of a token's new rows.
template <class With>
void for_heads(const CacheAppend& append, std::int64_t row, const PageSlot& slot, const With& with) {
  if (slot.page < 0) return;
  std::byte* const to = append.cache + slot.page * append.page_stride + slot.token * append.token_stride;
  const std::byte* const from = append.rows + row * append.new_token_stride;
  for (std::int64_t head = 0; head < append.heads; ++head) {
    with(from + head * append.new_head_stride, to + head * append.head_stride);
  }
}

// Writes the new rows of sequence s.
void write_new_rows(const CacheUpdate& update, std::int64_t s, std::int64_t length,
                    std::optional<TokenRotation>& rotation) {
  if (update.append_count == 0 && !rotation) return;
  for (int i = 0; i < update.rows; ++i) {
    const std::int64_t position = length - update.rows + i;
    const std::int64_t row = s * update.rows + i;
    const PageSlot slot = page_slot_of(update, s, position);
    for (int n = 0; n < update.append_count; ++n) {
      const CacheAppend& append = update.appends[n];
      for_heads(append, row, slot, [&](const std::byte* from, std::byte* to) {
        std::memcpy(to, from, static_cast<std::size_t>(append.row_bytes));
      });
    }
    if (!rotation) continue;
    rotation->move_to(position);
    for (int n = 0; n < update.rotated_count; ++n) {
      const CacheAppend& append = update.rotated[n];
      for_heads(append, row, append.by_row ? PageSlot{s, i} : slot,
                [&](const std::byte* from, std::byte* to) { rotation->rotate(from, to); });
    }
  }
}

}  // namespace

void update_host_cache(const CacheUpdate& update) {
  std::optional<TokenRotation> rotation;
  if (update.rotated_count > 0) rotation.emplace(update.rotation);
  for (std::int64_t s = 0; s < update.sequences; ++s) {
    const OutOfRangeEntry entry = update.checked != nullptr ? out_of_range_entry(update, s) : OutOfRangeEntry{};
    const std::int32_t length = new_length(update, update.lengths[s]);
    if (update.new_lengths != nullptr) update.new_lengths[s] = length;
    const bool good = entry.kind == OutOfRangeEntry::Kind::kNone;
    if (update.checked != nullptr) {
      update.checked[s] = good ? length : 0;
      if (!good && update.out_of_range[s].kind == OutOfRangeEntry::Kind::kNone) update.out_of_range[s] = entry;
    }
    if (!good) continue;
    write_new_rows(update, s, length, rotation);
  }
}

}  // namespace ringattn
