// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/cuda/device/cache_update.hpp"
#include "kernels/cuda/device/pdl.cuh"
#include "kernels/cuda/device/pdl_launch.hpp"
#include "kernels/cuda/divider.hpp"
#include "kernels/cuda/load_kernel.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kNoEntry = 0x7fffffff;

// The first of `count` numbers for which `holds`, or kNoEntry. Called by all threads of the block.
template <class Holds>
__device__ int first_that(std::int64_t count, int* shared, Holds holds) {
  __syncthreads();  // everybody has read what was found before
  if (threadIdx.x == 0) *shared = kNoEntry;
  __syncthreads();
  int first = kNoEntry;
  // A long sequence has many pages, and each thread reads several at a time.
#pragma unroll 8
  for (int place = static_cast<int>(threadIdx.x); place < count; place += kThreads) {
    if (holds(place) && place < first) first = place;
  }
  if (first != kNoEntry) atomicMin(shared, first);
  __syncthreads();
  return *shared;
}

// What is wrong with a sequence whose length is not. Called by all threads of the block.
__device__ OutOfRangeEntry pages_fault(const CacheUpdate& p, std::int64_t sequence, std::int64_t length, int* shared) {
  const std::int32_t* const entries = p.block_table.pages + sequence * p.block_table.stride;
  const int bad = first_that(pages_of_length(p, length), shared, [&](int place) {
    const std::int32_t page = __ldcg(entries + place);
    return page < 0 || page >= p.pages;
  });
  if (bad != kNoEntry) return {OutOfRangeEntry::Kind::kPage, bad, __ldcg(entries + bad), p.pages};
  const OutOfRangeEntry fault = prefix_out_of_range(p, sequence, length);
  if (fault.kind != OutOfRangeEntry::Kind::kNone) return fault;
  const std::int64_t in_common = prefix_pages(p, sequence);
  if (in_common == 0) return {};
  const std::int32_t prefix = p.prefixes.of_sequence[sequence];
  const int first =
      first_that(sequence + 1, shared, [&](int other) { return p.prefixes.of_sequence[other] == prefix; });
  const std::int32_t* const others = p.block_table.pages + first * p.block_table.stride;
  const int differs = first_that(in_common, shared, [&](int place) { return entries[place] != others[place]; });
  return differs == kNoEntry ? OutOfRangeEntry{} : prefix_page_mismatch(p, sequence, first, differs);
}

// What is wrong with a sequence's lists. Called by all threads of the block.
__device__ OutOfRangeEntry mask_out_of_range(const CacheUpdate& p, std::int64_t sequence, int* shared) {
  for (int list = 0; list < p.mask_heads; ++list) {
    const OutOfRangeEntry fault = mask_count_out_of_range(p, sequence, list);
    if (fault.kind != OutOfRangeEntry::Kind::kNone) return fault;
    const std::int32_t count = p.block_mask.counts[sequence * p.mask_heads + list];
    const int bad = first_that(count, shared, [&](int place) {
      return mask_block_out_of_order(p, sequence, list, place).kind != OutOfRangeEntry::Kind::kNone;
    });
    if (bad != kNoEntry) return mask_block_out_of_order(p, sequence, list, bad);
  }
  return {};
}

// An update, and what its blocks divide by.
struct UpdateParams {
  CacheUpdate update;
  Divider by_group, by_every, by_page;
};

// As page_slot_of(), by numbers of 32 bits.
__device__ PageSlot place_of(const UpdateParams& p, std::int64_t sequence, std::int32_t position) {
  const CacheUpdate& u = p.update;
  if (position < 0) return {};
  const std::int32_t group = p.by_group.quotient(position);
  const std::int32_t of_partition = p.by_every.quotient(group);
  if (group - of_partition * u.partition.stride != u.partition.first) return {};
  const auto kv_split_keys = static_cast<std::int32_t>(u.kv_split_keys),
             page_size = static_cast<std::int32_t>(u.page_size);
  const std::int32_t token = position - (group - of_partition) * kv_split_keys;
  const std::int32_t entry = p.by_page.quotient(token);
  if (u.block_table.pages == nullptr) return entry == 0 && sequence < u.pages ? PageSlot{sequence, token} : PageSlot{};
  if (entry >= u.table_pages) return {};
  const std::int32_t page = __ldcg(u.block_table.pages + sequence * u.block_table.stride + entry);
  return page >= 0 && page < u.pages ? PageSlot{page, token - entry * page_size} : PageSlot{};
}

// As pages_of_length(), by numbers of 32 bits; `length` is not negative.
__device__ std::int32_t pages_of(const UpdateParams& p, std::int32_t length) {
  const KvPartition& partition = p.update.partition;
  const auto kv_split_keys = static_cast<std::int32_t>(p.update.kv_split_keys);
  const std::int32_t whole = p.by_group.quotient(length);
  const std::int32_t full = whole <= partition.first ? 0 : p.by_every.quotient(whole - partition.first - 1) + 1;
  const bool open = whole - p.by_every.quotient(whole) * partition.stride == partition.first;
  const std::int32_t keys = full * kv_split_keys + (open ? length - whole * kv_split_keys : 0);
  return keys == 0 ? 0 : p.by_page.quotient(keys - 1) + 1;
}

// A piece of a new row: where it comes from, and how far behind its token's place it goes.
template <class Piece>
struct NewPiece {
  const Piece* from = nullptr;  // null: there is none
  int part = 0, row = 0;
  std::int64_t behind = 0;
};

// Piece `at` of a sequence's new rows, those of all parts one behind the other.
template <class Piece>
__device__ NewPiece<Piece> piece_of(const CacheUpdate& u, std::int64_t sequence, int at) {
#pragma unroll 1
  for (int n = 0; n < u.append_count; ++n) {
    const CacheAppend& part = u.appends[n];
    const auto pieces = static_cast<unsigned>(part.row_bytes) / static_cast<unsigned>(sizeof(Piece));
    const unsigned of_row = static_cast<unsigned>(part.heads) * pieces;
    const unsigned of_part = static_cast<unsigned>(u.rows) * of_row;
    if (static_cast<unsigned>(at) >= of_part) {
      at -= static_cast<int>(of_part);
      continue;
    }
    const unsigned row = static_cast<unsigned>(at) / of_row, in_row = static_cast<unsigned>(at) - row * of_row;
    const unsigned head = in_row / pieces, piece = in_row - head * pieces;
    const std::byte* const from =
        part.rows + (sequence * u.rows + row) * part.new_token_stride + head * part.new_head_stride;
    return {reinterpret_cast<const Piece*>(from) + piece, n, static_cast<int>(row),
            head * part.head_stride + static_cast<std::int64_t>(piece * sizeof(Piece))};
  }
  return {};
}

// What is wrong with a sequence, by everything that is asked. Called by all threads of the block.
__device__ __noinline__ OutOfRangeEntry out_of_range_of_sequence(const CacheUpdate& u, std::int64_t sequence,
                                                                 std::int64_t length, int* shared) {
  OutOfRangeEntry fault = length_out_of_range(u, length);
  if (fault.kind == OutOfRangeEntry::Kind::kNone) fault = mask_out_of_range(u, sequence, shared);
  if (fault.kind == OutOfRangeEntry::Kind::kNone && u.block_table.pages != nullptr) {
    fault = pages_fault(u, sequence, length, shared);
  }
  return fault;
}

// A block has one sequence. Most have no fault, so it looks for signs of one first, while the new rows come and their
// places are found. All reads that others wait for go out as early as they can: a step waits for this kernel
// (bench/notes/decoding.md, "A step with its update").
template <class Piece>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  __shared__ int found;
  const CacheUpdate& u = p.update;
  const std::int64_t sequence = blockIdx.x;
  const NewPiece<Piece> first = piece_of<Piece>(u, sequence, static_cast<int>(threadIdx.x));
  pdl_launch_dependents();
  pdl_wait();
  const std::int32_t length = new_length(u, __ldcg(u.lengths + sequence));
  Piece value{};
  if (first.from != nullptr) value = __ldcg(first.from);
  const auto place_of_piece = [&](const NewPiece<Piece>& piece) {
    return length < 0 ? PageSlot{} : place_of(p, sequence, length - u.rows + piece.row);
  };
  const PageSlot place = first.from == nullptr ? PageSlot{} : place_of_piece(first);
  bool suspect = false;
  if (u.checked != nullptr) {
    suspect = u.mask_heads > 0 || u.prefixes.count > 0 || length < (u.new_lengths != nullptr ? u.rows : 0) ||
              length > u.max_keys;
    if (!suspect) {
      const std::int32_t pages = pages_of(p, length);
      const bool paged = u.block_table.pages != nullptr;
      suspect = pages > (paged ? u.table_pages : 1);
      const std::int32_t* const entries = u.block_table.pages + sequence * u.block_table.stride;
      if (paged && !suspect) {
#pragma unroll 4
        for (int i = static_cast<int>(threadIdx.x); i < pages; i += kThreads) {
          const std::int32_t page = __ldcg(entries + i);
          suspect = suspect || page < 0 || page >= u.pages;
        }
      }
    }
  }
  const bool any = __syncthreads_or(suspect) != 0;  // and everybody has read the length
  if (u.new_lengths != nullptr && threadIdx.x == 0) u.new_lengths[sequence] = length;
  if (u.checked != nullptr) {
    const OutOfRangeEntry fault = any ? out_of_range_of_sequence(u, sequence, length, &found) : OutOfRangeEntry{};
    const bool good = fault.kind == OutOfRangeEntry::Kind::kNone;
    if (threadIdx.x == 0) {
      u.checked[sequence] = good ? length : 0;
      if (!good && u.out_of_range[sequence].kind == OutOfRangeEntry::Kind::kNone) u.out_of_range[sequence] = fault;
    }
    if (!good) return;
  }
  const auto put = [&](const NewPiece<Piece>& piece, const PageSlot& at, const Piece& what) {
    if (at.page < 0) return;
    const CacheAppend& part = u.appends[piece.part];
    std::byte* const to = part.cache + at.page * part.page_stride + at.token * part.token_stride + piece.behind;
    *reinterpret_cast<Piece*>(to) = what;
  };
  if (first.from == nullptr) return;
  put(first, place, value);
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) + kThreads;; at += kThreads) {
    const NewPiece<Piece> piece = piece_of<Piece>(u, sequence, at);
    if (piece.from == nullptr) return;
    put(piece, place_of_piece(piece), __ldcg(piece.from));
  }
}

// Whether pieces of so many bytes make up everything that is copied.
bool fits(const CacheUpdate& update, std::int64_t bytes) {
  for (int n = 0; n < update.append_count; ++n) {
    const CacheAppend& part = update.appends[n];
    for (const std::int64_t number :
         {static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.cache)),
          static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.rows)), part.page_stride, part.token_stride,
          part.head_stride, part.new_token_stride, part.new_head_stride, part.row_bytes}) {
      if (number % bytes != 0) return false;
    }
  }
  return true;
}

// Of positions, none of which reaches 2^31. An update that writes and checks nothing has no pages.
Divider divider(std::int64_t by) { return Divider(std::clamp<std::int64_t>(by, 1, std::int64_t{1} << 31)); }

template <class Piece>
void launch(const CacheUpdate& update, Stream stream) {
  const UpdateParams params{update, divider(update.kv_split_keys), divider(update.partition.stride),
                            divider(update.page_size)};
  PdlLaunch launch(static_cast<int>(update.sequences), kThreads, 0, stream);
  launch.serialize_unless_pdl(reinterpret_cast<const void*>(update_kernel<Piece>));
  // These are read from the multiprocessor's own cache, where a launch that comes early may find what was there before.
  if (update.mask_heads > 0 || update.prefixes.count > 0) launch.config.numAttrs = 0;
  check_cuda(cudaLaunchKernelEx(&launch.config, update_kernel<Piece>, params), "update_cache");
}

}  // namespace

void update_cache(const CacheUpdate& update, Stream stream) {
  if (update.sequences == 0) {
    load_kernel(update_kernel<uint4>);
    load_kernel(update_kernel<std::uint32_t>);
    load_kernel(update_kernel<std::uint8_t>);
    return;
  }
  if (fits(update, sizeof(uint4))) {
    launch<uint4>(update, stream);
  } else if (fits(update, sizeof(std::uint32_t))) {
    launch<std::uint32_t>(update, stream);
  } else {
    launch<std::uint8_t>(update, stream);
  }
}

}  // namespace ringattn::cuda
