// SPDX-License-Identifier: Apache-2.0
// The warps of a pair's CTA that make elements of the codes of the tiles that it scores (code_rows.cuh), and send the
// half that the other CTA needs.
#pragma once

#include "kernels/sm90/latent/code_rows.cuh"
#include "kernels/sm90/latent/pair_map.cuh"

namespace ringattn::sm90 {

inline constexpr int kPairExpanders = 2;  // warps

template <class C>
class PairExpander {
 public:
  __device__ __forceinline__ PairExpander(const LatentCodeParams& p, const PairMap& map)
      : map_(map), first_row_(thread_of_cta() / 32 % kPairExpanders * Row::kRows), row_(p, first_row_) {
    static_assert(kPairExpanders * Row::kRows == kLatentTile);
  }

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    const auto scales_of = [&](std::uint32_t number) {
      return row_.scales(unit, unit.begin + static_cast<int>(number - first));
    };
    float4 next = scales_of(tile);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const float4 scales = next;
      next = scales_of(tile + 2);
      expand(scales, pair_turn(tile));
    }
  }

 private:
  using Row = CodeRow<1>;

  __device__ __forceinline__ void expand(const float4& scales, const LatentTurn& turn) const {
    const std::uint32_t shared = map_.shared_half(map_.rank, turn.place), own = map_.own_half(turn.place);
    // The columns of a tile, first those that both CTAs need.
    const auto panel = [=](int n) {
      return (n < kPairPanels ? shared : own) + static_cast<std::uint32_t>(n % kPairPanels * PairMap::kPanelBytes);
    };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of a panel, those of this warp's rows
    barrier_wait(map_.codes_full(turn.place), turn.parity);
    barrier_wait(map_.shared_empty(turn.place), turn.parity ^ 1U);
#pragma unroll
    for (int nth = 0; nth < kCodeBlocks; ++nth) {
      const int block = static_cast<int>(PairMap::block_of(map_.rank, static_cast<std::uint32_t>(nth)));
      row_.template expand<typename C::Element>(panel(kCodeSlot + nth), panel(2 * nth), panel(2 * nth + 1),
                                                Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      if (2 * nth < kPairPanels && lane < 2) {
        const std::uint32_t rows = panel(2 * nth + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
        const std::uint32_t other = 1U - map_.rank;
        send_told_bytes(in_cta(rows, other), rows, kRowBytes, in_cta(map_.shared_full(map_.rank, turn.place), other));
      }
      if (nth % 2 == 1 && lane == 0) {
        barrier_arrive(nth == 1 ? map_.shared_full(map_.rank, turn.place) : map_.own_full(turn.place));
      }
      __syncwarp();
    }
  }

  const PairMap& map_;
  const int first_row_;
  const Row row_;
  std::uint32_t tiles_ = 0;  // of all units so far
};

}  // namespace ringattn::sm90
