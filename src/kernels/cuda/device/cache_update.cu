// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/cuda/device/cache_update.hpp"

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
__device__ CacheFault pages_fault(const CacheUpdate& p, std::int64_t sequence, std::int64_t length, int* shared) {
  const std::int32_t* const entries = p.block_table.pages + sequence * p.block_table.stride;
  const int bad = first_that(pages_of_length(p, length), shared, [&](int place) {
    const std::int32_t page = entries[place];
    return page < 0 || page >= p.pages;
  });
  if (bad != kNoEntry) return page_fault(p, sequence, bad);
  const CacheFault fault = prefix_fault(p, sequence, length);
  if (fault.kind != CacheFault::Kind::kNone) return fault;
  const std::int64_t in_common = prefix_pages(p, sequence);
  if (in_common == 0) return {};
  const std::int32_t prefix = p.prefixes.of_sequence[sequence];
  const int first =
      first_that(sequence + 1, shared, [&](int other) { return p.prefixes.of_sequence[other] == prefix; });
  const std::int32_t* const others = p.block_table.pages + first * p.block_table.stride;
  const int differs = first_that(in_common, shared, [&](int place) { return entries[place] != others[place]; });
  return differs == kNoEntry ? CacheFault{} : prefix_page_fault(p, sequence, first, differs);
}

// What is wrong with a sequence's lists. Called by all threads of the block.
__device__ CacheFault lists_fault(const CacheUpdate& p, std::int64_t sequence, int* shared) {
  for (int list = 0; list < p.list_heads; ++list) {
    const CacheFault fault = list_fault(p, sequence, list);
    if (fault.kind != CacheFault::Kind::kNone) return fault;
    const std::int32_t count = p.lists.counts[sequence * p.list_heads + list];
    const int bad = first_that(count, shared, [&](int place) {
      return listed_block_fault(p, sequence, list, place).kind != CacheFault::Kind::kNone;
    });
    if (bad != kNoEntry) return listed_block_fault(p, sequence, list, bad);
  }
  return {};
}

// Writes the new rows of a sequence, `Piece` by `Piece`, which divides addresses, strides and rows.
template <class Piece>
__device__ void write_rows(const CacheUpdate& p, std::int64_t sequence, std::int64_t length) {
  for (int n = 0; n < p.part_count; ++n) {
    const CachePart& part = p.parts[n];
    const std::int64_t pieces = part.row_bytes / static_cast<std::int64_t>(sizeof(Piece));
    const std::int64_t all = p.rows * part.heads * pieces;
    for (std::int64_t at = threadIdx.x; at < all; at += kThreads) {
      const std::int64_t piece = at % pieces;
      const std::int64_t head = at / pieces % part.heads;
      const std::int64_t row = at / pieces / part.heads;
      const CachePlace place = place_of_row(p, sequence, length - p.rows + row);
      if (place.page < 0) continue;
      std::byte* const to =
          part.cache + place.page * part.page_stride + place.token * part.token_stride + head * part.head_stride;
      const std::byte* const from =
          part.rows + (sequence * p.rows + row) * part.new_token_stride + head * part.new_head_stride;
      reinterpret_cast<Piece*>(to)[piece] = reinterpret_cast<const Piece*>(from)[piece];
    }
  }
}

// A block has one sequence.
template <class Piece>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ CacheUpdate p) {
  __shared__ int found;
  const std::int64_t sequence = blockIdx.x;
  const std::int32_t length = grown_length(p, p.lengths[sequence]);
  if (p.grow) {
    __syncthreads();  // everybody has read it
    if (threadIdx.x == 0) p.lengths[sequence] = length;
  }
  if (p.checked != nullptr) {
    CacheFault fault = length_fault(p, length);
    if (fault.kind == CacheFault::Kind::kNone) fault = lists_fault(p, sequence, &found);
    if (fault.kind == CacheFault::Kind::kNone && p.block_table.pages != nullptr) {
      fault = pages_fault(p, sequence, length, &found);
    }
    const bool good = fault.kind == CacheFault::Kind::kNone;
    if (threadIdx.x == 0) {
      p.checked[sequence] = good ? length : 0;
      if (!good && p.faults[sequence].kind == CacheFault::Kind::kNone) p.faults[sequence] = fault;
    }
    if (!good) return;
  }
  write_rows<Piece>(p, sequence, length);
}

// Whether pieces of so many bytes make up everything that is copied.
bool fits(const CacheUpdate& update, std::int64_t bytes) {
  for (int n = 0; n < update.part_count; ++n) {
    const CachePart& part = update.parts[n];
    for (const std::int64_t number :
         {static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.cache)),
          static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(part.rows)), part.page_stride, part.token_stride,
          part.head_stride, part.new_token_stride, part.new_head_stride, part.row_bytes}) {
      if (number % bytes != 0) return false;
    }
  }
  return true;
}

// Loads the code of a kernel, which its first launch would do otherwise.
template <class Piece>
void load() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, update_kernel<Piece>), "cudaFuncGetAttributes");
}

}  // namespace

void update_cache(const CacheUpdate& update, Stream stream) {
  if (update.sequences == 0) {
    load<uint4>();
    load<std::uint32_t>();
    load<std::uint8_t>();
    return;
  }
  const auto blocks = static_cast<unsigned>(update.sequences);
  const cudaStream_t queue = cuda_stream(stream);
  if (fits(update, sizeof(uint4))) {
    update_kernel<uint4><<<blocks, kThreads, 0, queue>>>(update);
  } else if (fits(update, sizeof(std::uint32_t))) {
    update_kernel<std::uint32_t><<<blocks, kThreads, 0, queue>>>(update);
  } else {
    update_kernel<std::uint8_t><<<blocks, kThreads, 0, queue>>>(update);
  }
  check_cuda(cudaGetLastError(), "update_cache");
}

}  // namespace ringattn::cuda
