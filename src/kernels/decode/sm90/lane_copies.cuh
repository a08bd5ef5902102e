// SPDX-License-Identifier: Apache-2.0
// Copies of V rows by the lanes of a warp (cp.async), for boxes too small for TMA (config.hpp): those of small pages,
// and of tiles of 80 and 112 keys, whose boxes have 16 rows whatever the page size. The rows land where TMA would put
// them, and the stage's barrier counts the copies, so no lane waits. Readers must use ordinary loads or ldmatrix: the
// copies are not ordered for the async proxy.
#pragma once

#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/decode/sm90/decode_params.hpp"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

// Page runs of a tile: kPageRunRows rows that lie in one page. Lanes look up those of several tiles at a time: lane i
// looks up page run i % kPageRuns of tile i / kPageRuns.
template <class C>
struct TilePageRuns {
  static constexpr int kPageRuns = C::kKeyTile / kPageRunRows;
  static constexpr int kTiles = 32 / kPageRuns;
  static_assert(C::kKeyTile % kPageRunRows == 0);
};

// A warp calls it: waits until the stage is empty, then copies this CTA's columns of tile `nth` of those looked up,
// into panels at `target`. `page_run` is the address of this lane's page run; null: it has no key, and becomes zeros. A
// lane copies 16-byte chunks of some rows of every fourth page run. Eight lanes write 128 contiguous bytes of shared
// memory at a time.
template <class C>
__device__ __forceinline__ void copy_by_lanes(unsigned lane, const std::byte* page_run, std::int64_t token_stride,
                                              int nth, std::uint32_t target, std::uint32_t empty, std::uint32_t parity,
                                              std::uint32_t full) {
  constexpr int kPageRuns = TilePageRuns<C>::kPageRuns;
  constexpr int kRowBytes = C::kVRowBytes;
  constexpr int kChunks = C::kSliceColumns / 8;                               // 16-byte chunks of a row
  constexpr int kRowLanes = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // lanes that share a row
  constexpr int kRows = 8 / kRowLanes;  // rows of a page run that are copied at a time
  constexpr int kTurns = (kPageRuns + 3) / 4;
  constexpr int kHalf = kPageRunRows / 2;                  // the swizzle is the same in both halves
  constexpr std::uint32_t kSwizzledBits = kRowBytes - 16;  // address bits that the swizzle changes
  static_assert(kChunks % kRowLanes == 0 && (kRowLanes * 16 == kRowBytes || kRowBytes == kPanelRowBytes));
  const auto first = static_cast<int>(lane / 8);
  const auto row = static_cast<int>(lane % 8 / kRowLanes);
  const auto chunk = static_cast<int>(lane % kRowLanes);
  const std::int64_t offset = row * token_stride + chunk * 16;
  std::uint64_t from[kTurns];
  bool present[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    from[turn] =
        __shfl_sync(0xffffffffU, reinterpret_cast<std::uint64_t>(page_run), nth * kPageRuns + turn * 4 + first);
    present[turn] = from[turn] != 0;
    from[turn] += static_cast<std::uint64_t>(offset);
  }
  barrier_wait(empty, parity);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (kPageRuns % 4 != 0 && turn * 4 + first >= kPageRuns) continue;
    const auto* source = reinterpret_cast<const std::byte*>(from[turn]);
    std::uint32_t to = target + tile_chunk<C::kKeyTile, kRowBytes>(first * kPageRunRows + row, chunk) +
                       turn * 4 * kPageRunRows * kRowBytes;
#pragma unroll(kChunks > 8 ? 1 : 2)
    for (int half = 0; half < 2; ++half, to += kHalf * kRowBytes) {
#pragma unroll
      for (int i = 0; i < kHalf; i += kRows, source += kRows * token_stride) {
#pragma unroll
        for (int column = 0; column < kChunks; column += kRowLanes) {
          // Rows and chunks after the lane's first one flip bits of its address, or add to it.
          const std::uint32_t delta = tile_chunk<C::kKeyTile, kRowBytes>(i, column);
          cuda::copy_16((to ^ (delta & kSwizzledBits)) + (delta & ~kSwizzledBits), source + column * 16, present[turn]);
        }
      }
    }
  }
  cp_async_arrive(full);
}

}  // namespace ringattn::sm90
