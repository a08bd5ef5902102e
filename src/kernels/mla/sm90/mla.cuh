// SPDX-License-Identifier: Apache-2.0
// MLA decode on Hopper, one CTA per row block. A work tile is one KV split for 64 rows of one KV head
// (decode/sm90/decode_common.cuh). One producer warp loads key tiles. Two consumer warpgroups compute attention: each
// holds half of the output columns of all 64 rows, and computes the scores of every second tile for both.
//
// In a cluster of two, the CTAs process the same key tiles for two row blocks. Each CTA multicasts half of every tile.
#pragma once

#include <type_traits>

#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla_common.cuh"

namespace ringattn::sm90 {

// Shared-memory layout and barriers of a CTA of mla_kernel (mla.cuh).
//
//   Q                [64 rows][576]        written and read by both consumer warpgroups
//   tiles            [2][64 keys][576]     written by TMA: keys, and values as their first 512 columns
//   probabilities    [64 rows][64 keys]    of an even tile, from the warpgroup that computed them to the other one.
//                                          Those of an odd tile overwrite its rotary keys.
//   sums             [64 rows][4]          l of the current KV split, one addend per thread of the row's quad
//   softmax offsets  [64 rows]             of the current KV split; −∞ until a key was visible
//   factors          [64 rows]             by which the outputs are rescaled before this tile is added
//   moved            [4 warps]             whether a factor of the warp's rows is not 1
//   barriers
//   work_tiles       [sequences + 1]       number of work tiles before each sequence (decode/sm90/decode_common.cuh)
//
// Q and tiles are stored in swizzled panels of 64 columns, as in the attention kernel (sm90_attention).

struct MlaMap {
  // Shared-memory address. In a cluster it is a shared::cluster address of this CTA: TMA writes and arrivals on a plain
  // address would go to rank 0.
  std::uint32_t base;

  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);
  static constexpr int kTileBytes = kMlaKeyTile * cuda::padded_row_bytes(kLatentDim);
  static constexpr int kTileOffset = kQueryTile * cuda::padded_row_bytes(kLatentDim);
  static constexpr int kProbabilityOffset = kTileOffset + kMlaStages * kTileBytes;
  static constexpr int kSumOffset = kProbabilityOffset + kQueryTile * kPanelRowBytes;
  static constexpr int kSoftmaxOffsetsOffset = kSumOffset + kQueryTile * 16;
  static constexpr int kFactorOffset = kSoftmaxOffsetsOffset + kQueryTile * 4;
  static constexpr int kMovedOffset = kFactorOffset + kQueryTile * 4;
  static constexpr int kBarrierOffset = kMovedOffset + 16;
  static constexpr int kBarriers = kMlaStages * (kMlaTileParts + 4);
  static constexpr int kWorkTileOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kAllSplitsOffset = kWorkTileOffset + (kMaxMlaSequences + 1) * 4;
  static constexpr int kBytes = kAllSplitsOffset + 4;
  static_assert(kBytes <= kMaxSharedBytes && kTileOffset % 1024 == 0 && kPanelBytes % 1024 == 0);

  __device__ std::uint32_t q() const { return at(0, 0, 0); }
  __device__ std::uint32_t tile(std::uint32_t stage) const { return at(kTileOffset, stage, kTileBytes); }
  __device__ std::uint32_t rope(std::uint32_t stage) const {
    return tile(stage) + static_cast<std::uint32_t>(kLatentDimV / kPanelColumns * kPanelBytes);
  }
  __device__ std::uint32_t probabilities(std::uint32_t number) const {
    return (number & 1U) == 0 ? at(kProbabilityOffset, 0, 0) : rope(1);
  }
  __device__ std::uint32_t sum(int row, int share) const {
    return at(kSumOffset, static_cast<std::uint32_t>(row * 4 + share), 4);
  }
  __device__ std::uint32_t softmax_offset(int row) const {
    return at(kSoftmaxOffsetsOffset, static_cast<std::uint32_t>(row), 4);
  }
  __device__ std::uint32_t factor(int row) const { return at(kFactorOffset, static_cast<std::uint32_t>(row), 4); }
  __device__ std::uint32_t moved(int warp) const { return at(kMovedOffset, static_cast<std::uint32_t>(warp), 4); }
  __device__ std::uint32_t work_tiles_before(int sequence) const {
    return at(kWorkTileOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // int32, 1 if this CTA processes all KV splits of its rows.
  __device__ std::uint32_t all_splits() const { return at(kAllSplitsOffset, 0, 0); }
  // Per stage: `full` per column part (TMA landed), `empty` per half of the latent columns. The warpgroups that own a
  // half, in all CTAs of the cluster, arrive on its `empty`. The rotary keys' columns are free when both halves are.
  __device__ std::uint32_t full(std::uint32_t stage, int part) const {
    return barrier(stage * kMlaTileParts + static_cast<std::uint32_t>(part));
  }
  __device__ std::uint32_t empty(std::uint32_t stage, std::uint32_t half) const {
    return barrier(kMlaStages * kMlaTileParts + 2 * stage + half);
  }
  // FP8 latent cache: the fp8 values of the rows that this CTA dequantizes have landed.
  __device__ std::uint32_t fp8_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 2) + stage);
  }
  // Per stage: the probabilities, offsets, factors and sums of a tile are written. Each warpgroup arrives on a barrier
  // of its own tiles. With one barrier for both, a warp that waits for the other warpgroup's tile could be released
  // before another warp of its own warpgroup has arrived for the previous tile.
  __device__ std::uint32_t probabilities_full(std::uint32_t stage) const {
    return barrier(kMlaStages * (kMlaTileParts + 3) + stage);
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t number) const { return at(kBarrierOffset, number, kBarrierBytes); }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// A tile's running number in the CTA gives its stage and the parity of its barriers.
__device__ __forceinline__ std::uint32_t stage_of(std::uint32_t number) { return number & 1U; }
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t number) { return number >> 1 & 1U; }
static_assert(kMlaStages == 2);

// Panels of a column part. The last part is the rotary keys.
inline constexpr int kPartPanels = 2;
inline constexpr int kHalfParts = 2;  // per half of the latent columns
inline constexpr int kRopePart = 2 * kHalfParts;
static_assert(kMlaTileParts == kRopePart + 1 && kRopePart * kPartPanels * kPanelColumns == kLatentDimV);
__device__ __forceinline__ int panels_of_part(int part) { return part < kRopePart ? kPartPanels : 1; }

// By one thread. `ctas`: per cluster. `dequantizers`: warps that dequantize fp8 values; 0 if TMA loads the elements.
__device__ __forceinline__ void init_mla_barriers(const MlaMap& map, int ctas, int dequantizers) {
  for (std::uint32_t stage = 0; stage < kMlaStages; ++stage) {
    for (int part = 0; part < kMlaTileParts; ++part) {
      barrier_init(map.full(stage, part), part == kRopePart || dequantizers == 0 ? 1 : dequantizers);
    }
    for (std::uint32_t half = 0; half < 2; ++half) barrier_init(map.empty(stage, half), ctas * kWarpgroup / 32);
    barrier_init(map.fp8_full(stage), 1);
    barrier_init(map.probabilities_full(stage), kWarpgroup / 32);
  }
  barrier_init_fence();
}

// Assigns work tiles to the CTAs of mla_kernel. By default CTA n takes work tiles n, n + gridDim.x, …, and a second
// launch merges the KV splits. If it takes no more waves, a CTA processes all KV splits of its rows in ascending order
// instead: it loads the queries once, merges each split itself and finishes the rows. Rows without a
// split are left to the second launch. Lengths are known only on the device, so all CTAs make the same choice there.
// The bits are the same either way.

// Fills the table of work tiles in shared memory. By one warp.
template <class C>
__device__ __forceinline__ void plan_work_tiles(const MlaParams& p, const MlaMap& map) {
  const int work_tiles = count_work_tiles<C>(p, map);
  if (p.whole == nullptr) {
    if (thread_of_cta() % 32 == 0) store_number(map.all_splits(), 0);
    return;
  }
  int max_work_tiles = 0;  // work tiles of a sequence
#pragma unroll 1
  for (int s = thread_of_cta() % 32; s < p.blocks.sequences; s += 32) {
    const int own = load_number(map.work_tiles_before(s + 1)) - load_number(map.work_tiles_before(s));
    max_work_tiles = own > max_work_tiles ? own : max_work_tiles;
  }
  const int stride = work_tile_stride(p);
  const int splits = static_cast<int>(__reduce_max_sync(0xffffffffU, static_cast<unsigned>(max_work_tiles))) / stride;
  const int ctas = static_cast<int>(gridDim.x);
  const auto waves = [ctas](int count) { return (count + ctas - 1) / ctas; };
  const int all_splits = waves(p.blocks.sequences * stride) * splits <= waves(work_tiles) ? 1 : 0;
  if (thread_of_cta() % 32 != 0) return;
  store_number(map.all_splits(), all_splits);
  if (blockIdx.x == 0) *p.whole = all_splits;
}

// Calls process(work_tile) for each work tile of this CTA. Work tiles of two row blocks of the same split have
// consecutive numbers.
template <class C, class Process>
__device__ __forceinline__ void for_each_work_tile(const MlaParams& p, const MlaMap& map, Process process) {
  const bool all_splits = load_number(map.all_splits()) != 0;
  const int stride = work_tile_stride(p);
  const int count = all_splits ? p.blocks.sequences * stride : work_tile_count(p, map);
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
    int number = n, end = n + 1;
    if (all_splits) {
      const int sequence = p.blocks.by_stride.quotient(n);
      number = load_number(map.work_tiles_before(sequence)) + n - sequence * stride;
      end = load_number(map.work_tiles_before(sequence + 1));  // at most `number` if the rows attend to no key
    }
#pragma unroll 1
    for (; number < end; number += stride) process(work_tile_of<C>(p, map, number));
  }
}

// The producer warp of mla_kernel: looks up pages and issues TMA loads of key tiles, one panel of one page at a time.
// Boxes after the last key of a sequence are skipped, so neither these rows nor their page-table entries are read.

template <class C>
class MlaProducer {
 public:
  // `rank`: of this CTA in its cluster.
  __device__ __forceinline__ MlaProducer(const typename C::Params& p, const MlaMap& map, std::uint32_t rank)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        own_boxes_(p.boxes.per_tile / C::kCtas),
        first_row_(static_cast<int>(rank) * own_boxes_ * p.boxes.rows) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    begin(work_tile);
    while (tile_ < work_tile.end) load_next(work_tile);
  }

  // The same tile by tile, for MlaDequantizer.
  __device__ __forceinline__ void begin(const DecodeWorkTile& work_tile) {
    tile_ = work_tile.begin;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next_boxes_[i] = find(work_tile, tile_ + i);
  }
  // Index of the next tile in its sequence.
  __device__ __forceinline__ int next() const { return tile_; }
  // True if the next tile's stage is empty.
  __device__ __forceinline__ bool has_free_stage() const {
    const std::uint32_t stage = stage_of(tiles_), parity = parity_of(tiles_) ^ 1U;
    return __all_sync(0xffffffffU,
                      barrier_ended(map_.empty(stage, 0), parity) && barrier_ended(map_.empty(stage, 1), parity)) != 0;
  }
  __device__ __forceinline__ void load_next(const DecodeWorkTile& work_tile) {
    const PageBox box = next_boxes_[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) next_boxes_[i] = next_boxes_[i + 1];
    next_boxes_[kAhead - 1] = find(work_tile, tile_ + kAhead);
    const int rows = box_rows_of(p_, work_tile.seq_info.length - tile_ * kMlaKeyTile);
    if constexpr (C::kFp8) {
      load_fp8(work_tile.kv_head, box, rows);
    } else {
      load_half<0>(work_tile.kv_head, box, rows);
      load_half<1>(work_tile.kv_head, box, rows);
    }
    ++tile_;
    ++tiles_;
  }

 private:
  static constexpr int kAhead = C::kFp8 ? 1 : 2;  // tiles whose pages are looked up in advance

  __device__ __forceinline__ PageBox find(const DecodeWorkTile& work_tile, int tile) const {
    return box_of_lane(p_, work_tile, tile, first_row_, own_boxes_);
  }

  // Loads this CTA's boxes of panels [kBegin, kEnd), multicast to the cluster if kForAll. Column `column` is the first
  // column of panel kBegin. Panel i arrives on barrier_of(i).
  template <int kBegin, int kEnd, bool kForAll, class BarrierOf>
  __device__ __forceinline__ void issue_loads(const CUtensorMap& map, int head, const PageBox& of_lane, int column,
                                              BarrierOf barrier_of) const {
    const std::uint32_t tile = warp_uniform(map_.tile(stage_of(tiles_)));
    for_boxes(of_lane, own_boxes_, [&](int i, const PageBox& box) {
      const std::uint32_t rows = tile + static_cast<std::uint32_t>((first_row_ + i * p_.boxes.rows) * kPanelRowBytes);
#pragma unroll
      for (int panel = kBegin; panel < kEnd; ++panel) {
        const std::uint32_t target = rows + static_cast<std::uint32_t>(panel * MlaMap::kPanelBytes);
        const int from = column + (panel - kBegin) * kPanelColumns;
        if constexpr (kForAll && C::kCtas > 1) {
          tma_multicast_page_box_once((1U << C::kCtas) - 1U, target, &map, barrier_of(panel), from, head, box.page,
                                      box.row);
        } else {
          tma_load_page_box_once(target, &map, barrier_of(panel), from, head, box.page, box.row);
        }
      }
    });
  }

  // Loads one half of a tile as soon as its columns are empty. The rotary keys are loaded with the second half. `rows`:
  // rows of the tile that boxes load. Each CTA multicasts its boxes to the cluster.
  template <int kHalf>
  __device__ __forceinline__ void load_half(int head, const PageBox& box, int rows) const {
    constexpr int kFirst = kHalf * kHalfParts, kEnd = kHalf == 0 ? kHalfParts : kMlaTileParts;
    const std::uint32_t stage = warp_uniform(stage_of(tiles_));
    barrier_wait(map_.empty(stage, kHalf), parity_of(tiles_) ^ 1U);
    if (kFirst <= lane_ && lane_ < kEnd) {
      barrier_arrive_expect(map_.full(stage, lane_), panels_of_part(lane_) * rows * kPanelRowBytes);
    }
    __syncwarp();
    constexpr int kPanel = kFirst * kPartPanels;
    issue_loads<kPanel, kHalf == 0 ? kEnd * kPartPanels : kLatentDim / kPanelColumns, true>(
        p_.k, head, box, kPanel * kPanelColumns, [&](int panel) { return map_.full(stage, panel / kPartPanels); });
  }

  // Loads the fp8 values of this CTA's rows, and the rotary keys for all CTAs.
  __device__ __forceinline__ void load_fp8(int head, const PageBox& box, int rows) const {
    const std::uint32_t stage = warp_uniform(stage_of(tiles_));
    const std::uint32_t parity = parity_of(tiles_) ^ 1U;
    const int rows_left = rows - first_row_;
    constexpr int kMax = kMlaKeyTile / C::kCtas;
    const int own = rows_left < 0 ? 0 : rows_left < kMax ? rows_left : kMax;
    barrier_wait(map_.empty(stage, 1), parity);
    if (lane_ == 0) barrier_arrive_expect(map_.fp8_full(stage), own * kLatentDimV);
    __syncwarp();
    issue_loads<kFp8Panel, kFp8Panel + kScaleBlocks, false>(p_.k, head, box, 0,
                                                            [&](int) { return map_.fp8_full(stage); });
    barrier_wait(map_.empty(stage, 0), parity);
    if (lane_ == 0) barrier_arrive_expect(map_.full(stage, kRopePart), rows * kPanelRowBytes);
    __syncwarp();
    constexpr int kRope = kLatentDimV / kPanelColumns;
    issue_loads<kRope, kRope + 1, true>(p_.rope, head, box, 0, [&](int) { return map_.full(stage, kRopePart); });
  }

  const typename C::Params& p_;
  const MlaMap& map_;
  const int lane_;
  const int own_boxes_;         // per tile, a power of two
  const int first_row_;         // this CTA's first row of a tile
  std::uint32_t tiles_ = 0;     // over all work tiles so far
  int tile_ = 0;                // the work tile's next tile
  PageBox next_boxes_[kAhead];  // boxes of the next tiles
};

// The dequantizing warps of mla_kernel with the FP8 latent cache. The first one is also the producer
//. In a cluster, each CTA dequantizes its half of a tile's rows and copies them to the other CTA.

inline constexpr int kDequantizers = (kMlaThreads - kMlaConsumerThreads) / 32;  // warps

template <class C>
class MlaDequantizer {
 public:
  __device__ __forceinline__ MlaDequantizer(const MlaFp8Params& p, const MlaMap& map, std::uint32_t rank)
      : map_(map),
        peer_(1U - rank),
        first_row_(static_cast<int>(rank) * (kDequantizers * Row::kRows) + warp() * Row::kRows),
        row_(p, first_row_),
        producer_(p, map, rank) {
    static_assert(C::kCtas * kDequantizers * Row::kRows == kMlaKeyTile && C::kCtas <= 2);
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const bool is_producer = warp() == 0;
    if (is_producer) producer_.begin(work_tile);
    float4 next = row_.scales(work_tile, work_tile.begin);
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end; ++tile, ++tiles_) {
      if (is_producer && producer_.next() == tile) producer_.load_next(work_tile);
      // Loads the next tile before this one is dequantized, if its stage is empty.
      if (is_producer && tile + 1 < work_tile.end && producer_.has_free_stage()) producer_.load_next(work_tile);
      const float4 scales = next;
      next = row_.scales(work_tile, tile + 1);
      dequantize(scales);
    }
  }

 private:
  using Row = Fp8Row<2 * C::kCtas>;

  static __device__ __forceinline__ int warp() { return (thread_of_cta() - kMlaConsumerThreads) / 32; }

  __device__ __forceinline__ void dequantize(const float4& scales) const {
    const std::uint32_t stage = stage_of(tiles_);
    const std::uint32_t tile = map_.tile(stage);
    const auto panel = [tile](int n) { return tile + static_cast<std::uint32_t>(n * MlaMap::kPanelBytes); };
    const int lane = thread_of_cta() % 32;
    constexpr int kRowBytes = Row::kRows * kPanelRowBytes;  // of one panel of this warp's rows
    barrier_wait(map_.fp8_full(stage), parity_of(tiles_));
    // The producer has waited for the other half, which the fp8 values were loaded into.
    barrier_wait(map_.empty(stage, 0), parity_of(tiles_) ^ 1U);
#pragma unroll
    for (int block = 0; block < kScaleBlocks; ++block) {
      row_.template dequantize<typename C::Element>(panel(kFp8Panel + block), panel(2 * block), panel(2 * block + 1),
                                                    Row::of_block(scales, block));
      proxy_fence();
      __syncwarp();
      const std::uint32_t full = map_.full(stage, block);
      if constexpr (C::kCtas > 1) {
        if (lane < 2) {
          const std::uint32_t rows = panel(2 * block + lane) + static_cast<std::uint32_t>(first_row_ * kPanelRowBytes);
          dsmem_copy_expected(map_to_cta(rows, peer_), rows, kRowBytes, map_to_cta(full, peer_));
        }
      }
      // The same warp of the other CTA sends as many bytes here.
      if (lane == 0) barrier_arrive_expect(full, C::kCtas > 1 ? kPartPanels * kRowBytes : 0);
      __syncwarp();
    }
  }

  const MlaMap& map_;
  const std::uint32_t peer_;  // rank of the other CTA in the cluster
  const int first_row_;
  const Row row_;
  MlaProducer<C> producer_;
  std::uint32_t tiles_ = 0;  // over all work tiles so far
};

// Epilogue of mla_kernel: stores the rows of a work tile as partials for the merge launch, or as outputs if the row has
// no other KV split. A CTA with all KV splits of its rows keeps the merged splits as a partial in
// global memory. Each thread reads back only what it wrote, so no synchronization is needed. The merge step is that of
// all kernels (kernels/attention/merge.hpp).

// True if this CTA does not hold merged earlier splits of the work tile's rows.
__device__ __forceinline__ bool begins_rows(const MlaMap& map, const DecodeWorkTile& work_tile) {
  return load_number(map.all_splits()) == 0 || work_tile.cache_split == work_tile.seq_info.begin_split;
}

// How the epilogue treats a row: it merges the CTA's earlier splits, stores a partial, or finishes the row.
struct RowTransition {
  bool attends;  // the row attends to keys of this split
  bool joins, ends;
};
template <class C>
__device__ __forceinline__ RowTransition transition_of(const MlaParams& p, const MlaMap& map,
                                                       const DecodeWorkTile& work_tile, const DecodeCoord& coord) {
  if (load_number(map.all_splits()) == 0) return {true, false, finishes(p, work_tile)};
  const RowKvSplits splits = splits_of<C>(p, work_tile, coord);
  const int split = work_tile.cache_split;
  const bool attends = splits.begin <= split && split < splits.end;
  return {attends, attends && split > splits.begin, split + 1 == splits.end};
}

// Stores a thread's elements of the rows after a work tile: its columns from `first_column` on. `has_tiles`: the work
// tile is not empty.
template <class C>
__device__ __forceinline__ void store_rows(const MlaParams& p, const MlaMap& map, const DecodeWorkTile& work_tile,
                                           const ThreadRows& thread_rows, int first_column, bool has_tiles,
                                           float (&o)[C::kColumns / 8][4]) {
  const int lane = thread_of_cta() % 4;
  const int block = first_column / 16;
  const bool first_columns = first_column == 0;
  const bool all_splits = load_number(map.all_splits()) != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = tile_row_of_thread() + 8 * half;
    const bool present = thread_rows.present[half];
    const DecodeCoord& coord = thread_rows.coord[half];
    const RowTransition transition = transition_of<C>(p, map, work_tile, coord);
    const bool attends = has_tiles && transition.attends;
    float softmax_offset = attends ? load_float(map.softmax_offset(tile_row)) : -INFINITY;
    float sum = sum_of_quad(attends ? load_float(map.sum(tile_row, lane)) : 0.0F);
    // With all splits in this CTA, the row's merged partial: each warpgroup has its own columns and its own (offset,
    // sum).
    float* const partial =
        p.partials.data == nullptr ? nullptr : partial_of(p, all_splits ? 0 : work_tile.cache_split, coord);
    auto* const outputs = reinterpret_cast<float4*>(partial) + 4 * block + lane;
    auto* const stats = reinterpret_cast<float2*>(partial + C::kDimV) + (all_splits && !first_columns ? 1 : 0);
    if (transition.joins) {
      const float2 before = __ldcg(stats);
      const MergeStep step = cuda::merge_partials(before.x, before.y, softmax_offset, sum, kOffsetLog2Factor);
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      constexpr int kAtOnce = 8;
#pragma unroll
      for (int first = 0; first < C::kColumns / 16; first += kAtOnce) {
        float4 merged[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) merged[n] = __ldcg(outputs + 4 * (first + n));
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float earlier[4] = {merged[n].x, merged[n].y, merged[n].z, merged[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& current = o[2 * (first + n) + i / 2][2 * half + i % 2];
            current = cuda::TensorArithmetic::join(earlier[i], current, step);
          }
        }
      }
    }
    // A row without a partial here is finished by another work tile, or by the merge launch.
    if (!transition.ends && attends && present) {
#pragma unroll
      for (int n = 0; n < C::kColumns / 16; ++n) {
        __stcg(outputs + 4 * n,
               float4{o[2 * n][2 * half], o[2 * n][2 * half + 1], o[2 * n + 1][2 * half], o[2 * n + 1][2 * half + 1]});
      }
      if (all_splits || (first_columns && lane == 0)) __stcg(stats, float2{softmax_offset, sum});
    }
    if (__any_sync(0xffffffffU, transition.ends) == 0) continue;
    const FinishedRow<C> finished(p.attention, coord, softmax_offset, sum);
    const bool writes = transition.ends && present;
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n += 4) {
      const auto two = [&](int i) { return finished.pack(o[n + i][2 * half], o[n + i][2 * half + 1]); };
      const uint4 eight = transpose_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
      if (writes) finished.write(first_column + 8 * (n + lane), eight);
    }
    if (writes && first_columns && lane == 0) finished.write_lse();
  }
}

// The consumer warpgroups of mla_kernel. They alternate at computing S and P of a tile, and pass P to the other
// warpgroup through shared memory. Each then adds P V of every tile, in order, to its own output columns.
// The tile step is that of sm90_attention, except for when the softmax offset of a row moves: as soon as a score
// exceeds it by more than kMlaRescaleThreshold. This is known before the exponentials are computed, so no tile is
// recomputed. Rows that do not see a tile of the work tile have probabilities 0 there, which changes nothing.

inline constexpr int kBothWarpgroupsBarrier = 1;  // both warpgroups. The next two ids are those of one warpgroup each.
inline constexpr int kOrderBarrier = 4;           // the second warpgroup may issue its scores

template <class C>
class MlaConsumer {
 public:
  __device__ __forceinline__ MlaConsumer(const MlaParams& params, const MlaMap& map)
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

  const MlaParams& params_;
  const cuda::AttentionParams& p_;
  const MlaMap& map_;
  const std::uint32_t warpgroup_;
  int first_column_ = 0;     // of this warpgroup's output columns
  std::uint32_t tiles_ = 0;  // over all work tiles so far
  float o_[C::kColumns / 8][4];
};

template <class C>
__global__ void __launch_bounds__(kMlaThreads, 1) mla_kernel(const __grid_constant__ typename C::Params params) {
  constexpr int kOtherRegisters = C::kFp8 ? 72 : 40;
  constexpr int kConsumerRegisters = (kMlaRegisters - kOtherRegisters) / 2;
  const std::uint32_t rank = C::kCtas > 1 ? rank_in_cluster() : 0;
  const MlaMap map{C::kCtas > 1 ? map_to_cta(kReservedBytes, rank) : kReservedBytes};
  if (threadIdx.x == 0) init_mla_barriers(map, C::kCtas, C::kFp8 ? kDequantizers : 0);
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (threadIdx.x / 32 == kMlaConsumerThreads / 32) plan_work_tiles<C>(params, map);
  __syncthreads();
  if constexpr (C::kCtas > 1) cluster_sync();
  const auto run = [&](auto&& worker) {
    for_each_work_tile<C>(params, map, [&](const DecodeWorkTile& work_tile) { worker.process(work_tile); });
  };
  if (threadIdx.x < kMlaConsumerThreads) {
    reg_alloc<kConsumerRegisters>();
    run(MlaConsumer<C>(params, map));
  } else {
    reg_dealloc<kOtherRegisters>();
    if constexpr (C::kFp8) {
      run(MlaDequantizer<C>(params, map, rank));
    } else {
      if (threadIdx.x / 32 == kMlaConsumerThreads / 32) run(MlaProducer<C>(params, map, rank));
    }
  }
  if constexpr (C::kCtas > 1) {  // DSMEM of a CTA must not be accessed after it exits
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace ringattn::sm90
