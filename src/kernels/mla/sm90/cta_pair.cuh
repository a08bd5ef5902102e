// SPDX-License-Identifier: Apache-2.0
// MLA decode with a CTA pair, a cluster of two CTAs, per work tile. A work tile is one KV split for 64 rows
// (decode/sm90/decode_common.cuh). Each CTA has half of the output columns, and scores every second tile for both. One
// warpgroup computes scores, one the outputs, one warp is the producer, and one sends. Each output column is
// accumulated over the tiles in order, while the tensor cores of both CTAs overlap the scores of one tile with P V of
// another.
#pragma once

#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_common.cuh"

namespace ringattn::sm90 {

// Shared-memory layout and barriers of a CTA of cta_pair_kernel (cta_pair.cuh). CTA 0 has the left and CTA 1 the right
// 256 output columns of a work tile. CTA 0 scores the tiles with even numbers, CTA 1 those with odd numbers. The scorer
// of a tile needs all of its columns as keys. The other CTA needs only its own half, as values.
//
//   shared by 0    [2][64 keys][256]     right halves of the tiles that CTA 0 scores, in both CTAs
//   shared by 1    [2][64 keys][256]     left halves of the tiles that CTA 1 scores, in both CTAs
//   own            [2][64 keys][256]     this CTA's half of the tiles that it scores
//   rope           [2][64 keys][64]      rotary keys of these tiles; after scoring, their probabilities
//   probabilities  [2][64 rows][64 keys] of the tiles that the other CTA scores
//   offsets        [2][2][64 rows]       softmax offsets after a tile, of this CTA's and of the other CTA's tiles; rows
//                                        n and n + 8 of a warp adjacent
//   sums           [64 rows][4]          row sums after the other CTA's last tile, one addend per thread of the quad
//   final sums     [2][64 rows]          row sums of a work tile
//   info           [2]                   MlaWorkTileInfo
//   barriers
//
// Shared halves are in the same stage in both CTAs. Arrays with a leading [2] are double-buffered, by tile or by work
// tile. Tiles are stored in swizzled panels of 64 columns, as in the attention kernel (sm90_attention).

inline constexpr int kCtaPairPanels = kLatentDimV / kPanelColumns / 2;  // per half
inline constexpr int kCtaPairColumns = kLatentDimV / 2;
inline constexpr int kCtaPairConsumers = 2;     // consumer warpgroups: one computes scores, one outputs
inline constexpr int kCtaPairQueryBarrier = 3;  // scoring warpgroup and producer warp
inline constexpr int kCtaPairInfoReaders =
    kCtaPairConsumers * kWarpgroup / 32 + 1;  // the consumer warps and the sender

// Stage of a tile. Tiles are counted over all work tiles, and this CTA scores every second one.
__device__ __forceinline__ MlaPipelineState cta_pair_pipeline_state(std::uint32_t tile) {
  return MlaPipelineState::of(tile >> 1);
}

struct CtaPairMap {
  // Shared-memory address of this CTA in the shared::cluster window. TMA writes and arrivals on a plain address would
  // go to rank 0.
  std::uint32_t base;
  std::uint32_t rank;

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kHalfBytes = kCtaPairPanels * kPanelBytes;
  static constexpr int kOwnOffset = 4 * kHalfBytes;
  static constexpr int kRopeOffset = 6 * kHalfBytes;
  static constexpr int kProbabilityOffset = kRopeOffset + 2 * kPanelBytes;
  static constexpr int kSoftmaxOffsetsOffset = kProbabilityOffset + 2 * kPanelBytes;
  static constexpr int kSumOffset = kSoftmaxOffsetsOffset + 4 * kQueryTile * 4;
  static constexpr int kFinalSumOffset = kSumOffset + kQueryTile * 16;
  static constexpr int kInfoOffset = kFinalSumOffset + 2 * kQueryTile * 4;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * MlaWorkTileInfo::kBytes;
  static constexpr int kBarriers = 31;
  static constexpr int kBytes = kBarrierOffset + kBarriers * kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes && kPanelBytes % 1024 == 0 && kPanelBytes == kQueryTile * kPanelRowBytes);

  // The half of a tile of `scorer` that is loaded to both CTAs: the output columns of the other CTA.
  __device__ std::uint32_t shared_half(std::uint32_t scorer, std::uint32_t stage) const {
    return at(0, 2 * scorer + stage, kHalfBytes);
  }
  __device__ std::uint32_t own_half(std::uint32_t stage) const { return at(kOwnOffset, stage, kHalfBytes); }
  // The left (0) or right (1) half of a tile that this CTA scores.
  __device__ std::uint32_t half(std::uint32_t which, std::uint32_t stage) const {
    return which == rank ? own_half(stage) : shared_half(rank, stage);
  }
  // This CTA's output columns of a tile. `own`: this CTA scores it.
  __device__ std::uint32_t values(bool own, std::uint32_t stage) const {
    return own ? own_half(stage) : shared_half(1U - rank, stage);
  }
  // FP8 latent cache: index of the `nth` block of 128 columns that CTA `scorer` dequantizes. Blocks that both CTAs need
  // come first. The fp8 values of all four are loaded into this CTA's own half.
  static constexpr std::uint32_t block_of(std::uint32_t scorer, std::uint32_t nth) {
    return (nth + 2 - 2 * scorer) % 4;
  }
  __device__ std::uint32_t rope(std::uint32_t stage) const { return at(kRopeOffset, stage, kPanelBytes); }
  __device__ std::uint32_t probabilities(bool own, std::uint32_t stage) const {
    return own ? rope(stage) : at(kProbabilityOffset, stage, kPanelBytes);
  }
  // Offsets of a scoring thread's two rows. The four threads of a quad have the same rows.
  __device__ std::uint32_t softmax_offsets(bool own, std::uint32_t stage, int thread) const {
    const auto pair = static_cast<std::uint32_t>(thread / 4);
    return at(kSoftmaxOffsetsOffset, (own ? 0U : kQueryTile) + stage * (kQueryTile / 2) + pair, 8);
  }
  // A scoring thread's addends of the sums of its two rows.
  __device__ std::uint32_t sums(int thread) const { return at(kSumOffset, static_cast<std::uint32_t>(thread), 8); }
  __device__ std::uint32_t final_sum(std::uint32_t stage, int row) const {
    return at(kFinalSumOffset, stage * kQueryTile + static_cast<std::uint32_t>(row), 4);
  }
  __device__ MlaWorkTileInfo info(std::uint32_t stage) const {
    return {at(kInfoOffset, stage, MlaWorkTileInfo::kBytes)};
  }

  // Full barriers of a shared half, of this CTA's own half, and of the rotary keys.
  __device__ std::uint32_t shared_full(std::uint32_t scorer, std::uint32_t stage) const {
    return barrier(2 * scorer + stage);
  }
  __device__ std::uint32_t own_full(std::uint32_t stage) const { return barrier(4 + stage); }
  __device__ std::uint32_t rope_full(std::uint32_t stage) const { return barrier(6 + stage); }
  __device__ std::uint32_t half_full(std::uint32_t which, std::uint32_t stage) const {
    return which == rank ? own_full(stage) : shared_full(rank, stage);
  }
  __device__ std::uint32_t values_full(bool own, std::uint32_t stage) const {
    return own ? own_full(stage) : shared_full(1U - rank, stage);
  }
  // Empty barriers, at the tile's scorer. own_empty: this CTA's outputs have read its own half. shared_empty: the tile
  // has been scored, and the other CTA's outputs have read the shared half and the probabilities, which were sent from
  // the stage of the rotary keys.
  __device__ std::uint32_t own_empty(std::uint32_t stage) const { return barrier(8 + stage); }
  __device__ std::uint32_t shared_empty(std::uint32_t stage) const { return barrier(23 + stage); }
  // Probabilities of a tile have arrived.
  __device__ std::uint32_t probabilities_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 10U : 12U) + stage);
  }
  // FP8 latent cache: the fp8 values of a tile have landed.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const { return barrier(27 + stage); }
  // softmax_offsets_full: offsets after a tile have arrived. sums_full: row sums after a tile of the other CTA have
  // arrived.
  __device__ std::uint32_t softmax_offsets_full(bool own, std::uint32_t stage) const {
    return barrier((own ? 25U : 14U) + stage);
  }
  __device__ std::uint32_t sums_full() const { return barrier(16); }
  // final_sums_full: row sums of a work tile have arrived. final_sums_empty: the output warpgroups of both CTAs have
  // read them.
  __device__ std::uint32_t final_sums_full(std::uint32_t stage) const { return barrier(17 + stage); }
  __device__ std::uint32_t final_sums_empty(std::uint32_t stage) const { return barrier(29 + stage); }
  __device__ std::uint32_t info_full(std::uint32_t stage) const { return barrier(19 + stage); }
  __device__ std::uint32_t info_empty(std::uint32_t stage) const { return barrier(21 + stage); }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// By one thread. `dequantizers`: warps that dequantize fp8 values; 0 if TMA loads the elements.
__device__ __forceinline__ void init_cta_pair_barriers(const CtaPairMap& map, int dequantizers) {
  constexpr int kWarps = kWarpgroup / 32;
  for (std::uint32_t i = 0; i < 2; ++i) {
    // The producer of the scoring CTA arrives with the byte count. With the FP8 latent cache, each dequantizing warp
    // arrives in the scoring CTA instead.
    const int here = dequantizers == 0 ? 1 : dequantizers;
    barrier_init(map.shared_full(map.rank, i), here);
    barrier_init(map.shared_full(1U - map.rank, i), 1);
    barrier_init(map.own_full(i), here);
    barrier_init(map.fp8_full(i), 1);
    barrier_init(map.rope_full(i), 1);
    barrier_init(map.own_empty(i), kWarps);         // output warps
    barrier_init(map.shared_empty(i), 2 * kWarps);  // scoring warps, and the other CTA's output warps
    // The scoring warps of this CTA arrive, or the sender of the other CTA.
    barrier_init(map.probabilities_full(true, i), kWarps);
    barrier_init(map.probabilities_full(false, i), 1);
    barrier_init(map.softmax_offsets_full(true, i), kWarps);
    barrier_init(map.softmax_offsets_full(false, i), 1);
    barrier_init(map.final_sums_full(i), kWarps);  // of the CTA that has scored the work tile's last tile
    barrier_init(map.final_sums_empty(i), 2 * kWarps);
    barrier_init(map.info_full(i), 1);
    barrier_init(map.info_empty(i), kCtaPairInfoReaders + dequantizers);
  }
  barrier_init(map.sums_full(), kWarps);
  barrier_init_fence();
}

// The producer warp of a CTA in a pair. It finds the work tiles, passes them to the other warps, and loads the tiles
// that its CTA scores: first this CTA's own half, which becomes empty earlier, then the half for both CTAs. Boxes after
// the last key of a sequence are skipped, so neither these rows nor their page-table entries are read.

template <class C>
class CtaPairProducer {
 public:
  __device__ __forceinline__ CtaPairProducer(const typename C::Params& p, const CtaPairMap& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), infos_(map) {}

  // Processes work tiles first, first + step, …
  __device__ __forceinline__ void run(int first, int step) {
    WorkTileFinder<C> work_tile_finder(p_);
    const int work_tiles = work_tile_finder.count();
#pragma unroll 1
    for (int n = first; n < work_tiles; n += step) process(work_tile_finder.find(n));
    infos_.send_end();
  }

 private:
  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto tile_at = [&](std::uint32_t number) { return work_tile.begin + static_cast<int>(number - first); };
    std::uint32_t own = first + ((first ^ map_.rank) & 1U);
    PageBox next = box_of_lane(p_, work_tile, tile_at(own), 0, p_.boxes.per_tile);
    const bool first_work_tile = infos_.none();
    infos_.await();
    if (tiles_ != first) {
      // Waits until the final sums of the work tile two before this one have been read. The consumers cannot wait for
      // this: a CTA that scores no work tile's last tile for a while would see two phases as one.
      const MlaPipelineState state = MlaPipelineState::of(work_tiles_);
      barrier_wait(map_.final_sums_empty(state.index), state.parity ^ 1U);
      ++work_tiles_;
    }
    infos_.send(work_tile);
    if (first_work_tile) named_sync(kCtaPairQueryBarrier, kWarpgroup + 32);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - own) > 0; own += 2) {
      const PageBox box = next;
      next = box_of_lane(p_, work_tile, tile_at(own + 2), 0, p_.boxes.per_tile);
      load(work_tile.kv_head, own, box, work_tile.seq_info.length - tile_at(own) * kMlaKeyTile);
    }
  }

  // Loads the boxes of `kPanels` panels to `target`, or to the same address of both CTAs. column_of(n): first column of
  // the n-th panel.
  template <int kPanels, bool kForBoth, class ColumnOf>
  __device__ __forceinline__ void issue_loads(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier,
                                              int head, const PageBox& of_lane, ColumnOf column_of) const {
    for_boxes(of_lane, p_.boxes.per_tile, [&](int i, const PageBox& box) {
      const std::uint32_t rows = target + static_cast<std::uint32_t>(i * p_.boxes.rows * kPanelRowBytes);
#pragma unroll
      for (int n = 0; n < kPanels; ++n) {
        const std::uint32_t panel = rows + static_cast<std::uint32_t>(n * CtaPairMap::kPanelBytes);
        if constexpr (kForBoth) {
          tma_multicast_page_box_once(3, panel, &map, barrier, column_of(n), head, box.page, box.row);
        } else {
          tma_load_page_box_once(panel, &map, barrier, column_of(n), head, box.page, box.row);
        }
      }
    });
  }

  // `left`: keys of the sequence from the tile's first key on.
  __device__ __forceinline__ void load(int head, std::uint32_t tile, const PageBox& box, int left) const {
    const MlaPipelineState state = cta_pair_pipeline_state(warp_uniform(tile));
    const std::uint32_t rank = map_.rank;
    const int rows = box_rows_of(p_, left);
    const int own_column = static_cast<int>(rank) * kCtaPairColumns;
    const std::uint32_t own_full = map_.own_full(state.index), rope_full = map_.rope_full(state.index);
    const std::uint32_t own = map_.own_half(state.index);
    barrier_wait(map_.own_empty(state.index), state.parity ^ 1U);
    if (C::kFp8 && lane_ == 0) barrier_arrive_expect(map_.fp8_full(state.index), rows * kLatentDimV);
    if (!C::kFp8 && lane_ == 0) barrier_arrive_expect(own_full, kCtaPairPanels * rows * kPanelRowBytes);
    __syncwarp();
    if constexpr (C::kFp8) {
      // The fp8 values of blocks, in the order of dequantization.
      issue_loads<kScaleBlocks, false>(own, p_.k, map_.fp8_full(state.index), head, box, [rank](int n) {
        return static_cast<int>(CtaPairMap::block_of(rank, static_cast<std::uint32_t>(n))) * kPanelColumns;
      });
    } else {
      issue_loads<kCtaPairPanels, false>(own, p_.k, own_full, head, box,
                                         [=](int n) { return own_column + n * kPanelColumns; });
    }
    const std::uint32_t shared_full = map_.shared_full(rank, state.index);
    const std::uint32_t shared = map_.shared_half(rank, state.index);
    barrier_wait(map_.shared_empty(state.index), state.parity ^ 1U);
    if (lane_ == 0) {
      barrier_arrive_expect(rope_full, rows * kPanelRowBytes);
      if (!C::kFp8) barrier_arrive_expect(shared_full, kCtaPairPanels * rows * kPanelRowBytes);
      // Dequantized tiles are sent with all rows.
      barrier_arrive_expect_at(map_to_cta(shared_full, 1U - rank),
                               kCtaPairPanels * (C::kFp8 ? kMlaKeyTile : rows) * kPanelRowBytes);
    }
    __syncwarp();
    if constexpr (C::kFp8) {
      issue_loads<1, false>(map_.rope(state.index), p_.rope, rope_full, head, box, [](int) { return 0; });
    } else {
      issue_loads<kCtaPairPanels, true>(shared, p_.k, shared_full, head, box,
                                        [=](int n) { return kCtaPairColumns - own_column + n * kPanelColumns; });
      issue_loads<1, false>(map_.rope(state.index), p_.k, rope_full, head, box, [](int) { return kLatentDimV; });
    }
  }

  const typename C::Params& p_;
  const CtaPairMap& map_;
  const int lane_;
  WorkTileInfoWriter<CtaPairMap> infos_;
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  std::uint32_t tiles_ = 0;       // over all work tiles so far
};

// The dequantizing warps of a CTA in a pair. They dequantize the tiles that this CTA scores (mla_common.cuh), and send
// the half that the peer CTA needs.

inline constexpr int kCtaPairDequantizers = 2;  // warps

template <class C>
class CtaPairDequantizer {
 public:
  __device__ __forceinline__ CtaPairDequantizer(const MlaFp8Params& p, const CtaPairMap& map)
      : map_(map), first_row_(thread_of_cta() / 32 % kCtaPairDequantizers * Row::kRows), row_(p, first_row_) {
    static_assert(kCtaPairDequantizers * Row::kRows == kMlaKeyTile);
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    const auto scales_of = [&](std::uint32_t number) {
      return row_.scales(work_tile, work_tile.begin + static_cast<int>(number - first));
    };
    float4 next = scales_of(tile);
#pragma unroll 1
    for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const float4 scales = next;
      next = scales_of(tile + 2);
      dequantize(scales, cta_pair_pipeline_state(tile));
    }
  }

 private:
  using Row = Fp8Row<1>;

  __device__ __forceinline__ void dequantize(const float4& scales, const MlaPipelineState& state) const {
    const std::uint32_t shared = map_.shared_half(map_.rank, state.index), own = map_.own_half(state.index);
    // Panels of a tile, starting with those that both CTAs need.
    const auto panel = [=](int n) {
      return (n < kCtaPairPanels ? shared : own) +
             static_cast<std::uint32_t>(n % kCtaPairPanels * CtaPairMap::kPanelBytes);
    };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of one panel of this warp's rows
    barrier_wait(map_.fp8_full(state.index), state.parity);
    barrier_wait(map_.shared_empty(state.index), state.parity ^ 1U);
#pragma unroll
    for (int nth = 0; nth < kScaleBlocks; ++nth) {
      const int block = static_cast<int>(CtaPairMap::block_of(map_.rank, static_cast<std::uint32_t>(nth)));
      row_.template dequantize<typename C::Element>(panel(kFp8Panel + nth), panel(2 * nth), panel(2 * nth + 1),
                                                    Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      if (2 * nth < kCtaPairPanels && lane < 2) {
        const std::uint32_t rows = panel(2 * nth + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
        const std::uint32_t peer = 1U - map_.rank;
        dsmem_copy_expected(map_to_cta(rows, peer), rows, kRowBytes,
                            map_to_cta(map_.shared_full(map_.rank, state.index), peer));
      }
      if (nth % 2 == 1 && lane == 0) {
        barrier_arrive(nth == 1 ? map_.shared_full(map_.rank, state.index) : map_.own_full(state.index));
      }
      __syncwarp();
    }
  }

  const CtaPairMap& map_;
  const int first_row_;
  const Row row_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

// The sending warp of a CTA in a pair: sends softmax offsets and probabilities of the tiles that this CTA scores to the
// other CTA.

class CtaPairSender {
 public:
  __device__ __forceinline__ explicit CtaPairSender(const CtaPairMap& map) : map_(map), peer_(1U - map.rank) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
#pragma unroll 1
    for (std::uint32_t tile = first + ((first ^ map_.rank) & 1U); static_cast<int>(tiles_ - tile) > 0; tile += 2) {
      const MlaPipelineState state = cta_pair_pipeline_state(tile);
      send_offsets(state);
      send_probabilities(state);
    }
  }

 private:
  // Each lane sends the offsets of two rows.
  __device__ __forceinline__ void send_offsets(const MlaPipelineState& state) const {
    static_assert(kQueryTile == 2 * 32);
    const int lane = thread_of_cta() % 32;
    const std::uint32_t barrier = map_to_cta(map_.softmax_offsets_full(false, state.index), peer_);
    const std::uint32_t to = map_to_cta(map_.softmax_offsets(false, state.index, 4 * lane), peer_);
    barrier_wait(map_.softmax_offsets_full(true, state.index), state.parity);
    const float2 pair = load_pair(map_.softmax_offsets(true, state.index, 4 * lane));
    dsmem_store_pair_async(to, barrier, pair.x, pair.y);
    if (lane == 0) barrier_arrive_expect_at(barrier, kQueryTile * 4);
    __syncwarp();
  }

  __device__ __forceinline__ void send_probabilities(const MlaPipelineState& state) const {
    const std::uint32_t barrier = map_to_cta(map_.probabilities_full(false, state.index), peer_);
    const std::uint32_t to = map_to_cta(map_.probabilities(false, state.index), peer_);
    barrier_wait(map_.probabilities_full(true, state.index), state.parity);
    if (thread_of_cta() % 32 == 0) {
      dsmem_copy(to, map_.probabilities(true, state.index), kQueryTile * kPanelRowBytes, barrier);
    }
    __syncwarp();
  }

  const CtaPairMap& map_;
  const std::uint32_t peer_;  // rank of the other CTA
  std::uint32_t tiles_ = 0;   // over all work tiles so far
};

// The scoring warpgroup of a CTA in a pair. It scores every second tile, with the queries in registers, and passes the
// probabilities to the output warpgroups of both CTAs. Softmax offsets and row sums pass from tile to tile, and so from
// CTA to CTA. Offsets are passed as soon as the scores are known, so that the other CTA, which scores the next tile
// meanwhile, has them in time. Sums are passed during the next tile's MMAs. DSMEM stores stall the issuing warp, so a
// dedicated warp sends what the other CTA needs early.
//
// The tile step is that of sm90_attention, except for when the softmax offset of a row moves: as soon as a score
// exceeds it by more than kMlaRescaleThreshold. This is known before the exponentials are computed, so no tile is
// recomputed. Rows that do not see a tile of the work tile have probabilities 0 there, which changes nothing.

inline constexpr int kCtaPairScoreBarrier = 1;  // scoring warpgroup

template <class C>
class CtaPairScorer {
 public:
  __device__ __forceinline__ CtaPairScorer(const MlaParams& params, const CtaPairMap& map)
      : params_(params), p_(params.attention), map_(map), peer_(1U - map.rank) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    // The CTA's first keys are loaded after its queries: with the loads of all CTAs in flight, they arrive late.
    const auto arrive_producer = [&] {
      if (!started_) named_arrive(kCtaPairQueryBarrier, kWarpgroup + 32);
      started_ = true;
    };
    std::uint32_t tile = first + ((first ^ map_.rank) & 1U);
    if (static_cast<int>(tiles_ - tile) <= 0) arrive_producer();
    if (first == tiles_) return;
    if (static_cast<int>(tiles_ - tile) > 0) {
      const ThreadRows thread_rows = thread_rows_of<C>(params_, work_tile, tile_row_of_thread());
      const BasicTileRange<int> plain = plain_tiles<C>(params_, work_tile);
      queries_.load(params_, work_tile, arrive_producer);
      const std::uint32_t begin = tile;
      float sum[2], factor[2];
      const auto add_last = [&] { add_sums(sum, factor, tile - 2, tile - 2 == first); };
#pragma unroll 1
      for (; static_cast<int>(tiles_ - tile) > 0; tile += 2) {
        Scores s;
        multiply(s, tile, [&] {
          if (tile != begin) add_last();
        });
        const int number = work_tile.begin + static_cast<int>(tile - first);
        score(s, thread_rows, tile, number, tile == first, number < plain.begin || number >= plain.end, sum, factor);
      }
      add_last();
    }
    ++work_tiles_;
  }

  // Waits for the sums after the last tile. They are not used, but may still be in flight to this CTA.
  __device__ __forceinline__ void await_last() const {
    if (tiles_ == 0 || ((tiles_ ^ map_.rank) & 1U) != 0) return;
    barrier_wait(map_.sums_full(), (tiles_ - 1) >> 1 & 1U);
  }

 private:
  using Scores = MlaScores;
  static constexpr int kHalfSteps = 4 * kCtaPairPanels;
  static constexpr int kEarlySteps = 8;

  // S = Q Kᵀ, each column part when it has landed. meanwhile() runs during the first kEarlySteps MMAs.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(Scores& s, std::uint32_t tile, Meanwhile meanwhile) {
    const MlaPipelineState state = cta_pair_pipeline_state(tile);
    barrier_wait(map_.half_full(0, state.index), state.parity);
    pin(s);
    wgmma_fence();
    queries_.template multiply<0, kEarlySteps>(s, map_.half(0, state.index));
    wgmma_commit();
    meanwhile();
    wgmma_fence();
    queries_.template multiply<kEarlySteps, kHalfSteps>(
        s, map_.half(0, state.index) + kEarlySteps / 4 * CtaPairMap::kPanelBytes);
    barrier_wait(map_.half_full(1, state.index), state.parity);
    wgmma_fence();
    queries_.template multiply<kHalfSteps, 2 * kHalfSteps>(s, map_.half(1, state.index));
    barrier_wait(map_.rope_full(state.index), state.parity);
    wgmma_fence();
    queries_.template multiply<2 * kHalfSteps, QueryRows<C>::kSteps>(s, map_.rope(state.index));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.shared_empty(state.index));
    __syncwarp();
  }

  // Computes probabilities from scores and stores them for the sender. `number`: the tile's index in its sequence.
  // `first`: of the work tile. `special`: not all rows see all keys of the tile.
  __device__ __forceinline__ void score(Scores& s, const ThreadRows& thread_rows, std::uint32_t tile, int number,
                                        bool first, bool special, float (&sum)[2], float (&factor)[2]) const {
    scale_and_mask<C>(p_, s, thread_rows, number, special);
    float shift[2];
    update_offsets(s, tile, first, shift, factor);
    // All warps have read the rotary keys, which the probabilities overwrite.
    named_sync(kCtaPairScoreBarrier, kWarpgroup);
    exponentiate<C>(p_, shift, s, sum);
    MlaProbabilities probability;
    pack<C>(s, probability);
    send_probabilities_of_tile(probability, cta_pair_pipeline_state(tile));
  }

  // Updates the softmax offsets with this tile. `factor`: rescales the sums of earlier tiles.
  __device__ __forceinline__ void update_offsets(const Scores& s, std::uint32_t tile, bool first, float (&shift)[2],
                                                 float (&factor)[2]) const {
    float row_max[2];
    max_scores(p_, s, row_max);
    const MlaPipelineState state = cta_pair_pipeline_state(tile);
    const MlaPipelineState before = cta_pair_pipeline_state(tile - 1);
    // Waits also at a work tile's first tile, which needs no offset: so no CTA is a tile ahead of what the other has
    // read.
    if (tile > 0) barrier_wait(map_.softmax_offsets_full(false, before.index), before.parity);
    const int thread = thread_of_warpgroup();
    const float2 pair = load_pair(map_.softmax_offsets(false, before.index, thread));
    const float old[2] = {first ? -INFINITY : pair.x, first ? -INFINITY : pair.y};
    float softmax_offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The offset is stored before the factor is computed, as the other CTA waits for it.
      softmax_offset[half] = offset_after(old[half], row_max[half]);
      shift[half] = softmax_offset[half] == -INFINITY ? 0.0F : -softmax_offset[half];
    }
    if (thread % 4 == 0)
      store_pair(map_.softmax_offsets(true, state.index, thread), softmax_offset[0], softmax_offset[1]);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(map_.softmax_offsets_full(true, state.index));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = factor_between(old[half], softmax_offset[half]);
  }

  // Stores probabilities for the output warpgroups of both CTAs. They overwrite the tile's rotary keys here, and in the
  // other CTA the probabilities of this CTA's tile before the last. Both are free, as the tile was loaded into a stage
  // that all output warpgroups had released.
  __device__ __forceinline__ void send_probabilities_of_tile(const MlaProbabilities& probability,
                                                             const MlaPipelineState& state) const {
    store_probabilities(map_.probabilities(true, state.index), probability);
    proxy_fence();
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.probabilities_full(true, state.index));
    __syncwarp();
  }

  // Row sums after this tile, from those after the previous tile. After the last tile, they are the work tile's sums.
  __device__ __forceinline__ void add_sums(const float (&sum)[2], const float (&factor)[2], std::uint32_t tile,
                                           bool first) {
    const int lane = thread_of_cta() % 32;
    const int thread = thread_of_warpgroup();
    if (tile > 0) barrier_wait(map_.sums_full(), (tile - 1) >> 1 & 1U);
    const float2 before = first ? float2{0.0F, 0.0F} : load_pair(map_.sums(thread));
    const float l[2] = {__fadd_rn(__fmul_rn(before.x, factor[0]), sum[0]),
                        __fadd_rn(__fmul_rn(before.y, factor[1]), sum[1])};
    const std::uint32_t barrier = map_to_cta(map_.sums_full(), peer_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 32 * 8);
    __syncwarp();
    dsmem_store_pair_async(map_to_cta(map_.sums(thread), peer_), barrier, l[0], l[1]);
    if (tile + 1 == tiles_) send_final_sums(l);
  }

  __device__ __forceinline__ void send_final_sums(const float (&l)[2]) const {
    const int lane = thread_of_cta() % 32;
    const float sums[2] = {sum_of_quad(l[0]), sum_of_quad(l[1])};
    const std::uint32_t stage = MlaPipelineState::of(work_tiles_).index;  // empty: the producer has waited for it
    const std::uint32_t barrier = map_to_cta(map_.final_sums_full(stage), peer_);
    if (lane == 0) barrier_arrive_expect_at(barrier, 16 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0) continue;
      const std::uint32_t final_sum = map_.final_sum(stage, tile_row_of_thread() + 8 * half);
      cuda::store_shared(final_sum, __float_as_uint(sums[half]));
      dsmem_store_async(map_to_cta(final_sum, peer_), barrier, __float_as_int(sums[half]));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(map_.final_sums_full(stage));
  }

  const MlaParams& params_;
  const cuda::AttentionParams& p_;
  const CtaPairMap& map_;
  const std::uint32_t peer_;      // rank of the other CTA
  std::uint32_t tiles_ = 0;       // over all work tiles so far
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  bool started_ = false;
  QueryRows<C> queries_;
};

// The output warpgroup of a CTA in a pair: half of the output columns of a work tile's 64 rows, in registers. It adds P
// V of every tile in order, whichever CTA has scored it.

template <class C>
class CtaPairOutputs {
 public:
  __device__ __forceinline__ CtaPairOutputs(const MlaParams& params, const CtaPairMap& map)
      : params_(params), map_(map) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    columns_.begin_work_tile();
    if (first == end) columns_.clear();
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first,
          work_tile.seq_info.length - (work_tile.begin + static_cast<int>(tiles_ - first)) * kMlaKeyTile);
    }
    float sum[2] = {0.0F, 0.0F};
    if (first != end) read_final_sums(sum);
    columns_.store_rows(params_, work_tile, static_cast<int>(map_.rank) * kCtaPairColumns, sum, first != end);
  }

 private:
  // O += P V of the next tile. `keys`: keys of the sequence from the tile's first key on.
  __device__ __forceinline__ void add(bool first, int keys) {
    const MlaPipelineState state = cta_pair_pipeline_state(tiles_);
    const bool own = ((tiles_ ^ map_.rank) & 1U) == 0;
    const std::uint32_t values = map_.values(own, state.index);
    barrier_wait(map_.values_full(own, state.index), state.parity);
    // Offsets are waited for before the probabilities, so that rescaling is done when these arrive. The sender of the
    // offsets has read the keys, so no other warp reads these columns.
    barrier_wait(map_.softmax_offsets_full(own, state.index), state.parity);
    const float2 pair = load_pair(map_.softmax_offsets(own, state.index, thread_of_warpgroup()));
    columns_.scale(columns_.update_offsets({pair.x, pair.y}));
    if (all_of_warp(keys < kMlaKeyTile)) columns_.clear_tail(values, keys);
    barrier_wait(map_.probabilities_full(own, state.index), state.parity);
    columns_.multiply(map_.probabilities(own, state.index), values, first);
    columns_.await();
    if (thread_of_cta() % 32 == 0) {
      if (own) {
        barrier_arrive(map_.own_empty(state.index));
      } else {
        barrier_arrive_at(map_to_cta(map_.shared_empty(state.index), 1U - map_.rank));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void read_final_sums(float (&sum)[2]) {
    const MlaPipelineState state = MlaPipelineState::of(work_tiles_);
    barrier_wait(map_.final_sums_full(state.index), state.parity);
    ++work_tiles_;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = load_float(map_.final_sum(state.index, tile_row_of_thread() + 8 * half));
    __syncwarp();
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < 2) barrier_arrive_at(map_to_cta(map_.final_sums_empty(state.index), lane));
    __syncwarp();
  }

  const MlaParams& params_;
  const CtaPairMap& map_;
  std::uint32_t tiles_ = 0;       // over all work tiles so far
  std::uint32_t work_tiles_ = 0;  // non-empty work tiles so far
  OutputColumns<C, kCtaPairColumns> columns_;
};

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) cta_pair_kernel(const __grid_constant__ typename C::Params params) {
  constexpr int kScoreRegisters = 240, kOtherRegisters = C::kFp8 ? 80 : 56;
  const std::uint32_t rank = rank_in_cluster();
  const CtaPairMap map{map_to_cta(kReservedBytes, rank), rank};
  if (threadIdx.x == 0) init_cta_pair_barriers(map, C::kFp8 ? kCtaPairDequantizers : 0);
  cuda::pdl_launch_dependents();
  __syncthreads();
  cluster_sync();
  cuda::pdl_wait();
  if (threadIdx.x < kWarpgroup) {
    reg_alloc<kScoreRegisters>();
    CtaPairScorer<C> scorer(params, map);
    for_each_work_tile(map, scorer);
    scorer.await_last();
  } else if (threadIdx.x < 2 * kWarpgroup) {
    reg_alloc<kMlaRegisters - kScoreRegisters - kOtherRegisters>();
    CtaPairOutputs<C> outputs(params, map);
    for_each_work_tile(map, outputs);
  } else {
    reg_dealloc<kOtherRegisters>();
    if (threadIdx.x / 32 == kCtaPairConsumers * kWarpgroup / 32) {
      CtaPairProducer<C>(params, map).run(static_cast<int>(blockIdx.x) / 2, static_cast<int>(gridDim.x) / 2);
    } else if (threadIdx.x / 32 == kCtaPairConsumers * kWarpgroup / 32 + 1) {
      CtaPairSender sender(map);
      for_each_work_tile(map, sender);
    } else if constexpr (C::kFp8) {
      CtaPairDequantizer<C> dequantizer(params, map);
      for_each_work_tile(map, dequantizer);
    }
  }
  // DSMEM of a CTA must not be accessed after it exits. All stores that the peer sent here have been waited for.
  __syncwarp();
  cluster_sync();
}

}  // namespace ringattn::sm90
