// SPDX-License-Identifier: Apache-2.0
// Loads of tiles by threads, for rows that TMA can't access. The tile has the layout that TMA's boxes have
// (common/cuda/panels.hpp, 128-byte swizzle).
#pragma once

#include <cstdint>

#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm90 {

// Copies rows [begin, end) of `count` rows of a tile whose panels have `panel_rows` rows, and zeroes the others of the
// `count` rows. `thread` is 0 … kThreads − 1.
template <int kThreads>
__device__ __forceinline__ void copy_rows(std::uint32_t target, const cuda::RowsOf& rows, int columns, int panel_rows,
                                          int count, int begin, int end, int thread) {
  const int chunks = (columns + cuda::kPanelColumns - 1) / cuda::kPanelColumns * 8;
#pragma unroll 1
  for (int i = thread; i < count * chunks; i += kThreads) {
    const int row = i / chunks;
    const int chunk = i % chunks;
    uint4 elements{0, 0, 0, 0};
    if (row >= begin && row < end && chunk * 8 < columns) {
      const char* from = rows.at(row) + chunk * 16;
      if (rows.aligned()) {
        elements = *reinterpret_cast<const uint4*>(from);
      } else {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
        elements.x = halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
        elements.y = halves[2] | static_cast<std::uint32_t>(halves[3]) << 16;
        elements.z = halves[4] | static_cast<std::uint32_t>(halves[5]) << 16;
        elements.w = halves[6] | static_cast<std::uint32_t>(halves[7]) << 16;
      }
    }
    cuda::store_shared(target + static_cast<std::uint32_t>(chunk / 8 * panel_rows * cuda::kPanelRowBytes) +
                           cuda::swizzled(row, chunk % 8),
                       elements);
  }
}

}  // namespace ringattn::sm90
