// SPDX-License-Identifier: Apache-2.0
#include "kernels/cache_update.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string>

namespace ringattn {

namespace {

[[noreturn]] void refuse(std::int64_t sequence, const CacheFault& fault, ErrorCode code) {
  switch (fault.kind) {
    case CacheFault::Kind::kLength:
      fail(code, fmt::format("sequence {} has {} keys", sequence, fault.value),
           fault.value < 0 ? "a length is not negative"
                           : fmt::format("the most that a step may have are {}", fault.limit),
           "Check the lengths, or prepare for longer sequences.");
    case CacheFault::Kind::kReach:
      fail(code, fmt::format("sequence {} has {} keys in this cache", sequence, fault.value),
           fmt::format("its block table reaches {} tokens", fault.limit), "Give it more pages.");
    case CacheFault::Kind::kCapacity:
      fail(code, fmt::format("sequence {} has {} keys in this cache", sequence, fault.value),
           fmt::format("the cache has room for {} tokens of a sequence", fault.limit),
           "Make the cache longer, or use pages.");
    case CacheFault::Kind::kPage:
      fail(code,
           fmt::format("sequence {} has page {} at place {} of its block table", sequence, fault.value, fault.place),
           fmt::format("the pool has {} pages", fault.limit), "Check the block table.");
    case CacheFault::Kind::kPrefix:
      fail(code, fmt::format("sequence {} shares prefix {}", sequence, fault.value),
           fmt::format("the step has {}, and −1 says that it shares none", fault.limit), "Check the prefixes.");
    case CacheFault::Kind::kPrefixKeys:
      fail(code, fmt::format("sequence {} shares prefix {} of {} keys", sequence, fault.place, fault.value),
           fault.value < 0 ? "a length is not negative" : fmt::format("the sequence has {}", fault.limit),
           "Check the prefixes.");
    case CacheFault::Kind::kPrefixPage:
      fail(code,
           fmt::format("sequence {} has page {} at place {} of its block table", sequence, fault.value, fault.place),
           fmt::format("the first sequence with the same prefix has page {} there", fault.limit),
           "Let sequences share a prefix only where they share its pages.");
    case CacheFault::Kind::kListCount:
      fail(code, fmt::format("list {} of sequence {} has {} blocks", fault.list, sequence, fault.value),
           fmt::format("it has room for {}", fault.limit), "Check DecodeLists::counts.");
    case CacheFault::Kind::kListBlock:
      fail(code,
           fmt::format("list {} of sequence {} names block {} at place {}, behind {}", fault.list, sequence,
                       fault.value, fault.place, fault.limit),
           "lists ascend, and begin with 0 or more", "Sort each list, and name a block once.");
    case CacheFault::Kind::kNone:
      break;
  }
  fail(ErrorCode::kInternal, fmt::format("a fault of an unknown kind at sequence {}", sequence));
}

}  // namespace

CachePart cache_part(const MutableCacheView& cache, const TensorView& rows) {
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  CachePart part;
  part.cache = static_cast<std::byte*>(cache.data);
  part.page_stride = cache.page_stride * element;
  part.token_stride = cache.token_stride * element;
  part.head_stride = cache.head_stride * element;
  part.rows = static_cast<const std::byte*>(rows.data);
  part.new_token_stride = rows.token_stride * element;
  part.new_head_stride = rows.head_stride * element;
  part.heads = cache.heads;
  part.row_bytes = cache.dim * element;
  return part;
}

namespace {

CacheFault fault_of_lists(const CacheUpdate& update, std::int64_t sequence) {
  for (int list = 0; list < update.list_heads; ++list) {
    const CacheFault fault = list_fault(update, sequence, list);
    if (fault.kind != CacheFault::Kind::kNone) return fault;
    const std::int32_t count = update.lists.counts[sequence * update.list_heads + list];
    for (std::int64_t place = 0; place < count; ++place) {
      const CacheFault bad = listed_block_fault(update, sequence, list, place);
      if (bad.kind != CacheFault::Kind::kNone) return bad;
    }
  }
  return {};
}

}  // namespace

CacheFault fault_of(const CacheUpdate& update, std::int64_t sequence) {
  const std::int32_t length = grown_length(update, update.lengths[sequence]);
  const CacheFault of_length = length_fault(update, length);
  const CacheFault fault = of_length.kind != CacheFault::Kind::kNone ? of_length : fault_of_lists(update, sequence);
  if (fault.kind != CacheFault::Kind::kNone || update.block_table.pages == nullptr) return fault;
  const std::int64_t pages = pages_of_length(update, length);
  for (std::int64_t place = 0; place < pages; ++place) {
    const CacheFault bad = page_fault(update, sequence, place);
    if (bad.kind != CacheFault::Kind::kNone) return bad;
  }
  const CacheFault of_prefix = prefix_fault(update, sequence, length);
  if (of_prefix.kind != CacheFault::Kind::kNone) return of_prefix;
  std::int64_t first = 0;
  const std::int64_t shared = prefix_pages(update, sequence);
  if (shared > 0) {
    while (update.prefixes.of_sequence[first] != update.prefixes.of_sequence[sequence]) ++first;
  }
  for (std::int64_t place = 0; place < shared; ++place) {
    const CacheFault bad = prefix_page_fault(update, sequence, first, place);
    if (bad.kind != CacheFault::Kind::kNone) return bad;
  }
  return {};
}

void refuse_faults(const CacheUpdate& update, ErrorCode code) {
  for (std::int64_t s = 0; s < update.sequences; ++s) {
    const CacheFault fault = fault_of(update, s);
    if (fault.kind != CacheFault::Kind::kNone) refuse(s, fault, code);
  }
}

void refuse_faults(const CacheFault* faults, std::int64_t sequences, ErrorCode code) {
  for (std::int64_t s = 0; s < sequences; ++s) {
    if (faults[s].kind != CacheFault::Kind::kNone) refuse(s, faults[s], code);
  }
}

void update_host_cache(const CacheUpdate& update) {
  for (std::int64_t s = 0; s < update.sequences; ++s) {
    const CacheFault fault = update.checked != nullptr ? fault_of(update, s) : CacheFault{};
    const std::int32_t length = grown_length(update, update.lengths[s]);
    if (update.grown != nullptr) update.grown[s] = length;
    const bool good = fault.kind == CacheFault::Kind::kNone;
    if (update.checked != nullptr) {
      update.checked[s] = good ? length : 0;
      if (!good && update.faults[s].kind == CacheFault::Kind::kNone) update.faults[s] = fault;
    }
    if (!good) continue;
    for (int i = 0; update.part_count > 0 && i < update.rows; ++i) {
      const CachePlace place = place_of_row(update, s, std::int64_t{length} - update.rows + i);
      if (place.page < 0) continue;
      for (int p = 0; p < update.part_count; ++p) {
        const CachePart& part = update.parts[p];
        std::byte* const to = part.cache + place.page * part.page_stride + place.token * part.token_stride;
        const std::byte* const from = part.rows + (s * update.rows + i) * part.new_token_stride;
        for (std::int64_t head = 0; head < part.heads; ++head) {
          std::memcpy(to + head * part.head_stride, from + head * part.new_head_stride,
                      static_cast<std::size_t>(part.row_bytes));
        }
      }
    }
  }
}

}  // namespace ringattn
