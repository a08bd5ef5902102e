// SPDX-License-Identifier: Apache-2.0
// Decode of few rows, up to 16 for each KV head: a cluster of CTAs computes a work tile together, and each CTA has a
// slice of the output columns. The CTAs score the tiles in turn and exchange the probabilities through distributed
// shared memory. Each CTA then adds P V of every tile, in order, for its own columns. So the chain of additions of each
// output element is that of prefill. A cluster may be a single CTA.
//
// Tiles are thus scored before the tiles ahead of them are complete. This works because softmax_offsets rarely move:
// they are taken from the work tile's first tile, which every CTA scores for itself, or from the states of a prefix. If
// an offset moves or is set later, the work tile has failed. The cluster's first CTA recomputes failed work tiles tile
// by tile at the end, as decode_kernel does.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/column_outputs.cuh"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"
#include "kernels/decode/sm90/sliced_outputs.cuh"

namespace ringattn::sm90 {

// The scoring warps of the sliced kernel. They score a tile together, some blocks of 16 keys each, with operands
// swapped: keys are the M of the mma and query rows the N. The scores are prefill's, transposed, since each is the same
// chain of additions. A warp's probabilities go to a score stage in every CTA of the cluster.

inline constexpr int kScoreBarrier = 2;    // named barrier of all scoring threads
inline constexpr int kScoringBarrier = 3;  // named barrier of the first scoring warpgroup

// A scoring thread's accumulators: [2 · block + half of the rows].
template <class C>
using ScoreFragments = float[2 * C::kScoreBlocks][4];

// A warp's first block of 16 keys in a tile, and whether the warp has a `mine`-th block.
template <class C>
__device__ __forceinline__ int first_score_block() {
  return thread_of_cta() / 32 % C::kScoringWarpgroupWarps * C::kScoreBlocks;
}
template <class C>
__device__ __forceinline__ bool has_score_block(int mine) {
  constexpr int kBlocks = C::kKeyTile / 16;
  return kBlocks == C::kScoreBlocks * C::kScoringWarpgroupWarps || first_score_block<C>() + mine < kBlocks;
}

// K tiles of 16-bit elements in TMA's layout.
template <class C>
class TileKeys {
 public:
  static constexpr bool kByRows = false;    // no separate code for up to 8 rows
  static constexpr bool kHasUsual = false;  // no separate loop for usual tiles

  __device__ __forceinline__ explicit TileKeys(const ColumnSliceMap<C>& map) : map_(map), lane_(thread_of_cta() % 32) {}

  __device__ __forceinline__ void begin(const WorkTileInfo&) {}

  // Eight columns of a query row in the order of shared memory.
  __device__ __forceinline__ static uint4 permuted(const uint4& columns) { return columns; }

  // Loads a work tile's query rows, which stay in shared memory until all warps have finished it.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      std::uint32_t both[4];  // rows 0 … 7 and 8 … 15, of 8 columns and of the next 8
      cuda::load_matrix(both, map_.q(lane_ % 8 + lane_ / 16 * 8, 2 * step + lane_ / 8 % 2));
      q_[step][0][0] = both[0];
      q_[step][0][1] = both[1];
      q_[step][1][0] = both[2];
      q_[step][1][1] = both[3];
    }
  }

  // Skips the next K tile, which another scoring warpgroup scores.
  __device__ __forceinline__ void skip() { stage_.advance(); }

  // Adds K Qᵀ of the next K tile to `s`. `more`: there are more than 8 rows.
  __device__ __forceinline__ void add_qk(ScoreFragments<C>& s, int, bool more) {
    constexpr int kSteps = C::kDim / 16;
    constexpr int kMine = C::kScoreBlocks;
    using Mma = cuda::MmaTraits<typename C::Element>;
    const PipelineState<C::kKStages> stage = stage_;
    stage_.advance();
    barrier_wait(map_.k_full(stage.index), stage.parity);
    const std::uint32_t tile =
        map_.k(stage.index) + cuda::swizzled(first_score_block<C>() * 16 + lane_ % 16, lane_ / 16);
    // Keys are loaded two k16 steps ahead of their mma.
    std::uint32_t keys[3][kMine][4];
    const auto fetch = [&](int step) {
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        if (!has_score_block<C>(mine)) continue;
        cuda::load_matrix(keys[step % 3][mine], cuda::at_columns<C::kKeyTile>(tile, step) +
                                                    static_cast<std::uint32_t>(mine * 16 * kPanelRowBytes));
      }
    };
    fetch(0);
    fetch(1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 2 < kSteps) fetch(step + 2);
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        if (!has_score_block<C>(mine)) continue;
        Mma::mma(s[2 * mine], keys[step % 3][mine], q_[step][0][0], q_[step][0][1], s[2 * mine]);
        if (more) Mma::mma(s[2 * mine + 1], keys[step % 3][mine], q_[step][1][0], q_[step][1][1], s[2 * mine + 1]);
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.k_empty(stage.index));
  }

 private:
  const ColumnSliceMap<C>& map_;
  const int lane_;
  PipelineState<C::kKStages> stage_;  // the next K tile that this CTA scores
  // For each 16 columns: B fragments of rows 0 … 7 and of rows 8 … 15.
  std::uint32_t q_[C::kDim / 16][2][2];
};

// A thread scores keys lane / 4 and lane / 4 + 8 of each of its warp's blocks, for query rows 2t, 2t + 1, 2t + 8 and 2t
// + 9, where t is lane % 4. If there are several scoring warpgroups, the first one fixes the softmax_offsets, and all
// take the CTA's tiles in turn. Keys supplies K tiles as fragments (TileKeys).
template <class C, class Keys = TileKeys<C>>
class Scorer {
 public:
  __device__ __forceinline__ Scorer(const typename C::Params& params, const ColumnSliceMap<C>& map, std::uint32_t rank,
                                    const Keys& keys)
      : params_(params),
        p_(params.attention),
        map_(map),
        rank_(rank),
        scoring_warpgroup_(C::kScoringWarpgroups == 1 ? 0 : thread_of_cta() / 32 / C::kScoringWarpgroupWarps),
        warp_(thread_of_cta() / 32 % C::kScoringWarpgroupWarps),
        lane_(thread_of_cta() % 32),
        score_at_(ScoreStage::block<kMine>(block(0), 0)),
        chunk_at_(ScoreStage::chunk(lane_ % 8, lane_ / 8 % 2)),
        unrounded_p_at_(map.unrounded_p(0, row_at(0, 0), block(0) * 16 + lane_ / 4)),
        keys_(keys) {}

  __device__ __forceinline__ void process(const WorkTileInfo& info) {
    const int tile_begin = info.get(WorkTileInfo::kBegin);
    const int tile_end = info.get(WorkTileInfo::kEnd);
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(tile_end - tile_begin);
    if (begin == tiles_) return;
    rows_count_ = info.get(WorkTileInfo::kRows);
    keys_.begin(info);
    const DecodeWorkTile work_tile = info.work_tile(params_);
    load_queries(work_tile);
    if constexpr (Keys::kByRows) {
      if (rows_count_ > 8) {
        score_tiles(info, work_tile, begin, std::true_type());
      } else {
        score_tiles(info, work_tile, begin, std::false_type());
      }
    } else {
      score_tiles(info, work_tile, begin, rows_count_ > 8);
    }
  }

  // After all work tiles, waits until no CTA reads or will acknowledge what this CTA has sent. Then it may exit.
  __device__ __forceinline__ void drain() const {
    if (tiles_ <= rank_) return;
    const std::uint32_t own = (tiles_ - 1 - rank_) / C::kSlices;  // index of this CTA's last tile among its own
#pragma unroll
    for (std::uint32_t back = 0; back < C::kScoreStages / C::kSlices; ++back) {
      if (back > own) break;
      const PipelineStateAt<C::kScoreStages> turn(rank_ + (own - back) * C::kSlices);
      barrier_wait(map_.score_empty(turn.index), turn.parity);
    }
  }

 private:
  static constexpr int kMine = C::kScoreBlocks;  // a warp's: warp · kMine, …

  using Scores = ScoreFragments<C>;

  __device__ __forceinline__ int block(int mine) const { return warp_ * kMine + mine; }
  __device__ __forceinline__ bool has(int mine) const { return has_score_block<C>(mine); }
  // The query row, of 16, of element `i` of a block's fragment.
  __device__ __forceinline__ int row_at(int half, int i) const { return 8 * half + lane_ % 4 * 2 + i % 2; }

  // Scores the warpgroup's tiles of a work tile whose first tile has the number `begin`. more: there are more than 8
  // rows.
  template <class More>
  __device__ __forceinline__ void score_tiles(const WorkTileInfo& info, const DecodeWorkTile& work_tile,
                                              std::uint32_t begin, More more) {
    const std::uint32_t turn = fixed_++;
    // Offsets come from one tile for all rows and all other tiles. If that is not possible, flags say so.
    std::uint32_t number = begin + static_cast<std::uint32_t>(info.get(WorkTileInfo::kOffsetTile) - work_tile.begin);
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));
    bool fixes_offset = true;
    if constexpr (HasPrefixes<typename C::Params>) {
      if (work_tile.resumes) {  // offsets come from states
        restore(work_tile, turn);
        if (own >= tiles_) return;
        fixes_offset = false;
        number = own;
      }
    }
    const std::uint32_t softmax_offset = number;
    bool has_offsets = scoring_warpgroup_ == 0;  // whether this warpgroup has the softmax_offsets
    int scoring_warpgroup = 0;                   // whose turn it is
    const auto tile = [&] { return work_tile.begin + static_cast<int>(number - begin); };
    const auto get_offsets = [&] {
      if (!has_offsets) load_offsets(turn);
      has_offsets = true;
    };
    // Advances to the next tile, if there is one.
    const auto next_tile = [&] {
      scoring_warpgroup = scoring_warpgroup + 1 == C::kScoringWarpgroups ? 0 : scoring_warpgroup + 1;
      if (own == softmax_offset) own += C::kSlices;
      if (own >= tiles_) return false;
      number = own;
      own += C::kSlices;
      return true;
    };
#pragma unroll 1
    for (;; fixes_offset = false) {
      const bool sends = !fixes_offset || (number & (C::kSlices - 1U)) == rank_;
      if (scoring_warpgroup == scoring_warpgroup_) {
        Scores s{};
        keys_.add_qk(s, tile(), more);
        mask_and_scale(s, tile(), info);
        if (fixes_offset) fix_offset(s, info, turn);
        get_offsets();
        if (sends) exponentiate_and_send(s, number, more);
      } else {
        keys_.skip();
      }
      if (sends) ++sent_;
      if (!next_tile()) return;
      if constexpr (Keys::kHasUsual) {
        // Usual tiles, in a tight loop without the other cases.
        if (p_.softmax.scaled_first) continue;
        const int first = info.get(WorkTileInfo::kCommonBegin), end = info.get(WorkTileInfo::kCommonEnd);
        const bool left = keys_.choose_path([&](auto path) __attribute__((always_inline)) {
#pragma unroll 1
          do {
            if (scoring_warpgroup == scoring_warpgroup_) {
              const int key = tile() * C::kKeyTile;
              if (key < first || key + C::kKeyTile > end || !keys_.is_usual(path, tile())) return true;
              Scores s{};
              keys_.add_qk_fast(path, s, more);
              get_offsets();
              exponentiate_and_send(s, number, more);
            } else {
              keys_.skip();
            }
            ++sent_;
          } while (next_tile());
          return false;
        });
        if (!left) return;
      }
    }
  }

  // Copies query rows to shared memory, and from there to fragments. Missing rows are zeros.
  __device__ __forceinline__ void load_queries(const DecodeWorkTile& work_tile) {
    constexpr int kChunks = C::kDim / 8;
    const auto* const q = static_cast<const std::uint16_t*>(p_.q.data);
    const bool aligned =
        ((reinterpret_cast<std::uint64_t>(q) | static_cast<std::uint64_t>(2 * (p_.q.token_stride | p_.q.head_stride))) &
         15U) == 0;
    named_sync(kScoreBarrier, 32 * C::kScoreWarps);  // no warp reads the previous work tile's rows any more
#pragma unroll 1
    for (int i = thread_of_cta(); i < kColumnSliceRows * kChunks; i += 32 * C::kScoreWarps) {
      const int tile_row = i / kChunks;
      const int chunk = i % kChunks;
      uint4 elements{0, 0, 0, 0};
      if (tile_row < rows_count_) {
        const DecodeCoord coord = coord_of(params_, work_tile, tile_row);
        elements = Keys::permuted(load_elements(
            q + coord.row * p_.q.token_stride + coord.query_head * p_.q.head_stride + chunk * 8, aligned));
      }
      cuda::store_shared(map_.q(tile_row, chunk), elements);
    }
    named_sync(kScoreBarrier, 32 * C::kScoreWarps);
    keys_.load_queries();
  }

  // Scales and caps the scores, and masks keys that a row does not see. Few tiles have such keys, so the ranges are
  // read from shared memory only here.
  __device__ __forceinline__ void mask_and_scale(Scores& s, int tile, const WorkTileInfo& info) const {
    if (p_.softmax.scaled_first) scale_scores(p_, s);
    const int first = tile * C::kKeyTile;
    if (info.get(WorkTileInfo::kCommonBegin) <= first && first + C::kKeyTile <= info.get(WorkTileInfo::kCommonEnd))
      return;
    int low[4], high[4];  // visible keys of this thread's rows, [2 · half + i]
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      low[row] = info.get(WorkTileInfo::kLow, row_at(row / 2, row));
      high[row] = info.get(WorkTileInfo::kHigh, row_at(row / 2, row));
    }
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first + block(mine) * 16 + lane_ / 4 + i / 2 * 8;
          const int row = 2 * half + i % 2;
          if (key >= high[row] || key < low[row]) s[2 * mine + half][i] = -INFINITY;
        }
      }
    }
  }

  // Fixes the rows' softmax_offsets from the scores of the work tile's softmax_offset tile.
  __device__ __forceinline__ void fix_offset(const Scores& s, const WorkTileInfo& info, std::uint32_t turn) {
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      float max_score = -INFINITY;
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        if (!has(mine)) continue;
        const float(&x)[4] = s[2 * mine + row / 2];
        max_score = fmaxf(max_score, fmaxf(x[row % 2], x[row % 2 + 2]));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        max_score = fmaxf(max_score, __shfl_xor_sync(0xffffffffU, max_score, lanes));
      if (lane_ < 4) cuda::store_shared(map_.maximum(turn, warp_, row_at(row / 2, row)), __float_as_uint(max_score));
    }
    named_sync(kScoringBarrier, 32 * C::kScoringWarpgroupWarps);
    bool fails = false;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const int tile_row = row_at(row / 2, row);
      float maximum = load_float(map_.maximum(turn, 0, tile_row));
#pragma unroll
      for (int warp = 1; warp < C::kScoringWarpgroupWarps; ++warp) {
        maximum = fmaxf(maximum, load_float(map_.maximum(turn, warp, tile_row)));
      }
      const bool seen = maximum > -INFINITY;
      shift_[row] = seen ? -__fmul_rn(maximum, p_.softmax.exponent_base2) : 0.0F;
      if (warp_ == 0 && lane_ < 4) {
        cuda::store_shared(map_.softmax_offset(turn, tile_row), __float_as_uint(seen ? -shift_[row] : -INFINITY));
      }
      const bool attends = info.get(WorkTileInfo::kRowBegin, tile_row) < info.get(WorkTileInfo::kRowEnd, tile_row);
      fails = fails || (attends && !seen && tile_row < rows_count_);
    }
    arrive_offsets(turn, fails || info.get(WorkTileInfo::kFails) != 0);
  }
  // Takes the softmax_offsets from the rows' states. A row that has seen no key yet makes the work tile fail.
  __device__ __forceinline__ void restore(const DecodeWorkTile& work_tile, std::uint32_t turn) {
    await_states();
    bool fails = false;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const int tile_row = row_at(row / 2, row);
      const bool present = tile_row < rows_count_;
      const DecodeCoord coord = coord_of(params_, work_tile, present ? tile_row : 0);
      const float softmax_offset = present ? __ldcg(state_stats(params_, coord) + cuda::kCurrentOffset) : -INFINITY;
      const bool seen = softmax_offset != -INFINITY;
      shift_[row] = seen ? -softmax_offset : 0.0F;
      if (warp_ == 0 && lane_ < 4)
        cuda::store_shared(map_.softmax_offset(turn, tile_row), __float_as_uint(softmax_offset));
      fails = fails || (present && !seen);
    }
    arrive_offsets(turn, fails);
  }
  // Takes the softmax_offsets that the first scoring warpgroup has fixed.
  __device__ __forceinline__ void load_offsets(std::uint32_t turn) {
    barrier_wait(map_.softmax_offsets_full(turn), turn / 2 & 1U);
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const float softmax_offset = load_float(map_.softmax_offset(turn, row_at(row / 2, row)));
      shift_[row] = softmax_offset == -INFINITY ? 0.0F : -softmax_offset;
    }
  }
  // Posts the softmax_offsets to the sum adder and to the other scoring warpgroups.
  __device__ __forceinline__ void arrive_offsets(std::uint32_t turn, bool fails) const {
    fails = __any_sync(0xffffffffU, fails);
    if (warp_ == 0 && lane_ == 0) store_number(map_.offset_flags(turn), fails ? ScoreStage::kFails : 0);
    __syncwarp();
    if (warp_ == 0 && lane_ == 0) barrier_arrive(map_.softmax_offsets_full(turn));
  }

  template <class More>
  __device__ __forceinline__ void exponentiate_and_send(Scores& s, std::uint32_t number, More more) {
    using Mma = cuda::MmaTraits<typename C::Element>;
    const PipelineStateAt<C::kScoreStages> turn(number);
    const std::uint32_t warp_blocks = map_.score_stage(turn.index).address + score_at_;
    const float c = p_.softmax.exponent_base2;
#pragma unroll
    for (int j = 0; j < 2 * kMine; ++j) {
      if (j % 2 == 1 && !more) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = cuda::exp2_approx(__fmaf_rn(s[j][i], c, shift_[j % 2 * 2 + i % 2]));
    }
    barrier_wait(map_.score_empty(turn.index), turn.parity ^ 1U);
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      if (!has(mine)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !more) continue;
        const float(&x)[4] = s[2 * mine + half];
        cuda::store_transposed(warp_blocks + chunk_at_ + ScoreStage::block<kMine>(mine, half), Mma::pack(x[0], x[1]),
                               Mma::pack(x[2], x[3]));
      }
    }
    if constexpr (C::kSlices > 1) proxy_fence();
    __syncwarp();
    if (has(0)) {
      send_to_others<C>(rank_, warp_blocks, (more ? 2 : 1) * kMine * ScoreStage::kBlockBytes,
                        map_.score_full(turn.index));
    } else {
      arrive_at_others<C>(rank_, map_.score_full(turn.index));
    }
    if (lane_ == 0) barrier_arrive(map_.score_full(turn.index));
    // The sums are less urgent than the probabilities.
    const PipelineStateAt<2> unrounded_p(sent_);
    barrier_wait(map_.unrounded_p_empty(unrounded_p.index), unrounded_p.parity ^ 1U);
    const std::uint32_t at =
        unrounded_p_at_ + unrounded_p.index * static_cast<std::uint32_t>(ColumnSliceMap<C>::kUnroundedPBytes);
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      if (!has(mine)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !more) continue;
        const float(&x)[4] = s[2 * mine + half];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          cuda::store_shared(at + ColumnSliceMap<C>::unrounded_p_offset(8 * half + i % 2, mine * 16 + i / 2 * 8),
                             __float_as_uint(x[i]));
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.unrounded_p_full(unrounded_p.index));
  }

  const typename C::Params& params_;
  const cuda::AttentionParams& p_;
  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int scoring_warpgroup_;
  const int warp_;  // index in its scoring warpgroup
  const int lane_;
  const std::uint32_t score_at_, chunk_at_,
      // offsets of this warp's or thread's share of each
      unrounded_p_at_;
  std::uint32_t fixed_ = 0;  // work tiles with tiles so far
  std::uint32_t tiles_ = 0;  // tiles of all work tiles so far
  std::uint32_t sent_ = 0;   // score stages that this CTA's scoring warpgroups write before the next one
  int rows_count_ = 0;
  float shift_[4];  // −softmax_offset of this thread's rows, or 0: [2 · half + i]
  Keys keys_;
};

// The roles of warps, and the kernel.

// Arrivals of a phase of each barrier. 0 stands for the writers of a V stage, which depend on the launch.
template <class C>
constexpr int sliced_arrivals(int barrier) {
  constexpr int kV = 2 * C::kKStages;
  constexpr int kScore = kV + 2 * C::kVStages;
  constexpr int kTurn = kScore + 3 * C::kScoreStages;
  static_assert(ColumnSliceMap<C>::kBarriers == kTurn + 14);
  if (barrier >= kTurn) {
    const int of = (barrier - kTurn) / 2;
    return of == 0 ? C::kScoringWarpgroupWarps : of == 3 ? C::kThreads / 32 - 1 : of == 5 ? C::kOutWarps : 1;
  }
  if (barrier >= kScore + 2 * C::kScoreStages) return C::kSlices * (C::kOutWarps + 1);
  if (barrier >= kScore) return barrier < kScore + C::kScoreStages ? C::kScoringWarpgroupWarps : 1;
  if (barrier >= kV) return barrier < kV + C::kVStages ? 0 : C::kOutWarps;
  return barrier < C::kKStages ? 1 : C::kScoringWarpgroupWarps;
}

// One thread calls it. It has no loop, so each barrier is one instruction with constant operands. mbarrier.init takes
// one address for the whole warp: lanes with different addresses would take turns, each after about ten instructions
// that look for lanes with equal ones.
template <class C>
__device__ __forceinline__ void init_sliced_barriers(const typename C::Params& params, const ColumnSliceMap<C>& map) {
  int fillers = 1;
  if constexpr (std::is_same_v<typename C::Params, SlicedParams>) fillers = params.v_slices.by_lanes ? 32 : 1;
  const auto init = [&]<int kBarrier>(std::integral_constant<int, kBarrier>) {
    constexpr int kArrivals = sliced_arrivals<C>(kBarrier);
    barrier_init(map.barrier(kBarrier), kArrivals == 0 ? fillers : kArrivals);
  };
  [&]<int... kBarrier>(std::integer_sequence<int, kBarrier...>) {
    (init(std::integral_constant<int, kBarrier>()), ...);
  }
  (std::make_integer_sequence<int, ColumnSliceMap<C>::kBarriers>());
  barrier_init_fence();
}

// The K producer warp posts WorkTileInfos, and all other warps go through them in order. Calls take(info, number) for
// each.
template <class C, class Visit>
__device__ __forceinline__ void for_each_work_tile(const ColumnSliceMap<C>& map, int first, int step,
                                                   const Visit& visit) {
  wait_for_cluster<C>();
  std::uint32_t infos = 0;
#pragma unroll 1
  for (int n = first;; n += step) {
    const PipelineStateAt<2> turn(infos++);
    const WorkTileInfo info = map.info(turn.index);
    barrier_wait(map.info_full(turn.index), turn.parity);
    if (info.get(WorkTileInfo::kBegin) == WorkTileInfo::kNoMore) break;
    visit(info, n);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(turn.index));
  }
}

// Registers of a thread by role if there are several scoring warpgroups: warps with outputs need more than an even
// share.
inline constexpr int kScoringRegisters = 120;
inline constexpr int kOutputRegisters = 192;
inline constexpr int kSliceHelperRegisters = 80;

// Sets a role's register count kCount in its scope, and the common count again at its end.
template <class C, int kCount>
class RoleRegisters {
 public:
  __device__ __forceinline__ RoleRegisters() {
    if constexpr (kMoves) change_registers<kCount, kAll>();
  }
  __device__ __forceinline__ ~RoleRegisters() {
    if constexpr (kMoves) {
      __syncwarp();
      change_registers<kAll, kCount>();
    }
  }
  RoleRegisters(const RoleRegisters&) = delete;
  RoleRegisters& operator=(const RoleRegisters&) = delete;

 private:
  static constexpr bool kMoves = C::kScoringWarpgroups > 1;
  static constexpr int kAll = 65536 / C::kThreads / 8 * 8;
  static_assert(!kMoves ||
                kScoringRegisters * C::kScoreWarps + kOutputRegisters * C::kOutWarps + kSliceHelperRegisters * 4 <=
                    kAll * (C::kThreads / 32));
};

// The roles of a CTA's warps between the first and last cluster barriers. keys(), make_outputs() and boxes(), which is
// told whether it is for V, make the sources of tiles (TileKeys, ColumnOutputs, TileBoxes). One thread of the CTA calls
// fails() for a failed work tile.
template <class C, class Keys, class MakeOutputs, class Boxes, class Fails>
__device__ __forceinline__ void decode_sliced(const typename C::Params& params, const ColumnSliceMap<C>& map,
                                              std::uint32_t rank, const ClusterWorkTiles& work, const Keys& keys,
                                              const MakeOutputs& make_outputs, const Boxes& boxes, const Fails& fails) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Always inlined: otherwise a warp's register arrays would be in local memory.
  const auto each_work_tile = [&](auto visit) __attribute__((always_inline)) {
    for_each_work_tile<C>(map, work.first, work.step, visit);
  };
  if (warp < C::kScoreWarps) {
    const RoleRegisters<C, kScoringRegisters> registers;
    Scorer<C, decltype(keys())> scorer(params, map, rank, keys());
    each_work_tile([&](const WorkTileInfo& info, int) { scorer.process(info); });
    scorer.drain();
  } else if (warp < C::kScoreWarps + C::kOutWarps) {
    const RoleRegisters<C, kOutputRegisters> registers;
    auto outputs = make_outputs();
    each_work_tile([&](const WorkTileInfo& info, int number) __attribute__((always_inline)) {
      const bool failed = outputs.process(info);
      if (!outputs.is_leader()) return;
      if (failed) fails();
      if (rank == 0) __stcg(params.failed + number, failed ? 1 : 0);
    });
  } else {
    const RoleRegisters<C, kSliceHelperRegisters> registers;
    if (warp == C::kScoreWarps + C::kOutWarps) {
      SumReducer<C> reducer(map, rank);
      each_work_tile([&](const WorkTileInfo& info, int) { reducer.process(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 1) {
      SumAdder<C> adder(params, map);
      each_work_tile([&](const WorkTileInfo& info, int) { adder.process(info); });
    } else if (warp == C::kScoreWarps + C::kOutWarps + 2) {
      ValueProducer<C, decltype(boxes(std::true_type()))> producer(map, rank, boxes(std::true_type()));
      each_work_tile([&](const WorkTileInfo& info, int) { producer.process(info); });
    } else {
      KeyProducer<C, decltype(boxes(std::false_type()))> producer(params, map, rank, boxes(std::false_type()));
      producer.run(work.first, work.step);
      wait_for_cluster<C>();
    }
  }
}

// Reinitializes shared memory to recompute work tiles tile by tile. All threads of a CTA call it when its other work is
// complete. One thread calls forget(), which invalidates the old barriers.
template <class Whole, class Forget>
__device__ __forceinline__ void lay_out_whole(const typename Whole::Params& params, const DecodeMap<Whole>& map,
                                              const Forget& forget) {
  __syncthreads();  // all threads have read any_failed(), whose memory is reused
  if (threadIdx.x == 0) {
    forget();
    init_decode_barriers(map);
    proxy_fence();
  }
  if (threadIdx.x < 32) count_work_tiles<Whole>(params, map);
  __syncthreads();
}

// One CTA recomputes the failed ones of the work tiles first, first + step, … Not inlined, so that its registers don't
// count for the other code.
template <class C>
__device__ __noinline__ void recompute_failed(const SlicedParams& params, int first, int step) {
  using Whole = typename C::Whole;
  const DecodeMap<Whole> map;
  lay_out_whole(params, map, [] {
    const ColumnSliceMap<C> before;
    for (std::uint32_t i = 0; i < ColumnSliceMap<C>::kBarriers; ++i) barrier_invalidate(before.k_full(i));
  });
  const int work_tiles = work_tile_count(params, map);
  const auto each_work_tile = [&](auto&& worker) {
    for (int n = first; n < work_tiles; n += step) {
      if (__ldcg(params.failed + n) != 0) worker.process(work_tile_of<Whole>(params, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<Whole>(params, map));
  } else if (threadIdx.x / 32 == kDecodeConsumerThreads / 32) {
    each_work_tile(TileProducer<Whole>(params, map));
  }
}

// With the most slices, the few columns of a CTA are the M of its mma.
template <class C>
__device__ __forceinline__ auto outputs_by_slices(const SlicedParams& params, const ColumnSliceMap<C>& map,
                                                  std::uint32_t rank) {
  if constexpr (C::kSlices == kMaxSlices) {
    return ColumnOutputs<C>(params, map, rank, TileColumns<C>(map));
  } else {
    return RowOutputs<C>(params, map, rank);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sliced_kernel(const __grid_constant__ SlicedParams params) {
  const ColumnSliceMap<C> map;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers(params, map);
    store_number(map.any_failed(), 0);
  }
  cuda::pdl_launch_dependents();
  ClusterWorkTiles work = cluster_work_tiles<C>();
  if (params.late > 0 && !any_partial_split<C>(params)) {
    work.step -= params.late;
    if (work.first >= work.step) return;
  }
  __syncthreads();
  arrive_in_cluster<C, false>();  // warps that write to other CTAs wait for this arrival of all
  decode_sliced<C>(
      params, map, rank, work, [&] { return TileKeys<C>(map); },
      [&] { return outputs_by_slices<C>(params, map, rank); }, [&](auto) { return TileBoxes<C>(params); },
      [&] { store_number(map.any_failed(), 1); });
  await_prefixes(params);
  __syncthreads();
  if (load_number(map.any_failed()) == 0) return;
  // All CTAs of the cluster get here, since they have the same flags. Their results for failed work tiles are
  // overwritten.
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
  if (rank == 0) recompute_failed<C>(params, work.first, work.step);
}

}  // namespace ringattn::sm90
