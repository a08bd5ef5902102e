// SPDX-License-Identifier: Apache-2.0
// The output warpgroup of the prefix kernel (prefix.cuh): adds P V of a prefix's tiles in order, whichever warpgroup or
// CTA has scored them.
#pragma once

#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/decode/sm90/prefix_whole.cuh"
#include "kernels/decode/sm90/prefix_work_tiles.cuh"
#include "kernels/decode/sm90/queries.cuh"
#include "kernels/decode/sm90/sliced_map.cuh"

namespace ringattn::sm90 {

// Holds acc and sum of 64 rows.
template <class C>
class PrefixOutputs {
 public:
  __device__ __forceinline__ PrefixOutputs(const DecodeParams& params, const PrefixMap<C>& map, int rank)
      : params_(params), map_(map), rank_(rank) {}

  __device__ __forceinline__ void process(const PrefixWorkTile& work_tile) {
    if constexpr (C::kSlices > 1) await_panels_of_queries();
    load_queries<C>(params_, map_, work_tile.rows,
                    [&](int tile_row) { return coord_of(params_, map_, work_tile, tile_row); });
    named_arrive(kPrefixQueries, (1 + C::kScorers) * kWarpgroup);
    // done here since the warpgroup has to wait anyway
    const ThreadRows thread_rows = prefix_thread_rows(params_, map_, work_tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows_.l[half] = 0.0F;
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {  // keeps the registers defined; the first P V overwrites them
#pragma unroll
      for (int i = 0; i < 4; ++i) rows_.o[n][i] = 0.0F;
    }
#pragma unroll 1
    for (int tile = 0; tile < work_tile.tiles(); ++tile) {
      barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
      add_panel<0>(tile == 0);
      add_sums();
      add_panel<1>(false);
      ring_.advance();
      ++number_;
    }
    wgmma_wait<0>();
    pin(rows_.o);
    release_panel();
    release_values();
#pragma unroll 1
    for (int turn = work_tile.tiles(); turn < work_tile.turns<C>(); ++turn) skip_tiles();
    const float2 shift = load_pair(map_.shift(thread_of_warpgroup()));
    rows_.shift[0] = shift.x;
    rows_.shift[1] = shift.y;
    // otherwise the work tile has failed
    rows_.flags = AttentionState<C>::kOffsetSet | AttentionState<C>::kOffsetSet << 1;
    store_prefix_rows(params_, thread_rows, work_tile, rows_, rank_ * C::kDimV);
  }

  // The stage of the next work tile's first tile.
  __device__ PackedPipelineState<C::kStages> ring() const { return ring_; }

 private:
  // Waits until the peer CTA, too, has read the previous work tile's probabilities that share memory with Q. Every
  // panel has been used for the same number of tiles.
  __device__ __forceinline__ void await_panels_of_queries() const {
    constexpr std::uint32_t kTiles = PrefixMap<C>::kPanels / PrefixMap<C>::kTilePanels;
    static_assert(scoring_warpgroups<C>() % kTiles == 0);
    const std::uint32_t parity = (number_ / kTiles & 1U) ^ 1U;
#pragma unroll
    for (std::uint32_t i = 0; i < PrefixMap<C>::kTilePanels; ++i) {
      barrier_wait(map_.panel_empty(PrefixMap<C>::q_panel() + i), parity);
    }
  }

  using Panels = PipelineState<PrefixMap<C>::kPanels>;

  // Issues P V of a tile's panel. It first completes the previous panel and, with a tile's first panel, the previous
  // tile.
  template <int kPanel>
  __device__ __forceinline__ void add_panel(bool first) {
    barrier_wait(map_.panel_full(panel_.index), panel_.parity);
    const std::uint32_t p = warp_uniform(descriptor_low(map_.panel(panel_.index)));
    const std::uint32_t v = warp_uniform(descriptor_low(map_.v(ring_.stage()), cuda::panel_bytes(C::kKeyTile)));
    panel_.advance();
    pin(rows_.o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < panel_steps<C>(kPanel); ++step) {
      Wgmma<typename C::Element, C::kDimV>::sv(
          rows_.o, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>((4 * kPanel + step) * 16 * kPanelRowBytes >> 4)),
          step > 0 || !first);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (first) return;
    release_panel();
    if (kPanel == 0) release_values();
  }
  // Skips a turn without a tile, after all wgmma are complete.
  __device__ __forceinline__ void skip_tiles() {
    barrier_wait(map_.v_full(ring_.stage()), ring_.parity());
#pragma unroll
    for (int panel = 0; panel < PrefixMap<C>::kTilePanels; ++panel) {
      barrier_wait(map_.panel_full(panel_.index), panel_.parity);
      panel_.advance();
      __syncwarp();  // one lane arrives after all have waited
      release_panel();
    }
    release_values();
    ring_.advance();
    ++number_;
  }
  __device__ __forceinline__ void add_sums() {
    if (C::kSlices > 1 && rank_ != 0) return;  // the other CTA stores the sum
    const float2 sum = load_pair(map_.sums(number_, thread_of_warpgroup()));
    rows_.l[0] = __fadd_rn(rows_.l[0], sum.x);
    rows_.l[1] = __fadd_rn(rows_.l[1], sum.y);
    __syncwarp();  // one lane releases the panel, and these sums with it, after all have read
  }
  // Arrives at the CTA that writes the panel; in a pair both CTAs' output warpgroups do.
  __device__ __forceinline__ void release_panel() {
    const std::uint32_t panel_index = released_panel_.index;
    const std::uint32_t barrier = map_.panel_empty(panel_index);
    if (thread_of_cta() % 32 == 0) {
      if constexpr (C::kSlices > 1) {
        barrier_arrive_at(map_to_cta(barrier, PrefixMap<C>::writer_of(panel_index)));
      } else {
        barrier_arrive(barrier);
      }
    }
    released_panel_.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.v_empty(released_.stage()));
    released_.advance();
  }

  const DecodeParams& params_;
  const PrefixMap<C>& map_;
  const int rank_;
  PackedPipelineState<C::kStages> ring_, released_;  // V of the next tile, and the next stage to release
  Panels panel_, released_panel_;
  std::uint32_t number_ = 0;  // number of the next tile, over all work tiles
  AttentionState<C> rows_;
};

}  // namespace ringattn::sm90
