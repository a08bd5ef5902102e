// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory, and copies into them with cp.async. A tile of [rows, dim] is divided into
// panels of 64 columns. A panel row is 128 bytes, and its 16-byte chunks are XORed with the row, so that eight rows of
// one chunk column lie in different banks.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/ptx.cuh"

namespace ringattn::cuda {

template <int kRows, int kDim>
inline constexpr int kTileBytes = kRows* padded_row_bytes(kDim);

// Byte offset of chunk `chunk` (0 … 7) of a row in its panel.
__device__ inline std::uint32_t swizzled(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Address of columns 16 · step, given the address of the same row's chunk 0 or 1. Moving by 16 columns flips bits of a
// swizzled address, and each panel adds its size.
template <int kRows>
__device__ __forceinline__ std::uint32_t at_columns(std::uint32_t address, int step) {
  return (address ^ static_cast<std::uint32_t>(step % 4 << 5)) +
         static_cast<std::uint32_t>(step / 4 * kRows * kPanelRowBytes);
}

// Rows of a tensor in global memory. Consecutive rows are `stride` bytes apart.
struct RowsOf {
  const char* data;
  std::int64_t stride;

  __device__ bool aligned() const {
    return ((static_cast<std::uint32_t>(reinterpret_cast<std::uint64_t>(data)) | static_cast<std::uint32_t>(stride)) &
            15U) == 0;
  }
  __device__ const char* at(int row) const { return data + static_cast<std::int64_t>(row) * stride; }
};

// Copies eight elements to shared memory, or writes zeros without reading if not `present`. `aligned`: to 16 bytes.
__device__ __forceinline__ void copy_chunk(std::uint32_t to, const char* from, bool present, bool aligned) {
  if (aligned) {
    copy_16(to, from, present);
    return;
  }
  const auto* elements = reinterpret_cast<const std::uint16_t*>(from);
  std::uint32_t words[4] = {};
  for (int w = 0; present && w < 4; ++w) {
    words[w] = elements[2 * w] | static_cast<std::uint32_t>(elements[2 * w + 1]) << 16;
  }
  store_shared(to, uint4{words[0], words[1], words[2], words[3]});
}

// Copies columns [kFirst, kFirst + kWidth) of rows [begin, end). The tile's other rows become zeros.
template <int kRows, int kThreads, int kFirst, int kWidth>
__device__ __forceinline__ void copy_columns_checked(std::uint32_t target, const RowsOf& rows, int begin, int end) {
  constexpr int kChunks = kWidth / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks + kFirst / 8;
    const bool present = row >= begin && row < end;
    const std::uint32_t to =
        target + static_cast<std::uint32_t>(chunk / 8 * kRows * kPanelRowBytes) + swizzled(row, chunk % 8);
    copy_chunk(to, rows.at(present ? row : begin) + chunk * 16, present, rows.aligned());
  }
}

// Copies rows [begin, end) of a tile, with all threads. The tile's other rows become zeros. Whole tiles of 16-byte
// aligned rows take a faster path. `begin` < `end`.
template <int kRows, int kDim, int kThreads>
__device__ __forceinline__ void copy_tile(std::uint32_t target, const RowsOf& rows, int begin, int end) {
  constexpr int kPanels = kDim / kPanelColumns;
  constexpr int kTail = kDim % kPanelColumns;  // columns of the last, narrower panel
  if (begin != 0 || end != kRows || !rows.aligned()) {
    copy_columns_checked<kRows, kThreads, 0, kDim>(target, rows, begin, end);
    return;
  }
  {
    constexpr int kStep = kThreads / 8;  // rows per pass, a multiple of 8, so that the swizzle is the same in each
    static_assert(kRows % kStep == 0 && kStep % 8 == 0);
    const int chunk = static_cast<int>(threadIdx.x) % 8;
    const int row = static_cast<int>(threadIdx.x) / 8;
    const std::uint32_t to = target + swizzled(row, chunk);
    const char* from = rows.at(row) + chunk * 16;
    const std::int64_t step = rows.stride * kStep;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_16(to + static_cast<std::uint32_t>((panel * kRows + i * kStep) * kPanelRowBytes),
                from + panel * kPanelRowBytes, true);
      }
      from += step;
    }
  }
  if constexpr (kTail > 0) {
    constexpr int kChunks = kTail / 8;
    constexpr int kStep = kThreads / kChunks;
    static_assert(kRows % kStep == 0 && kStep % 8 == 0);
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    const std::uint32_t to =
        target + static_cast<std::uint32_t>(kPanels * kRows * kPanelRowBytes) + swizzled(row, chunk);
    const char* from = rows.at(row) + kPanels * kPanelRowBytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      copy_16(to + static_cast<std::uint32_t>(i * kStep * kPanelRowBytes), from, true);
      from += rows.stride * kStep;
    }
  }
}

// The rows of one page run of a tile. The first `keys` of them exist.
struct PageRunRows {
  RowsOf rows;
  int keys;
};

// Copies a tile that consists of page runs of 2^page_run_log2 rows. Missing rows become zeros. find(page_run) returns a
// page run's PageRunRows, whose address must be readable even if it has no keys.
template <int kRows, int kDim, int kThreads, class Find>
__device__ __forceinline__ void copy_page_runs(std::uint32_t target, int page_run_log2, Find find) {
  constexpr int kStep = kThreads / 8;  // rows per pass; eight threads share a row
  static_assert(kRows % kStep == 0);
  const int first = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kRows; row += kStep) {
    const auto [rows, keys] = find(row >> page_run_log2);
    const int in_page_run = row & ((1 << page_run_log2) - 1);
    const bool present = in_page_run < keys;
    const char* const from = rows.at(present ? in_page_run : 0);
#pragma unroll
    for (int chunk = first; chunk < kDim / 8; chunk += 8) {
      copy_chunk(target + static_cast<std::uint32_t>(chunk / 8 * kRows * kPanelRowBytes) + swizzled(row, chunk % 8),
                 from + chunk * 16, present, rows.aligned());
    }
  }
}

// Stores eight elements of a row. `aligned`: to 16 bytes.
__device__ __forceinline__ void store_elements(std::uint16_t* to, const uint4& elements, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = elements;
    return;
  }
  const std::uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
  for (int w = 0; w < 4; ++w) {
    to[2 * w] = static_cast<std::uint16_t>(words[w]);
    to[2 * w + 1] = static_cast<std::uint16_t>(words[w] >> 16);
  }
}

}  // namespace ringattn::cuda
