// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/divider.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/decode/cuda/cache_update.hpp"
#include "kernels/rope/cuda/cuda_rope.hpp"
#include "kernels/rope/cuda/rotation.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kCacheUpdateThreads = 512;
constexpr int kNoEntry = 0x7fffffff;

// Returns the first of 0 … count − 1 for which `holds`, or kNoEntry. Called by all threads of the block.
template <class Holds>
__device__ int first_that(std::int64_t count, int* shared, Holds holds) {
  __syncthreads();  // all threads have read the previous result
  if (threadIdx.x == 0) *shared = kNoEntry;
  __syncthreads();
  int first = kNoEntry;
  // A long sequence has many pages, and each thread reads several at a time.
#pragma unroll 8
  for (int entry = static_cast<int>(threadIdx.x); entry < count; entry += kCacheUpdateThreads) {
    if (holds(entry) && entry < first) first = entry;
  }
  if (first != kNoEntry) atomicMin(shared, first);
  __syncthreads();
  return *shared;
}

// Finds the out-of-range entry in the block table of a sequence whose length is valid. Called by all threads of the
// block.
__device__ OutOfRangeEntry page_out_of_range(const CacheUpdate& p, std::int64_t sequence, std::int64_t length,
                                             int* shared) {
  const std::int32_t* const entries = p.block_table.pages + sequence * p.block_table.stride;
  const int bad = first_that(pages_of_length(p, length), shared, [&](int entry) {
    const std::int32_t page = __ldcg(entries + entry);
    return page < 0 || page >= p.pages;
  });
  if (bad != kNoEntry) return {OutOfRangeEntry::Kind::kPage, bad, __ldcg(entries + bad), p.pages};
  const OutOfRangeEntry out_of_range = prefix_out_of_range(p, sequence, length);
  if (out_of_range.kind != OutOfRangeEntry::Kind::kNone) return out_of_range;
  const std::int64_t in_common = prefix_pages(p, sequence);
  if (in_common == 0) return {};
  const std::int32_t prefix = p.prefixes.of_sequence[sequence];
  const int first =
      first_that(sequence + 1, shared, [&](int other) { return p.prefixes.of_sequence[other] == prefix; });
  const std::int32_t* const others = p.block_table.pages + first * p.block_table.stride;
  const int differs = first_that(in_common, shared, [&](int entry) { return entries[entry] != others[entry]; });
  return differs == kNoEntry ? OutOfRangeEntry{} : prefix_page_mismatch(p, sequence, first, differs);
}

// Finds the out-of-range entry in a sequence's block mask. Called by all threads of the block.
__device__ OutOfRangeEntry mask_out_of_range(const CacheUpdate& p, std::int64_t sequence, int* shared) {
  for (int mask_row = 0; mask_row < p.mask_heads; ++mask_row) {
    const OutOfRangeEntry out_of_range = mask_count_out_of_range(p, sequence, mask_row);
    if (out_of_range.kind != OutOfRangeEntry::Kind::kNone) return out_of_range;
    const std::int32_t count = p.block_mask.counts[sequence * p.mask_heads + mask_row];
    const int bad = first_that(count, shared, [&](int entry) {
      return mask_block_out_of_order(p, sequence, mask_row, entry).kind != OutOfRangeEntry::Kind::kNone;
    });
    if (bad != kNoEntry) return mask_block_out_of_order(p, sequence, mask_row, bad);
  }
  return {};
}

// An update, and the divisors that its thread blocks use.
struct CacheUpdateParams {
  CacheUpdate update;
  Divider by_split, by_stride, by_page;
};

// page_slot_of() in 32-bit arithmetic.
__device__ PageSlot slot_of(const CacheUpdateParams& p, std::int64_t sequence, std::int32_t position) {
  const CacheUpdate& u = p.update;
  if (position < 0) return {};
  const std::int32_t split = p.by_split.quotient(position);
  const std::int32_t local_split = p.by_stride.quotient(split);
  if (split - local_split * u.partition.stride != u.partition.first) return {};
  const auto kv_split_keys = static_cast<std::int32_t>(u.kv_split_keys),
             page_size = static_cast<std::int32_t>(u.page_size);
  const std::int32_t token = position - (split - local_split) * kv_split_keys;
  const std::int32_t entry = p.by_page.quotient(token);
  if (u.block_table.pages == nullptr) return entry == 0 && sequence < u.pages ? PageSlot{sequence, token} : PageSlot{};
  if (entry >= u.table_pages) return {};
  const std::int32_t page = __ldcg(u.block_table.pages + sequence * u.block_table.stride + entry);
  return page >= 0 && page < u.pages ? PageSlot{page, token - entry * page_size} : PageSlot{};
}

// pages_of_length() in 32-bit arithmetic. `length` is not negative.
__device__ std::int32_t pages_of(const CacheUpdateParams& p, std::int32_t length) {
  const KvPartition& partition = p.update.partition;
  const auto kv_split_keys = static_cast<std::int32_t>(p.update.kv_split_keys);
  const std::int32_t whole = p.by_split.quotient(length);
  const std::int32_t full = whole <= partition.first ? 0 : p.by_stride.quotient(whole - partition.first - 1) + 1;
  const bool partial_split = whole - p.by_stride.quotient(whole) * partition.stride == partition.first;
  const std::int32_t keys = full * kv_split_keys + (partial_split ? length - whole * kv_split_keys : 0);
  return keys == 0 ? 0 : p.by_page.quotient(keys - 1) + 1;
}

// A vector of a new row: its source, and its offset from its token's address in the cache.
template <class Vector>
struct NewVector {
  const Vector* from = nullptr;  // null: there is none
  int part = 0, row = 0;
  std::int64_t offset = 0;
};

// Vector `at` of a sequence's new rows, with the rows of all appends one after another.
template <class Vector>
__device__ NewVector<Vector> vector_of(const CacheUpdate& u, std::int64_t sequence, int at) {
#pragma unroll 1
  for (int n = 0; n < u.append_count; ++n) {
    const CacheAppend& part = u.appends[n];
    const auto vectors = static_cast<unsigned>(part.row_bytes) / static_cast<unsigned>(sizeof(Vector));
    const unsigned of_row = static_cast<unsigned>(part.heads) * vectors;
    const unsigned of_part = static_cast<unsigned>(u.rows) * of_row;
    if (static_cast<unsigned>(at) >= of_part) {
      at -= static_cast<int>(of_part);
      continue;
    }
    const unsigned row = static_cast<unsigned>(at) / of_row, in_row = static_cast<unsigned>(at) - row * of_row;
    const unsigned head = in_row / vectors, vector = in_row - head * vectors;
    const std::byte* const from =
        part.rows + (sequence * u.rows + row) * part.new_token_stride + head * part.new_head_stride;
    return {reinterpret_cast<const Vector*>(from) + vector, n, static_cast<int>(row),
            head * part.head_stride + static_cast<std::int64_t>(vector * sizeof(Vector))};
  }
  return {};
}

// Runs all checks of a sequence. Called by all threads of the block.
__device__ __noinline__ OutOfRangeEntry sequence_out_of_range(const CacheUpdate& u, std::int64_t sequence,
                                                              std::int64_t length, int* shared) {
  OutOfRangeEntry out_of_range = length_out_of_range(u, length);
  if (out_of_range.kind == OutOfRangeEntry::Kind::kNone) out_of_range = mask_out_of_range(u, sequence, shared);
  if (out_of_range.kind == OutOfRangeEntry::Kind::kNone && u.block_table.pages != nullptr) {
    out_of_range = page_out_of_range(u, sequence, length, shared);
  }
  return out_of_range;
}

// A unit of a sequence's rotated rows.
template <class Element, bool kAligned, RopePairs kPairs>
class RotatedUnit {
 public:
  // Loads unit `at`, with the rows of all rotated appends one after another. False: there is none.
  __device__ __forceinline__ bool load(const CacheUpdate& u, std::int64_t sequence, int at) {
    const RowRotation& by = u.rotation;
    const auto turned = static_cast<unsigned>(by.pairs / Unit::kUnitPairs);
    const unsigned units = turned + static_cast<unsigned>((by.head_dim - 2 * by.pairs) / Unit::kCount);
    auto rest = static_cast<unsigned>(at);
#pragma unroll 1
    for (part_ = 0; part_ < u.rotated_count; ++part_) {
      const CacheAppend& part = u.rotated[part_];
      const unsigned of_row = static_cast<unsigned>(part.heads) * units;
      const unsigned of_part = static_cast<unsigned>(u.rows) * of_row;
      if (rest >= of_part) {
        rest -= of_part;
        continue;
      }
      row_ = static_cast<int>(rest / of_row);
      rest -= static_cast<unsigned>(row_) * of_row;
      head_ = static_cast<int>(rest / units);
      const std::byte* const from =
          part.rows + (sequence * u.rows + row_) * part.new_token_stride + head_ * part.new_head_stride;
      unit_.load(reinterpret_cast<const Element*>(from), static_cast<int>(rest) - head_ * static_cast<int>(units),
                 static_cast<int>(turned), by.pairs);
      return true;
    }
    return false;
  }

  // cos, sin: [rows, pairs]
  __device__ __forceinline__ void rotate_and_store(const CacheUpdateParams& p, std::int64_t sequence,
                                                   std::int32_t length, const float* cos, const float* sin) {
    const CacheUpdate& u = p.update;
    const CacheAppend& part = u.rotated[part_];
    PageSlot slot{sequence, row_};
    if (!part.by_row) slot = length < 0 ? PageSlot{} : slot_of(p, sequence, length - u.rows + row_);
    if (slot.page < 0) return;
    std::byte* const to =
        part.cache + slot.page * part.page_stride + slot.token * part.token_stride + head_ * part.head_stride;
    const int pairs = u.rotation.pairs;
    unit_.rotate_and_store(reinterpret_cast<Element*>(to), pairs, cos + row_ * pairs, sin + row_ * pairs);
  }

 private:
  using Unit = RowUnit<Element, kAligned, kPairs>;

  Unit unit_;
  int part_ = 0, row_ = 0, head_ = 0;
};

// Rotates a sequence's rows by vectors of 16 bytes if `kAligned`. `checked`: called once by all threads, after their
// first loads and after cos and sin have been written to `angles`; a barrier. False: the sequence is out of range.
template <class Element, bool kAligned, RopePairs kPairs, class Checked>
__device__ __forceinline__ void rotate_new_rows(const CacheUpdateParams& p, std::int64_t sequence, std::int32_t length,
                                                float* angles, const Checked& checked) {
  const CacheUpdate& u = p.update;
  const RowRotation& by = u.rotation;
  RotatedUnit<Element, kAligned, kPairs> unit;
  auto at = static_cast<int>(threadIdx.x);
  bool has = unit.load(u, sequence, at);
  float* const sin = angles + u.rows * by.pairs;
  for (int i = static_cast<int>(threadIdx.x); i < u.rows * by.pairs; i += kCacheUpdateThreads) {
    const int row = i / by.pairs;
    const SinCos value = sin_cos_of(by, std::int64_t{length} - u.rows + row, i - row * by.pairs);
    angles[i] = value.cos;
    sin[i] = value.sin;
  }
  if (!checked()) return;
  for (; has; has = unit.load(u, sequence, at += kCacheUpdateThreads)) {
    unit.rotate_and_store(p, sequence, length, angles, sin);
  }
}

// One thread block per sequence. Most sequences are valid, so a cheap test for suspects runs first, while the new rows
// are loaded and their page slots are computed. All loads on the critical path are issued early, because a decode step
// waits for this kernel (bench/notes/decoding.md, "A step with its update").
//
// Rotated: void, or the element of the rotated rows, whose vectors are then as long as `Vector`.
template <class Vector, class Rotated>
__global__ void __launch_bounds__(kCacheUpdateThreads, std::is_void_v<Rotated> ? 2 : 1)
    update_kernel(const __grid_constant__ CacheUpdateParams p) {
  __shared__ int found;
  extern __shared__ float angles[];  // cos [rows, pairs], sin [rows, pairs]
  const CacheUpdate& u = p.update;
  const std::int64_t sequence = blockIdx.x;
  const NewVector<Vector> first = vector_of<Vector>(u, sequence, static_cast<int>(threadIdx.x));
  pdl_launch_dependents();
  pdl_wait();
  const std::int32_t length = new_length(u, __ldcg(u.lengths + sequence));
  Vector value{};
  if (first.from != nullptr) value = __ldcg(first.from);
  const auto slot_of_vector = [&](const NewVector<Vector>& vector) {
    return length < 0 ? PageSlot{} : slot_of(p, sequence, length - u.rows + vector.row);
  };
  const PageSlot slot = first.from == nullptr ? PageSlot{} : slot_of_vector(first);
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
        for (int i = static_cast<int>(threadIdx.x); i < pages; i += kCacheUpdateThreads) {
          const std::int32_t page = __ldcg(entries + i);
          suspect = suspect || page < 0 || page >= u.pages;
        }
      }
    }
  }
  // Returns false if the sequence is out of range.
  const auto check = [&] {
    const bool any = __syncthreads_or(suspect) != 0;  // a barrier, too: all threads have read the length
    if (u.new_lengths != nullptr && threadIdx.x == 0) u.new_lengths[sequence] = length;
    if (u.checked == nullptr) return true;
    const OutOfRangeEntry out_of_range = any ? sequence_out_of_range(u, sequence, length, &found) : OutOfRangeEntry{};
    const bool good = out_of_range.kind == OutOfRangeEntry::Kind::kNone;
    if (threadIdx.x == 0) {
      u.checked[sequence] = good ? length : 0;
      if (!good && u.out_of_range[sequence].kind == OutOfRangeEntry::Kind::kNone)
        u.out_of_range[sequence] = out_of_range;
    }
    return good;
  };
  const auto put = [&](const NewVector<Vector>& vector, const PageSlot& at, const Vector& what) {
    if (at.page < 0) return;
    const CacheAppend& part = u.appends[vector.part];
    std::byte* const to = part.cache + at.page * part.page_stride + at.token * part.token_stride + vector.offset;
    *reinterpret_cast<Vector*>(to) = what;
  };
  const auto put_all = [&] {
    if (first.from == nullptr) return;
    put(first, slot, value);
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) + kCacheUpdateThreads;; at += kCacheUpdateThreads) {
      const NewVector<Vector> vector = vector_of<Vector>(u, sequence, at);
      if (vector.from == nullptr) return;
      put(vector, slot_of_vector(vector), __ldcg(vector.from));
    }
  };
  if constexpr (std::is_void_v<Rotated>) {
    if (check()) put_all();
  } else {
    const auto check_and_put = [&] {
      if (!check()) return false;
      put_all();
      return true;
    };
    constexpr bool kAligned = sizeof(Vector) == sizeof(uint4);
    if (u.rotation.layout == RopePairs::kInterleaved) {
      rotate_new_rows<Rotated, kAligned, RopePairs::kInterleaved>(p, sequence, length, angles, check_and_put);
    } else {
      rotate_new_rows<Rotated, kAligned, RopePairs::kHalfSplit>(p, sequence, length, angles, check_and_put);
    }
  }
}

// Returns true if all addresses, strides and row sizes of these appends are multiples of `bytes`.
bool fits(std::span<const CacheAppend> appends, std::int64_t bytes) {
  for (const CacheAppend& part : appends) {
    for (const std::int64_t number :
         {static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.cache)),
          static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.rows)), part.page_stride, part.token_stride,
          part.head_stride, part.new_token_stride, part.new_head_stride, part.row_bytes}) {
      if (number % bytes != 0) return false;
    }
  }
  return true;
}
std::span<const CacheAppend> appends_of(const CacheUpdate& update) {
  return std::span(update.appends, static_cast<std::size_t>(update.append_count));
}

// Divider for positions, which are below 2^31. An update that neither writes nor checks has no pages.
Divider divider(std::int64_t by) { return Divider(std::clamp<std::int64_t>(by, 1, std::int64_t{1} << 31)); }

template <class Vector, class Rotated>
void launch_cache_update(const CacheUpdate& update, Stream stream) {
  const CacheUpdateParams params{update, divider(update.kv_split_keys), divider(update.partition.stride),
                                 divider(update.page_size)};
  constexpr bool kRotates = !std::is_void_v<Rotated>;
  const int angles = kRotates ? 2 * static_cast<int>(sizeof(float)) * update.rows * update.rotation.pairs : 0;
  PdlLaunch launch(static_cast<int>(update.sequences), kCacheUpdateThreads, angles, stream);
  const auto kernel = update_kernel<Vector, Rotated>;
  launch.serialize_unless_pdl(reinterpret_cast<const void*>(kernel));
  // The mask and the prefixes are read through L1, which may hold stale data if the launch starts early, so PDL is off.
  // Rotated rows may go where the step before this one has read its rows: the kernel that reads them starts while this
  // one runs, and must not meet that step.
  if (update.mask_heads > 0 || update.prefixes.count > 0 || kRotates) launch.config.numAttrs = 0;
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, params), "update_cache");
}

template <class Element>
void launch_rotating(const CacheUpdate& update, Stream stream) {
  using Word = std::conditional_t<sizeof(Element) == 4, std::uint32_t, std::uint16_t>;
  const RowRotation& by = update.rotation;
  const RopeUnit unit = rope_unit(by.dtype, by.layout, RopeVectors::kOne);
  const auto rotated = std::span(update.rotated, static_cast<std::size_t>(update.rotated_count));
  if (by.pairs % unit.pairs == 0 && (by.head_dim - 2 * by.pairs) % unit.elements == 0 &&
      fits(appends_of(update), sizeof(uint4)) && fits(rotated, sizeof(uint4))) {
    launch_cache_update<uint4, Element>(update, stream);
  } else {
    launch_cache_update<Word, Element>(update, stream);
  }
}

template <class With>
void with_element(Dtype dtype, const With& with) {
  switch (dtype) {
    case Dtype::kF32:
      return with(float{});
    case Dtype::kBf16:
      return with(__nv_bfloat16{});
    case Dtype::kF16:
      return with(__half{});
  }
}

template <class Element>
void load_rotating() {
  using Word = std::conditional_t<sizeof(Element) == 4, std::uint32_t, std::uint16_t>;
  load_kernel(update_kernel<uint4, Element>);
  load_kernel(update_kernel<Word, Element>);
}

}  // namespace

void update_cache(const CacheUpdate& update, Stream stream) {
  if (update.sequences == 0) {
    load_kernel(update_kernel<uint4, void>);
    load_kernel(update_kernel<std::uint32_t, void>);
    load_kernel(update_kernel<std::uint8_t, void>);
    if (update.rotation.pairs > 0)
      with_element(update.rotation.dtype, [](auto element) { load_rotating<decltype(element)>(); });
    return;
  }
  if (update.rotated_count > 0) {
    with_element(update.rotation.dtype, [&](auto element) { launch_rotating<decltype(element)>(update, stream); });
    return;
  }
  if (fits(appends_of(update), sizeof(uint4))) {
    launch_cache_update<uint4, void>(update, stream);
  } else if (fits(appends_of(update), sizeof(std::uint32_t))) {
    launch_cache_update<std::uint32_t, void>(update, stream);
  } else {
    launch_cache_update<std::uint8_t, void>(update, stream);
  }
}

}  // namespace ringattn::cuda
