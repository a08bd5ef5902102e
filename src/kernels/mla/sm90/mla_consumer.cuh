// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of mla_kernel. They alternate at computing S and P of a tile, and pass P to the other
// warpgroup through shared memory. Each then adds P V of every tile, in order, to its own output columns.
// The tile step is that of sm90_attention, except for when the softmax offset of a row moves: as soon as a score
// exceeds it by more than kMlaRescaleThreshold. This is known before the exponentials are computed, so no tile is
// recomputed. Rows that do not see a tile of the work tile have probabilities 0 there, which changes nothing.
#pragma once

#include <type_traits>

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/finish.cuh"
#include "kernels/mla/sm90/mla_epilogue.cuh"
#include "kernels/mla/sm90/mla_map.cuh"
#include "kernels/mla/sm90/softmax_offsets.cuh"

namespace ringattn::sm90 {

inline constexpr int kBothWarpgroupsBarrier = 1;  // both warpgroups. The next two ids are those of one warpgroup each.
inline constexpr int kOrderBarrier = 4;           // the second warpgroup may issue its scores

template <class C>
class MlaConsumer {
 public:
  __device__ __forceinline__ MlaConsumer(const DecodeParams& params, const MlaMap& map)
      : params_(params), p_(params.attention), map_(map), warpgroup_(warp_uniform(threadIdx.x / kWarpgroup)) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    if (begins_rows(map_, work_tile)) load_queries(work_tile);
    first_column_ = static_cast<int>(warpgroup_) * C::kColumns;
    const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
    const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto keys_from = [&](std::uint32_t tile) {
      return work_tile.seq_info.length - (work_tile.begin + static_cast<int>(tile - first)) * kMlaKeyTile;
    };
    if (first == tiles_) clear(o_);
    // Softmax of a tile's scores, then O += P V. before() runs before O changes.
    const auto finish = [&]<bool kOthers>(std::bool_constant<kOthers>, Scores& s, std::uint32_t tile, auto before) {
      const int number = work_tile.begin + static_cast<int>(tile - first);
      std::uint32_t probability[kMlaKeyTile / 16][4];
      const RowStats stats =
          softmax_step(s, thread_rows, number, !kOthers, number < plain.begin || number >= plain.end, probability);
      send_probabilities_of_tile(probability, stats, tile);
      before();
      if (stats.moved) scale_outputs(stats.factor);
      add_own(probability, tile, !kOthers, keys_from(tile));
      wgmma_wait<0>();
      pin(o_);
      release(tile);
    };
    // The first warpgroup scores even tiles and the second odd ones. For two consecutive tiles, the second issues
    // its MMAs after all of the first's are issued. If they ran concurrently, both would end at the same time, and the
    // tensor cores would idle during both softmaxes. In this order they compute the odd scores during the even tile's
    // softmax, and the even tile's P V during the odd tile's softmax.
    const auto process_tile = [&]<bool kOthers>(std::bool_constant<kOthers> others, std::uint32_t tile) {
      const auto add_before = [&] { add_other(tile - 1, tile - 1 == first, keys_from(tile - 1)); };
      const auto release_stage = [&] {
        wgmma_wait<0>();
        pin(o_);
        release(tile - 1);
      };
      Scores s;
      if (warpgroup_ == 0) {
        if constexpr (kOthers) {
          add_before();
          release_stage();
        }
        multiply(s, tile);
        if (tile + 1 != tiles_) named_arrive(kOrderBarrier, kMlaConsumerThreads);
        wgmma_wait<0>();
        pin(s);
        finish(others, s, tile, [] {});
      } else {
        if constexpr (kOthers) named_sync(kOrderBarrier, kMlaConsumerThreads);
        multiply(s, tile);
        if constexpr (kOthers) {
          add_before();
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        pin(s);
        sync_warpgroup();  // all warps have read the rotary keys, which the probabilities overwrite
        finish(others, s, tile, [&] {
          if constexpr (kOthers) release_stage();
        });
      }
    };
    std::uint32_t tile = first + ((warpgroup_ ^ first) & 1U);
    if (tile == first && first != tiles_) {
      process_tile(std::false_type(), tile);
      tile += 2;
    }
#pragma unroll 1
    for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) process_tile(std::true_type(), tile);
    if (first != tiles_ && ((tiles_ - 1) & 1U) != warpgroup_) {
      add_other(tiles_ - 1, tiles_ - 1 == first, keys_from(tiles_ - 1));
      wgmma_wait<0>();
      pin(o_);
      release(tiles_ - 1);
    }
    store_rows<C>(params_, map_, work_tile, thread_rows, first_column_, first != tiles_, o_);
    named_sync(kBothWarpgroupsBarrier, kMlaConsumerThreads);  // all have read sums, offsets and queries
  }

 private:
  using Scores = float[kMlaKeyTile / 8][4];

  // Makes a warp-uniform condition known as uniform to the compiler.
  static __device__ __forceinline__ bool all_of_warp(bool holds) { return __all_sync(0xffffffffU, holds) != 0; }

  // State of a thread's two rows after a tile.
  struct RowStats {
    float softmax_offset[2];
    float l[2];
    float factor[2];  // rescales the sum and outputs of earlier tiles
    bool moved;       // whether a factor of the warp's rows is not 1
  };

  static __device__ __forceinline__ void clear(float (&o)[C::kColumns / 8][4]) {
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0F;
    }
  }

  // Loads the queries to shared memory, four threads per row. Missing rows are zeros.
  __device__ __forceinline__ void load_queries(const DecodeWorkTile& work_tile) const {
    constexpr int kChunks = kLatentDim / 8;
    constexpr int kAtOnce = kChunks / 4;
    const auto* const q = static_cast<const std::uint16_t*>(p_.q.data);
    const bool aligned =
        ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p_.q.token_stride | p_.q.head_stride))) &
         15U) == 0;
    const int tile_row = thread_of_cta() / 4;
    const bool present = tile_row < rows_of(params_, work_tile);
    const DecodeCoord coord = coord_of(params_, work_tile, present ? tile_row : 0);
    const std::uint16_t* const row = q + coord.row * p_.q.token_stride + coord.query_head * p_.q.head_stride;
    const int first = thread_of_cta() % 4;
    uint4 elements[kAtOnce];
    const auto load = [&](auto is_aligned) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        elements[i] = present ? load_elements(row + (first + 4 * i) * 8, is_aligned) : uint4{0, 0, 0, 0};
      }
    };
    if (aligned) {
      load(std::true_type());
    } else {
      load(std::false_type());
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = first + 4 * i;
      cuda::store_shared(map_.q() + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kQueryTile)) +
                             cuda::swizzled(tile_row, chunk % 8),
                         elements[i]);
    }
    proxy_fence();
    named_sync(kBothWarpgroupsBarrier, kMlaConsumerThreads);
  }

  // Waits for a column part of a tile.
  __device__ __forceinline__ void await(std::uint32_t tile, int part) const {
    barrier_wait(map_.full(stage_of(tile), part), parity_of(tile));
  }
  // Releases this warpgroup's half of a tile to all producers of the cluster. Called when the warp's P V is complete.
  // The other warpgroup's reads for S are complete then, as this warp has the tile's probabilities.
  __device__ __forceinline__ void release(std::uint32_t tile) const {
    const std::uint32_t barrier = map_.empty(stage_of(tile), warpgroup_);
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if constexpr (C::kCtas > 1) {
      if (lane < C::kCtas) barrier_arrive_at(map_to_cta(barrier, lane));
    } else {
      if (lane == 0) barrier_arrive(barrier);
    }
  }

  // Syncs the warps of this warpgroup.
  __device__ __forceinline__ void sync_warpgroup() const {
    named_sync(kBothWarpgroupsBarrier + 1 + static_cast<int>(warpgroup_), kWarpgroup);
  }

  // Issues S = Q Kᵀ of a tile, each column part when it has landed.
  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t tile) const {
    constexpr int kPart = 4 * kPartPanels;
    pin(s);
    await(tile, 0);
    wgmma_fence();
    score_steps<0, kPart>(s, tile);
    await(tile, 1);
    wgmma_fence();
    score_steps<kPart, 2 * kPart>(s, tile);
    await(tile, 2);
    wgmma_fence();
    score_steps<2 * kPart, 3 * kPart>(s, tile);
    await(tile, 3);
    wgmma_fence();
    score_steps<3 * kPart, 4 * kPart>(s, tile);
    await(tile, kRopePart);
    wgmma_fence();
    score_steps<4 * kPart, kLatentDim / 16>(s, tile);
    wgmma_commit();
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void score_steps(Scores& s, std::uint32_t tile) const {
    const std::uint32_t q = warp_uniform(descriptor_low(map_.q()));
    const std::uint32_t k = warp_uniform(descriptor_low(map_.tile(stage_of(tile))));
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      const auto at = static_cast<std::uint32_t>((step / 4 * MlaMap::kPanelBytes + step % 4 * 32) >> 4);
      Wgmma<typename C::Element, kMlaKeyTile>::ss(s, descriptor(q + at), descriptor(k + at), step > 0);
    }
  }

  // Computes probabilities from scores, and updates the rows' offsets and sums.
  __device__ __forceinline__ RowStats softmax_step(Scores& s, const ThreadRows& thread_rows, int number, bool first,
                                                   bool special,
                                                   std::uint32_t (&probability)[kMlaKeyTile / 16][4]) const {
    const int tile_row = tile_row_of_thread();
    const int lane = thread_of_cta() % 4;
    if (p_.softmax.scaled_first) scale_scores(p_, s);
    RowStats stats;
    float old[2], shift[2], row_max[2];
    bool moves = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // loaded first, to overlap their latency
      old[half] = first ? -INFINITY : load_float(map_.softmax_offset(tile_row + 8 * half));
      stats.l[half] = first ? 0.0F : load_float(map_.sum(tile_row + 8 * half, lane));
    }
    if (special) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask_scores<0, kMlaKeyTile / 8>(p_, s, half, visible_columns<C>(thread_rows, half, number));
      }
    }
    max_scores(p_, s, row_max);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stats.softmax_offset[half] = offset_after(old[half], row_max[half]);
      shift[half] = stats.softmax_offset[half] == -INFINITY ? 0.0F : -stats.softmax_offset[half];
      stats.factor[half] = factor_between(old[half], stats.softmax_offset[half]);
      moves = moves || offset_moves(old[half], stats.softmax_offset[half]);
    }
    float sum[2];
    exponentiate<C>(p_, shift, s, sum);
    pack<C>(s, probability);
    stats.moved = __any_sync(0xffffffffU, moves);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (stats.moved) stats.l[half] = __fmul_rn(stats.l[half], stats.factor[half]);
      stats.l[half] = __fadd_rn(stats.l[half], sum[half]);
    }
    return stats;
  }

  // Passes a tile's probabilities and row state to the other warpgroup, which has read the previous ones, as has this
  // one. An odd tile is passed before the even tile's probabilities are known to have been read. They have been by the
  // time the next even tile is scored, as that tile was loaded into a stage that both warpgroups had released.
  __device__ __forceinline__ void send_probabilities_of_tile(const std::uint32_t (&probability)[kMlaKeyTile / 16][4],
                                                             const RowStats& stats, std::uint32_t tile) const {
    const int tile_row = tile_row_of_thread();
    const int lane = thread_of_cta() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane == 0) {
        cuda::store_shared(map_.softmax_offset(tile_row + 8 * half), __float_as_uint(stats.softmax_offset[half]));
        if (stats.moved) cuda::store_shared(map_.factor(tile_row + 8 * half), __float_as_uint(stats.factor[half]));
      }
      cuda::store_shared(map_.sum(tile_row + 8 * half, lane), __float_as_uint(stats.l[half]));
    }
    // stmatrix stores four 8x8 matrices at a time. Each lane gives the address of one row.
    const int in_warp = thread_of_cta() % 32;
    const int row = thread_of_warpgroup() / 32 * 16 + in_warp % 16;
    const std::uint32_t probabilities = map_.probabilities(tile);
#pragma unroll
    for (int step = 0; step < kMlaKeyTile / 16; ++step) {
      store_matrix(probabilities + cuda::swizzled(row, 2 * step + in_warp / 16), probability[step]);
    }
    if (thread_of_cta() % 32 == 0) store_number(map_.moved(warp()), stats.moved ? 1 : 0);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(stage_of(tile)));
  }

  __device__ __forceinline__ void scale_outputs(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = __fmul_rn(o_[n][i], factor[i / 2]);
    }
  }

  __device__ __forceinline__ std::uint32_t values(std::uint32_t tile) const {
    const std::uint32_t address =
        map_.tile(stage_of(tile)) + static_cast<std::uint32_t>(first_column_ / kPanelColumns * MlaMap::kPanelBytes);
    return warp_uniform(descriptor_low(address, MlaMap::kPanelBytes));
  }

  // Issues O += P V of a tile that this warpgroup has scored. P is in registers.
  __device__ __forceinline__ void add_own(const std::uint32_t (&probability)[kMlaKeyTile / 16][4], std::uint32_t tile,
                                          bool first, int keys) {
    if (all_of_warp(keys < kMlaKeyTile)) clear_tail(tile, keys);
    const std::uint32_t v = values(tile);
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMlaKeyTile / 16; ++step) {
      Wgmma<typename C::Element, C::kColumns>::rs(
          o_, probability[step], descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)),
          step > 0 || !first);
    }
    wgmma_commit();
  }

  // Issues O += P V of a tile that the other warpgroup has scored. P is in shared memory.
  __device__ __forceinline__ void add_other(std::uint32_t tile, bool first, int keys) {
    const int part = static_cast<int>(warpgroup_) * kHalfParts;
    await(tile, part);  // the other half may already hold the next tile
    await(tile, part + 1);
    barrier_wait(map_.probabilities_full(stage_of(tile)), parity_of(tile));
    if (all_of_warp(load_number(map_.moved(warp())) != 0)) {
      const int tile_row = tile_row_of_thread();
      const float factor[2] = {load_float(map_.factor(tile_row)), load_float(map_.factor(tile_row + 8))};
      scale_outputs(factor);
    }
    if (all_of_warp(keys < kMlaKeyTile)) clear_tail(tile, keys);
    const std::uint32_t p = warp_uniform(descriptor_low(map_.probabilities(tile)));
    const std::uint32_t v = values(tile);
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMlaKeyTile / 16; ++step) {
      Wgmma<typename C::Element, C::kColumns>::sv(
          o_, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)), step > 0 || !first);
    }
    wgmma_commit();
  }

  // Rows of a tile after the sequence's last key hold other data, or are left from an earlier tile. Their probabilities
  // are 0, but 0 · ∞ is NaN, so they are cleared. Each warpgroup clears its own columns.
  __device__ __forceinline__ void clear_tail(std::uint32_t tile, int keys) const {
    constexpr int kChunks = C::kColumns / 8;
    sync_warpgroup();  // all warps have scored the tile
#pragma unroll 1
    for (int i = keys * kChunks + thread_of_warpgroup(); i < kMlaKeyTile * kChunks; i += kWarpgroup) {
      const int chunk = first_column_ / 8 + i % kChunks;
      cuda::store_shared(map_.tile(stage_of(tile)) + static_cast<std::uint32_t>(chunk / 8 * MlaMap::kPanelBytes) +
                             cuda::swizzled(i / kChunks, chunk % 8),
                         uint4{0, 0, 0, 0});
    }
    proxy_fence();
    sync_warpgroup();
  }

  static __device__ __forceinline__ int warp() { return thread_of_warpgroup() / 32; }

  const DecodeParams& params_;
  const cuda::AttentionParams& p_;
  const MlaMap& map_;
  const std::uint32_t warpgroup_;
  int first_column_ = 0;     // of this warpgroup's output columns
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  float o_[C::kColumns / 8][4];
};

}  // namespace ringattn::sm90
