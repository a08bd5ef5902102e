// SPDX-License-Identifier: Apache-2.0
// Code shared by the three forms of sm90_mla: work tiles, pages, queries, FP8 rows, softmax offsets and output columns.
#pragma once

#include <type_traits>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm90/gemms.cuh"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/dequantize.cuh"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla.hpp"

namespace ringattn::sm90 {

// Work descriptors in shared memory. In CTA pairs and CTA groups, the producer warp finds the work tiles and passes
// each one to the other warps of its CTA through a double-buffered MlaWorkTileInfo.

// Stage and parity of the n-th use of a pipeline with two stages.
struct MlaPipelineState {
  std::uint32_t index, parity;

  static __device__ __forceinline__ MlaPipelineState of(std::uint32_t n) { return {n & 1U, n >> 1 & 1U}; }
};

// Ten int32 fields at `address` in shared memory.
struct MlaWorkTileInfo {
  // Value of `begin` that marks the end of the work tiles.
  static constexpr int kNoMore = -1;
  static constexpr int kBytes = 48;

  std::uint32_t address;

  __device__ __forceinline__ void write(const DecodeWorkTile& work_tile) const {
    set(0, work_tile.begin);
    set(1, work_tile.end);
    set(2, work_tile.seq_info.length);
    set(3, work_tile.seq_info.position);
    set(4, work_tile.seq_info.splits);
    set(5, work_tile.sequence);
    set(6, work_tile.kv_head);
    set(7, work_tile.block);
    set(8, work_tile.cache_split);
    set(9, work_tile.lag);
  }
  __device__ __forceinline__ void write_end() const { set(0, kNoMore); }
  // The fields that computing, loading and dequantizing warps need.
  __device__ __forceinline__ DecodeWorkTile read() const {
    DecodeWorkTile work_tile{};
    work_tile.begin = get(0);
    work_tile.end = get(1);
    work_tile.seq_info.length = get(2);
    work_tile.seq_info.position = get(3);
    work_tile.seq_info.splits = get(4);
    work_tile.sequence = get(5);
    work_tile.kv_head = get(6);
    work_tile.block = get(7);
    work_tile.cache_split = get(8);
    work_tile.lag = get(9);
    return work_tile;
  }

 private:
  __device__ __forceinline__ void set(int field, int number) const {
    store_number(address + static_cast<std::uint32_t>(4 * field), number);
  }
  __device__ __forceinline__ int get(int field) const {
    return load_number(address + static_cast<std::uint32_t>(4 * field));
  }
};

// Consumer side, by one warp: calls worker.process() for each work tile that the producer warp writes.
template <class Map, class Worker>
__device__ __forceinline__ void for_each_work_tile(const Map& map, Worker& worker) {
#pragma unroll 1
  for (std::uint32_t n = 0;; ++n) {
    const MlaPipelineState state = MlaPipelineState::of(n);
    barrier_wait(map.info_full(state.index), state.parity);
    const DecodeWorkTile work_tile = map.info(state.index).read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(state.index));
    if (work_tile.begin == MlaWorkTileInfo::kNoMore) break;
    worker.process(work_tile);
  }
}

// Producer side, by one warp.
template <class Map>
class WorkTileInfoWriter {
 public:
  __device__ __forceinline__ explicit WorkTileInfoWriter(const Map& map) : map_(map) {}

  // True if no work tile has been written.
  __device__ __forceinline__ bool none() const { return infos_ == 0; }
  // Waits until the next stage is empty.
  __device__ __forceinline__ void await() const {
    const MlaPipelineState state = MlaPipelineState::of(infos_);
    barrier_wait(map_.info_empty(state.index), state.parity ^ 1U);
  }
  __device__ __forceinline__ void send(const DecodeWorkTile& work_tile) {
    if (thread_of_cta() % 32 == 0) info().write(work_tile);
    send();
  }
  __device__ __forceinline__ void send_end() {
    await();
    if (thread_of_cta() % 32 == 0) info().write_end();
    send();
  }

 private:
  __device__ __forceinline__ MlaWorkTileInfo info() const { return map_.info(MlaPipelineState::of(infos_).index); }
  __device__ __forceinline__ void send() {
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.info_full(MlaPipelineState::of(infos_).index));
    ++infos_;
  }

  const Map& map_;
  std::uint32_t infos_ = 0;
};

// The KV splits of a launch (FixedKvSplits has those of the other kernels).
struct LaunchKvSplits {
  static __device__ __forceinline__ int tiles(const MlaParams& p) { return 1 << p.split_tiles_log; }
  static __device__ __forceinline__ int of_tile(const MlaParams& p, int tile) { return tile >> p.split_tiles_log; }
};

// Finds the work tiles of a step by one warp and without a table in shared memory (decode/sm90/decode_common.cuh). Each
// lane counts the work tiles of consecutive sequences.

template <class C>
class WorkTileFinder {
 public:
  __device__ __forceinline__ explicit WorkTileFinder(const MlaParams& p)
      : p_(p), lane_(thread_of_cta() % 32), each_((p.blocks.sequences + 31) / 32) {}

  // Returns the number of work tiles.
  __device__ __forceinline__ int count() {
    int own = 0;
#pragma unroll 1
    for (int i = 0; i < each_; ++i) own += work_tiles_of(lane_ * each_ + i);
    own_ = own;
    before_ = before(own);
    return __shfl_sync(0xffffffffU, before_ + own, 31);
  }
  __device__ __forceinline__ DecodeWorkTile find(int number) const {
    // Finds the last lane with at most `number` work tiles before it. Then the lanes split its sequences and search
    // again.
    const int lane = __popc(__ballot_sync(0xffffffffU, before_ <= number)) - 1;
    const int sequences_before = __shfl_sync(0xffffffffU, before_, lane);
    static_assert(kMaxMlaSequences <= 32 * 32);
    const int of_lane = __shfl_sync(0xffffffffU, own_, lane);
    const int own = lane_ >= each_ ? 0 : each_ == 1 ? of_lane : work_tiles_of(lane * each_ + lane_);
    const int first = sequences_before + before(own);
    const int nth = __popc(__ballot_sync(0xffffffffU, lane_ < each_ && first <= number)) - 1;
    return work_tile_in<C>(p_, lane * each_ + nth, __shfl_sync(0xffffffffU, first, nth), number);
  }

 private:
  __device__ __forceinline__ int work_tiles_of(int sequence) const {
    if (sequence >= p_.blocks.sequences) return 0;
    return sequence_of<C>(p_, sequence).splits * p_.attention.kv_heads * p_.blocks.count;
  }
  // Exclusive prefix sum over the lanes.
  __device__ __forceinline__ int before(int own) const {
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, sum, step);
      if (lane_ >= step) sum += other;
    }
    return sum - own;
  }

  const MlaParams& p_;
  const int lane_;
  const int each_;  // sequences per lane
  int own_ = 0;     // work tiles of the lane's sequences
  int before_ = 0;  // work tiles of earlier lanes
};

// TMA boxes of a key tile: each is a run of rows within one page. Lane i looks up box i, and one lane issues all loads.
// If each lane issued its own, the instructions of the lanes would serialize, as TMA operands are in uniform registers.

// This lane's box of the tile, among the `boxes` boxes that start at the tile's row `first_row`. row = -1: no keys.
__device__ __forceinline__ PageBox box_of_lane(const MlaParams& p, const DecodeWorkTile& work_tile, int tile,
                                               int first_row, int boxes) {
  const int lane = thread_of_cta() % 32;
  const int key = tile * kMlaKeyTile + first_row + lane * p.boxes.rows;
  if (lane >= boxes || tile >= work_tile.end || key >= work_tile.seq_info.length) return {0, -1};
  const int here = key - work_tile.lag;
  if (p.table.pages == nullptr) return {work_tile.sequence, here};
  return {__ldcg(p.table.pages + work_tile.sequence * p.table.stride + (here >> p.table.page_log)),
          here & ((1 << p.table.page_log) - 1)};
}

// Rows of a tile that its boxes load. `left`: keys of the sequence from the tile's first key on.
__device__ __forceinline__ int box_rows_of(const MlaParams& p, int left) {
  const int keys = left < kMlaKeyTile ? left : kMlaKeyTile;
  return (keys + p.boxes.rows - 1) & -p.boxes.rows;  // boxes.rows is a power of two
}

// Calls visit(i, box) from one lane for each of the warp's first `count` boxes, up to the first box without keys.
template <class Visit>
__device__ __forceinline__ void for_boxes(const PageBox& of_lane, int count, Visit visit) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const PageBox box{__shfl_sync(0xffffffffU, of_lane.page, i), __shfl_sync(0xffffffffU, of_lane.row, i)};
    if (box.row < 0) break;
    if (elect_one()) visit(i, box);
  }
  __syncwarp();
}

// The 64 query rows of a work tile in the registers of the scoring warpgroup, Q Kᵀ, masking, and stores of
// probabilities. Used by CTA pairs and CTA groups.

using MlaScores = float[kMlaKeyTile / 8][4];
using MlaProbabilities = std::uint32_t[kMlaKeyTile / 16][4];

// A fragments of S = Q Kᵀ.
template <class C>
class QueryRows {
 public:
  static constexpr int kSteps = kLatentDim / 16;

  // Loads the queries. Missing rows are zeros. Calls issued() once the loads are issued.
  template <class Issued>
  __device__ __forceinline__ void load(const MlaParams& params, const DecodeWorkTile& work_tile, Issued issued) {
    const cuda::AttentionParams& p = params.attention;
    const auto* const q = static_cast<const std::uint16_t*>(p.q.data);
    const int rows = rows_of(params, work_tile);
    const std::uint16_t* row[2];
    bool present[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = tile_row_of_thread() + 8 * half;
      present[half] = tile_row < rows;
      const DecodeCoord coord = coord_of(params, work_tile, tile_row < rows ? tile_row : 0);
      row[half] = q + coord.row * p.q.token_stride + coord.query_head * p.q.head_stride;
    }
    const bool aligned =
        ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p.q.token_stride | p.q.head_stride))) &
         15U) == 0;
    const int lane = thread_of_cta() % 4;
    uint4 chunk[kSteps / 2][2];  // 32 columns per quad
    const auto load = [&](auto is_aligned) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunk[i][half] = uint4{0, 0, 0, 0};
          if (present[half]) chunk[i][half] = load_elements(row[half] + (i * 4 + lane) * 8, is_aligned);
        }
      }
    };
    if (aligned) {
      load(std::true_type());
    } else {
      load(std::false_type());
    }
    issued();
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 turned = transpose_in_quad(chunk[i][half], lane);
        q_[2 * i][half] = turned.x;
        q_[2 * i][2 + half] = turned.y;
        q_[2 * i + 1][half] = turned.z;
        q_[2 * i + 1][2 + half] = turned.w;
      }
    }
  }

  // Issues k steps [kBegin, kEnd) of 16 columns. `panels`: panels of the keys, from that of kBegin on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void multiply(MlaScores& s, std::uint32_t panels) const {
    constexpr int kPanelSteps = kPanelColumns / 16;
    const std::uint32_t k = warp_uniform(descriptor_low(panels));
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
      const int i = step - kBegin / kPanelSteps * kPanelSteps;
      const auto at =
          static_cast<std::uint32_t>((i / kPanelSteps * cuda::panel_bytes(kMlaKeyTile) + i % kPanelSteps * 32) >> 4);
      Wgmma<typename C::Element, kMlaKeyTile>::rk(s, q_[step], descriptor(k + at), step > 0);
    }
  }

 private:
  std::uint32_t q_[kSteps][4];
};

// Scales scores if the spec scales them before masking. `special`: not all rows see all keys of the tile, so it is
// masked. `number`: the tile's index in its sequence.
template <class C>
__device__ __forceinline__ void scale_and_mask(const cuda::AttentionParams& p, MlaScores& s,
                                               const ThreadRows& thread_rows, int number, bool special) {
  if (p.softmax.scaled_first) scale_scores(p, s);
  if (!special) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mask_scores<0, kMlaKeyTile / 8>(p, s, half, visible_columns<C>(thread_rows, half, number));
  }
}

// Stores a warp's rows of a tile's probabilities as the A operand of P V. stmatrix stores four 8x8 matrices at a time,
// and each lane gives the address of one row.
__device__ __forceinline__ void store_probabilities(std::uint32_t to, const MlaProbabilities& probability) {
  const int lane = thread_of_cta() % 32;
  const int row = thread_of_warpgroup() / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kMlaKeyTile / 16; ++step) {
    store_matrix(to + cuda::swizzled(row, 2 * step + lane / 16), probability[step]);
  }
}

// When the softmax offset of a row moves in MLA decode: as soon as a score exceeds it by more than
// kMlaRescaleThreshold.

// Row maxima of S · c in a tile, for a thread's two rows. Both are reduced together to overlap the shuffles' latency.
template <int kBlocks>
__device__ __forceinline__ void max_scores(const cuda::AttentionParams& p, const float (&s)[kBlocks][4],
                                           float (&row_max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_max[half] = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int j = 1; j < kBlocks; ++j) row_max[half] = fmaxf(row_max[half], fmaxf(s[j][2 * half], s[j][2 * half + 1]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) row_max[half] = __fmul_rn(over_quad(row_max[half]), p.softmax.exponent_base2);
}

// The softmax offset after a tile, from the one before it. −∞: no key was visible so far. Branch-free.
__device__ __forceinline__ float offset_after(float old, float row_max) {
  const int unset = static_cast<int>(old == -INFINITY);
  const int any = static_cast<int>(row_max > -INFINITY);
  const int exceeds = static_cast<int>(__fsub_rn(row_max, old) > kMlaRescaleThreshold);
  return ((unset & any) | (~unset & exceeds)) != 0 ? row_max : old;
}

// True if a row that has seen a key gets a new offset, so that its sum and outputs must be rescaled.
__device__ __forceinline__ bool offset_moves(float old, float now) { return old != -INFINITY && now != old; }
// Factor by which a row's sum and outputs are rescaled.
__device__ __forceinline__ float factor_between(float old, float now) {
  return offset_moves(old, now) ? cuda::exp2_approx(__fsub_rn(old, now)) : 1.0F;
}

// Some output columns of a work tile's 64 rows in the registers of a warpgroup, where several CTAs share the work tile:
// O += P V, tile by tile in order. Columns from kDimV on are undefined and are not stored.

// Makes a warp-uniform condition known as uniform to the compiler.
__device__ __forceinline__ bool all_of_warp(bool holds) { return __all_sync(0xffffffffU, holds) != 0; }

inline constexpr int kOutputBarrier = 2;  // output warpgroup

template <class C, int kColumns>
class OutputColumns {
 public:
  // Rescale factors of a thread's two rows, and whether any factor of the warp is not 1.
  struct Rescale {
    float factor[2];
    bool any;
  };

  __device__ __forceinline__ void begin_work_tile() { softmax_offset_[0] = softmax_offset_[1] = -INFINITY; }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0F;
    }
  }

  __device__ __forceinline__ float softmax_offset(int half) const { return softmax_offset_[half]; }
  // Sets the softmax offsets after the next tile. Returns the factors for the outputs of earlier tiles.
  __device__ __forceinline__ Rescale update_offsets(const float (&softmax_offsets)[2]) {
    Rescale rescale;
    bool mine = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale.factor[half] = factor_between(softmax_offset_[half], softmax_offsets[half]);
      mine = mine || offset_moves(softmax_offset_[half], softmax_offsets[half]);
      softmax_offset_[half] = softmax_offsets[half];
    }
    rescale.any = !all_of_warp(!mine);
    return rescale;
  }
  __device__ __forceinline__ void scale(const Rescale& rescale) {
    if (!rescale.any) return;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = __fmul_rn(o_[n][i], rescale.factor[i / 2]);
    }
  }

  // Issues O += P V of a tile. `first`: of the work tile.
  __device__ __forceinline__ void multiply(std::uint32_t probabilities, std::uint32_t values, bool first) {
    const std::uint32_t p = warp_uniform(descriptor_low(probabilities));
    const std::uint32_t v = warp_uniform(descriptor_low(values, kPanelBytes));
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMlaKeyTile / 16; ++step) {
      Wgmma<typename C::Element, kColumns>::sv(
          o_, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)), step > 0 || !first);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void await() {
    wgmma_wait<0>();
    pin(o_);
  }

  // Rows of a tile after the sequence's last key hold other data, or are left from an earlier tile. Their probabilities
  // are 0, but 0 · ∞ is NaN, so they are cleared. By the whole warpgroup, when no other warp reads these columns.
  __device__ __forceinline__ void clear_tail(std::uint32_t values, int keys) const {
    constexpr int kChunks = kColumns / 8;
#pragma unroll 1
    for (int i = keys * kChunks + thread_of_warpgroup(); i < kMlaKeyTile * kChunks; i += kWarpgroup) {
      const int chunk = i % kChunks;
      cuda::store_shared(
          values + static_cast<std::uint32_t>(chunk / 8 * kPanelBytes) + cuda::swizzled(i / kChunks, chunk % 8),
          uint4{0, 0, 0, 0});
    }
    proxy_fence();
    named_sync(kOutputBarrier, kWarpgroup);
  }

  // `sum`: l of this thread's rows. `has_tiles`: the work tile is not empty.
  __device__ __forceinline__ void store_rows(const MlaParams& params, const DecodeWorkTile& work_tile, int first_column,
                                             const float (&sum)[2], bool has_tiles) const {
    const int lane = thread_of_cta() % 4;
    const bool is_leader = first_column == 0 && lane == 0;
    const int rows = rows_of(params, work_tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = tile_row_of_thread() + 8 * half;
      const bool present = tile_row < rows;
      const DecodeCoord coord = coord_of(params, work_tile, present ? tile_row : rows - 1);
      if (!finishes(params, work_tile)) {
        // A row without a partial here is finished by another work tile, or by the merge launch.
        if (!has_tiles || !present) continue;
        auto* const outputs = reinterpret_cast<float4*>(partial_of(params, work_tile, coord) + first_column);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          if (first_column + 16 * n >= C::kDimV) break;
          __stcg(outputs + 4 * n + lane, float4{o_[2 * n][2 * half], o_[2 * n][2 * half + 1], o_[2 * n + 1][2 * half],
                                                o_[2 * n + 1][2 * half + 1]});
        }
        if (is_leader) store_stats(params, work_tile, 0, 1, tile_row, coord, float2{softmax_offset_[half], sum[half]});
        continue;
      }
      const FinishedRow<C> finished(params.attention, coord, softmax_offset_[half], sum[half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 4) {
        if (first_column + 8 * n >= C::kDimV) break;
        const auto two = [&](int i) { return finished.pack(o_[n + i][2 * half], o_[n + i][2 * half + 1]); };
        const uint4 eight = transpose_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
        if (present) finished.write(first_column + 8 * (n + lane), eight);
      }
      if (is_leader && present) finished.write_lse();
    }
  }

 private:
  static constexpr int kPanelBytes = cuda::panel_bytes(kMlaKeyTile);

  float softmax_offset_[2];  // of this thread's rows
  float o_[kColumns / 8][4];
};

// Dequantization of the FP8 latent cache (kernels/quant/latent_rows.hpp) in shared memory. TMA loads the fp8 values, in
// blocks of 128 columns, into those panels of a tile that are dequantized last. Rotary keys are loaded to their final
// place. Warps dequantize the blocks in order, with the bits of dequantize_latent_rows(). The tile then is as TMA would
// have loaded it from a 16-bit latent cache.
//
// Panels 0 to 7 of a tile hold its latent columns, two panels per block of 128. The fp8 values of block k are loaded
// into panel 4 + k and dequantized to panels 2k and 2k + 1. The fp8 values that these panels held have been read by
// then, or are being read by the threads of the same row, which are in one warp.

inline constexpr int kScaleBlocks = kLatentDimV / kLatentScaleBlock;
inline constexpr int kFp8Panel = 4;  // the panel that the fp8 values of block 0 are loaded into
static_assert(kScaleBlocks == 4 && kLatentScaleBlock == kPanelRowBytes && kLatentScaleBlock == 2 * kPanelColumns);

// Dequantizes 16 · kChunks values of a row, from 16-byte chunk `first` of their block on. They go to one panel.
template <class Element, int kChunks>
__device__ __forceinline__ void dequantize_fp8(std::uint32_t fp8, std::uint32_t panel, int row, int first,
                                               float scale) {
  uint4 words[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) words[i] = cuda::load_shared_16(fp8 + cuda::swizzled(row, first + i));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint2 a = eight_bits<Element, true>(words[i].x, scale);
    const uint2 b = eight_bits<Element, true>(words[i].y, scale);
    const uint2 c = eight_bits<Element, true>(words[i].z, scale);
    const uint2 d = eight_bits<Element, true>(words[i].w, scale);
    const int chunk = 2 * (first % 4 + i);
    cuda::store_shared(panel + cuda::swizzled(row, chunk), uint4{a.x, a.y, b.x, b.y});
    cuda::store_shared(panel + cuda::swizzled(row, chunk + 1), uint4{c.x, c.y, d.x, d.y});
  }
}

// One lane's part of a tile's rows.
template <int kThreads>  // per row: 1, 2 or 4 lanes of a warp
class Fp8Row {
 public:
  static constexpr int kRows = 32 / kThreads;                       // per warp
  static constexpr int kChunks = kThreads == 1 ? 4 : 8 / kThreads;  // dequantized at a time
  static constexpr int kTimes = 8 / (kThreads * kChunks);           // per block

  // `first`: the warp's first row.
  __device__ __forceinline__ Fp8Row(const MlaFp8Params& p, int first)
      : p_(p), row_(first + thread_of_cta() % 32 % kRows), chunk_(thread_of_cta() % 32 / kRows * kChunks) {}

  // The scales of this lane's row of a tile. 0 if the row has no key.
  __device__ __forceinline__ float4 scales(const DecodeWorkTile& work_tile, int tile) const {
    const int key = tile * kMlaKeyTile + row_;
    if (tile >= work_tile.end || key >= work_tile.seq_info.length) return {0.0F, 0.0F, 0.0F, 0.0F};
    const int here = key - work_tile.lag;
    const PageTable& table = p_.table;
    const bool paged = table.pages != nullptr;
    const int page =
        paged ? __ldcg(table.pages + work_tile.sequence * table.stride + (here >> table.page_log)) : work_tile.sequence;
    const int row = paged ? here & ((1 << table.page_log) - 1) : here;
    return __ldcg(reinterpret_cast<const float4*>(p_.scales.at(page, row, work_tile.kv_head)));
  }

  // Dequantizes this lane's chunks of a block.
  template <class Element>
  __device__ __forceinline__ void dequantize(std::uint32_t fp8, std::uint32_t left, std::uint32_t right,
                                             float scale) const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int first = chunk_ + i * kChunks;
      dequantize_fp8<Element, kChunks>(fp8, first < 4 ? left : right, row_, first, scale);
    }
  }

  static __device__ __forceinline__ float of_block(const float4& scales, int block) {
    return block == 0 ? scales.x : block == 1 ? scales.y : block == 2 ? scales.z : scales.w;
  }

 private:
  const MlaFp8Params& p_;
  const int row_;
  const int chunk_;  // this lane's first chunk of 16 values of a block
};

}  // namespace ringattn::sm90
