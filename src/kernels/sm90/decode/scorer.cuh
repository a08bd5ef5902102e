// SPDX-License-Identifier: Apache-2.0
// The warps of the sliced kernel that score. They do a tile together, with its keys as the rows of the products and the
// query rows as their columns (S is Kᵀ's product with Q, transposed; its numbers are the fold's, as each is the same
// chain of sums). What comes of it goes into a slot of every CTA of the cluster.
#pragma once

#include "kernels/sm90/decode/sliced_map.cuh"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kScoreBarrier = 2;  // of the threads that score

// A thread scores keys lane / 4 and lane / 4 + 8 of each of its blocks of 16, for query rows 2t, 2t + 1, and those
// 8 behind, where t is lane % 4.
template <class C>
class Scorer {
 public:
  __device__ __forceinline__ Scorer(const DecodeParams& params, const SlicedMap<C>& map, std::uint32_t rank)
      : params_(params),
        p_(params.fold),
        map_(map),
        rank_(rank),
        warp_(thread_of_cta() / 32),
        lane_(thread_of_cta() % 32) {}

  // References come from one tile, for all rows and tiles at once. Where that doesn't do, the slots say so.
  __device__ __forceinline__ void score(const DecodeUnit& unit) {
    load_queries(unit);
    look_at_rows(unit);
    const int reference = reference_tile<C>(params_, unit);
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(unit.end - unit.begin);
    const std::uint32_t reference_number = begin + static_cast<std::uint32_t>(reference - unit.begin);
    {
      Scores s;
      products(s);
      adjust(s, reference);
      settle(s, unit, reference);
      if (owns(reference_number)) weigh_and_send(s, reference_number);
    }
    for (std::uint32_t number = begin + ((rank_ - begin) & (C::kSlices - 1U)); number < tiles_; number += C::kSlices) {
      if (number == reference_number) continue;
      Scores s;
      products(s);
      adjust(s, unit.begin + static_cast<int>(number - begin));
      weigh_and_send(s, number);
    }
    ++units_;
  }

 private:
  static constexpr int kBlocks = C::kKeyTile / 16;                         // of 16 keys
  static constexpr int kMine = (kBlocks + kScoreWarps - 1) / kScoreWarps;  // a warp's: warp, warp + kScoreWarps, …
  static constexpr float kMost = kOutgrown<typename C::Element>;

  using Scores = float[2 * kMine][4];  // [2 · block + half of the rows]

  __device__ __forceinline__ int block(int mine) const { return warp_ + mine * kScoreWarps; }
  __device__ __forceinline__ bool has(int mine) const { return kBlocks % kScoreWarps == 0 || block(mine) < kBlocks; }
  // Whether this CTA scores the tile of this number.
  __device__ __forceinline__ bool owns(std::uint32_t number) const { return (number & (C::kSlices - 1U)) == rank_; }
  // The query row, of 16, of element `i` of a block's fragment.
  __device__ __forceinline__ int row_at(int half, int i) const { return 8 * half + lane_ % 4 * 2 + i % 2; }

  // Query rows straight into fragments; those that aren't there are zeros.
  __device__ __forceinline__ void load_queries(const DecodeUnit& unit) {
    rows_count_ = rows_of(params_, unit);
    const auto* const q = static_cast<const std::uint16_t*>(p_.q.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = lane_ / 4 + 8 * half;
      const bool present = slot < rows_count_;
      const DecodeRow at = row_of<C>(params_, unit, present ? slot : 0);
      const std::uint16_t* const row = q + at.row * p_.q.token_stride + at.query_head * p_.q.head_stride;
      const bool paired = reinterpret_cast<std::uint64_t>(row) % 4 == 0;
#pragma unroll
      for (int i = 0; i < C::kDim / 8; ++i) {
        const std::uint16_t* const from = row + 8 * i + lane_ % 4 * 2;
        std::uint32_t pair = 0;
        if (present) {
          pair = paired ? *reinterpret_cast<const std::uint32_t*>(from)
                        : from[0] | static_cast<std::uint32_t>(from[1]) << 16;
        }
        q_[i / 2][half][i % 2] = pair;
      }
    }
  }

  __device__ __forceinline__ void look_at_rows(const DecodeUnit& unit) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const DecodeSlots slots = slots_of<C>(params_, unit, row_at(0, i));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        low_[2 * half + i] = slots.low[half];
        high_[2 * half + i] = slots.high[half];
        folds_[2 * half + i] = slots.begin[half] != slots.end[half];
      }
    }
    const DecodeRow first = row_of<C>(params_, unit, 0);
    const DecodeRow last = row_of<C>(params_, unit, rows_count_ - 1);
    const KeyRange common = Visibility(p_.mask, unit.of.length).common_keys(first.position, last.position);
    common_begin_ = common.empty() ? kNoKey : static_cast<int>(common.begin);
    common_end_ = common.empty() ? 0 : static_cast<int>(common.end);
  }

  // K Qᵀ of the K tile that has arrived next.
  __device__ __forceinline__ void products(Scores& s) {
    const Turn<C::kKStages> turn(ks_++);
    barrier_wait(map_.k_full(turn.place), turn.parity);
#pragma unroll
    for (int j = 0; j < 2 * kMine; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = 0.0F;
    }
    const bool more = rows_count_ > 8;
    const std::uint32_t tile = map_.k(turn.place);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        if (!has(mine)) continue;
        const std::uint32_t at = tile + cuda::swizzled(block(mine) * 16 + lane_ % 16, lane_ / 16);
        std::uint32_t keys[4];
        cuda::load_matrix(keys, cuda::at_columns<C::kKeyTile>(at, step));
        using Products = cuda::Products<typename C::Element>;
        Products::mma(s[2 * mine], keys, q_[step][0][0], q_[step][0][1], s[2 * mine]);
        if (more) Products::mma(s[2 * mine + 1], keys, q_[step][1][0], q_[step][1][1], s[2 * mine + 1]);
      }
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.k_empty(turn.place));
  }

  // Scaled and capped, and −∞ where a row does not see the key.
  __device__ __forceinline__ void adjust(Scores& s, int tile) const {
    if (p_.softmax.scaled_first) scale_scores(p_, s);
    const int first = tile * C::kKeyTile;
    if (common_begin_ <= first && first + C::kKeyTile <= common_end_) return;
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first + block(mine) * 16 + lane_ / 4 + i / 2 * 8;
          const int row = 2 * half + i % 2;
          if (key >= high_[row] || (p_.mask.left >= 0 && key < low_[row])) s[2 * mine + half][i] = -INFINITY;
        }
      }
    }
  }

  // The rows' references, from the scores of tile `reference`.
  __device__ __forceinline__ void settle(const Scores& s, const DecodeUnit& unit, int reference) {
    float most[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      most[row] = -INFINITY;
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        if (!has(mine)) continue;
        const float(&x)[4] = s[2 * mine + row / 2];
        most[row] = fmaxf(most[row], fmaxf(x[row % 2], x[row % 2 + 2]));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        most[row] = fmaxf(most[row], __shfl_xor_sync(0xffffffffU, most[row], lanes));
      }
      if (lane_ < 4) {
        cuda::store_shared(map_.maximum(units_, warp_, row_at(row / 2, row)), __float_as_uint(most[row]));
      }
    }
    named_sync(kScoreBarrier, 32 * kScoreWarps);
    bool fails = false;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const int slot = row_at(row / 2, row);
      float maximum = load_float(map_.maximum(units_, 0, slot));
#pragma unroll
      for (int warp = 1; warp < kScoreWarps; ++warp) {
        maximum = fmaxf(maximum, load_float(map_.maximum(units_, warp, slot)));
      }
      const bool seen = maximum > -INFINITY;
      shift_[row] = seen ? -__fmul_rn(maximum, p_.softmax.exponent_base2) : 0.0F;
      reference_[row] = seen ? -shift_[row] : -INFINITY;
      const int own = low_[row] / C::kKeyTile;  // where the fold would take it from
      fails = fails || (folds_[row] && (!seen || (own > unit.begin ? own : unit.begin) != reference));
    }
    flags_ = __any_sync(0xffffffffU, fails) ? ScoreSlot::kFails : 0;
  }

  __device__ __forceinline__ void weigh_and_send(Scores& s, std::uint32_t number) {
    const Turn<C::kSlots> turn(number);
    const ScoreSlot slot = map_.slot(turn.place);
    const float c = p_.softmax.exponent_base2;
    const bool more = rows_count_ > 8;
#pragma unroll
    for (int j = 0; j < 2 * kMine; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = cuda::exp2_approx(__fmaf_rn(s[j][i], c, shift_[j % 2 * 2 + i % 2]));
    }
    barrier_wait(map_.slot_empty(turn.place), turn.parity ^ 1U);
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      if (!has(mine)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !more) continue;
        const float(&x)[4] = s[2 * mine + half];
        using Products = cuda::Products<typename C::Element>;
        cuda::store_transposed(slot.chunk(8 * half + lane_ % 8, 2 * block(mine) + lane_ / 8 % 2),
                               Products::pack(x[0], x[1]), Products::pack(x[2], x[3]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          cuda::store_shared(map_.weights(sent_, row_at(half, i), block(mine) * 16 + lane_ / 4 + i / 2 * 8),
                             __float_as_uint(x[i]));
        }
      }
    }
    if constexpr (C::kSlices > 1) proxy_fence();
    named_sync(kScoreBarrier, 32 * kScoreWarps);
    if (warp_ == 0) {
      hand_on(slot.address, ScoreSlot::probability_bytes(rows_count_), map_.slot_full(turn.place));
    }
    if (warp_ == static_cast<int>(number / C::kSlices % kScoreWarps)) {
      write_numbers(slot);
      if constexpr (C::kSlices > 1) proxy_fence();
      __syncwarp();
      hand_on(slot.flags(), ScoreSlot::number_bytes(rows_count_), map_.numbers_full(turn.place));
    }
    ++sent_;
  }

  // Sums, each in the order of the fold's thread that has these columns; flags and references.
  __device__ __forceinline__ void write_numbers(const ScoreSlot& slot) const {
    bool outgrown = false;
    for (int row = lane_ / 4; row < rows_count_; row += 8) {
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < C::kKeyTile / 8; ++j) {
        const float2 x = load_pair(map_.weights(sent_, row, 8 * j + lane_ % 4 * 2));
        sum = j == 0 ? x.x : __fadd_rn(sum, x.x);
        sum = __fadd_rn(sum, x.y);
      }
      outgrown = outgrown || sum > kMost;
      cuda::store_shared(slot.sum(row, lane_ % 4), __float_as_uint(sum));
    }
    const bool fails = __any_sync(0xffffffffU, outgrown);
    if (lane_ == 0) store_number(slot.flags(), flags_ | (fails ? ScoreSlot::kFails : 0));
    if (lane_ < 4) {
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        cuda::store_shared(slot.reference(row_at(row / 2, row)), __float_as_uint(reference_[row]));
      }
    }
  }

  // Called by a warp: what it, or all that score, have written here goes to the other CTAs, and counts at their
  // barriers and at this one's.
  __device__ __forceinline__ void hand_on(std::uint32_t from, int bytes, std::uint32_t barrier) const {
    const auto to = static_cast<std::uint32_t>(lane_);
    if (to < C::kSlices && to != rank_) send_bytes(in_cta(from, to), from, bytes, in_cta(barrier, to));
    __syncwarp();
    if (lane_ == 0) barrier_arrive(barrier);
  }

  const DecodeParams& params_;
  const cuda::FoldParams& p_;
  const SlicedMap<C>& map_;
  const std::uint32_t rank_;
  const int warp_;
  const int lane_;
  std::uint32_t units_ = 0;  // so far
  std::uint32_t tiles_ = 0;  // of all of them
  std::uint32_t ks_ = 0;     // K tiles that this CTA has scored
  std::uint32_t sent_ = 0;   // slots that it has written
  int rows_count_ = 0;
  int flags_ = 0;
  int common_begin_ = 0, common_end_ = 0;  // keys that all rows see
  // Of this thread's rows, [2 · half + i].
  int low_[4], high_[4];
  bool folds_[4];
  float shift_[4];  // minus the reference, or 0
  float reference_[4];
  std::uint32_t q_[C::kDim / 16][2][2];
};

}  // namespace ringattn::sm90
