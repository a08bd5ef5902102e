// SPDX-License-Identifier: Apache-2.0
// The warpgroup of a pair's CTA that has outputs: half of the columns of a unit's 64 rows, in registers. It adds P V of
// every tile, in order, whoever has scored it.
#pragma once

#include "kernels/sm90/decode/finish.cuh"
#include "kernels/sm90/fold/products.cuh"
#include "kernels/sm90/latent/pair_map.cuh"
#include "kernels/sm90/latent/references.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kPairOutputBarrier = 2;  // of the threads that have outputs

template <class C>
class PairOutputs {
 public:
  __device__ __forceinline__ PairOutputs(const DecodeParams& params, const PairMap& map) : params_(params), map_(map) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
    const std::uint32_t first = tiles_;
    const std::uint32_t end = first + static_cast<std::uint32_t>(unit.end - unit.begin);
    reference_[0] = reference_[1] = -INFINITY;
    if (first == end) clear();
#pragma unroll 1
    for (; tiles_ != end; ++tiles_) {
      add(tiles_ == first, unit.of.length - (unit.begin + static_cast<int>(tiles_ - first)) * kLatentTile);
    }
    float sum[2] = {0.0F, 0.0F};
    if (first != end) read_ends(sum);
    leave_rows(unit, sum, first != end);
  }

 private:
  static __device__ __forceinline__ bool all_of_warp(bool holds) { return __all_sync(0xffffffffU, holds) != 0; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kPairColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = 0.0F;
    }
  }

  // O += P V of the next tile. `keys`: of the sequence from the tile's first one on.
  __device__ __forceinline__ void add(bool first, int keys) {
    const PairTurn turn = PairTurn::of_tile(tiles_);
    const bool own = ((tiles_ ^ map_.rank) & 1U) == 0;
    const std::uint32_t values = map_.values(own, turn.place);
    const std::uint32_t p = of_warp(descriptor_low(map_.weights(own, turn.place)));
    const std::uint32_t v = of_warp(descriptor_low(values, PairMap::kPanelBytes));
    barrier_wait(map_.values_full(own, turn.place), turn.parity);
    // Before the probabilities: what there is to do for a reference is done when they come.
    barrier_wait(map_.references_full(own, turn.place), turn.parity);
    follow_references(own, turn.place);
    if (all_of_warp(keys < kLatentTile)) clear_tail(values, keys);
    barrier_wait(map_.weights_full(own, turn.place), turn.parity);
    pin(o_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kLatentTile / 16; ++step) {
      Wgmma<typename C::Element, kPairColumns>::sv(
          o_, descriptor(p + static_cast<std::uint32_t>(step * 32 >> 4)),
          descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)), step > 0 || !first);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(o_);
    if (thread_of_cta() % 32 == 0) {
      if (own) {
        barrier_arrive(map_.own_empty(turn.place));
      } else {
        barrier_arrive_at(in_cta(map_.shared_empty(turn.place), 1U - map_.rank));
      }
    }
    __syncwarp();
  }

  // What a row has is scaled where its reference moves with this tile.
  __device__ __forceinline__ void follow_references(bool own, std::uint32_t place) {
    const float2 pair = load_pair(map_.references(own, place, thread_of_warpgroup()));
    float factor[2];
    bool moves = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = half == 0 ? pair.x : pair.y;
      factor[half] = factor_between(reference_[half], reference);
      moves = moves || reference_moves(reference_[half], reference);
      reference_[half] = reference;
    }
    if (all_of_warp(!moves)) return;
#pragma unroll
    for (int n = 0; n < kPairColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[n][i] = __fmul_rn(o_[n][i], factor[i / 2]);
    }
  }

  // Rows of a tile behind the sequence's last key are somebody else's, or were fetched for another tile: their
  // probabilities are 0, but 0 · ∞ would be NaN. Nobody else reads these columns once the tile's references are here.
  __device__ __forceinline__ void clear_tail(std::uint32_t values, int keys) const {
    constexpr int kChunks = kPairColumns / 8;
#pragma unroll 1
    for (int i = keys * kChunks + thread_of_warpgroup(); i < kLatentTile * kChunks; i += kWarpgroup) {
      const int chunk = i % kChunks;
      cuda::store_shared(values + static_cast<std::uint32_t>(chunk / 8 * PairMap::kPanelBytes) +
                             cuda::swizzled(i / kChunks, chunk % 8),
                         uint4{0, 0, 0, 0});
    }
    proxy_fence();
    named_sync(kPairOutputBarrier, kWarpgroup);
  }

  __device__ __forceinline__ void read_ends(float (&sum)[2]) {
    const PairTurn turn = PairTurn::of_unit(units_);
    barrier_wait(map_.ends_full(turn.place), turn.parity);
    ++units_;
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = load_float(map_.end(turn.place, slot_of_thread() + 8 * half));
    __syncwarp();
    const auto lane = static_cast<std::uint32_t>(thread_of_cta() % 32);
    if (lane < 2) barrier_arrive_at(in_cta(map_.ends_empty(turn.place), lane));
    __syncwarp();
  }

  // `folded`: the unit has tiles.
  __device__ __forceinline__ void leave_rows(const DecodeUnit& unit, const float (&sum)[2], bool folded) const {
    const int lane = thread_of_cta() % 4;
    const int first_column = static_cast<int>(map_.rank) * kPairColumns;
    const bool speaks = map_.rank == 0 && lane == 0;
    const int rows = rows_of(params_, unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = slot_of_thread() + 8 * half;
      const bool present = slot < rows;
      const DecodePlace place = place_of(params_, unit, present ? slot : rows - 1);
      if (!finishes(params_, unit)) {
        if (!folded || !present) continue;  // another unit has the row, or the merge finds that none has
        auto* const outputs = reinterpret_cast<float4*>(record_of(params_, unit, place) + first_column);
#pragma unroll
        for (int n = 0; n < kPairColumns / 16; ++n) {
          __stcg(outputs + 4 * n + lane, float4{o_[2 * n][2 * half], o_[2 * n][2 * half + 1], o_[2 * n + 1][2 * half],
                                                o_[2 * n + 1][2 * half + 1]});
        }
        if (speaks) leave_numbers(params_, unit, 0, 1, slot, place, float2{reference_[half], sum[half]});
        continue;
      }
      const FinishedRow<C> finished(params_, place, reference_[half], sum[half]);
#pragma unroll
      for (int n = 0; n < kPairColumns / 8; n += 4) {
        const auto two = [&](int i) { return finished.pack(o_[n + i][2 * half], o_[n + i][2 * half + 1]); };
        const uint4 eight = turn_in_quad(uint4{two(0), two(1), two(2), two(3)}, lane);
        if (present) finished.write(first_column + 8 * (n + lane), eight);
      }
      if (speaks && present) finished.write_lse();
    }
  }

  const DecodeParams& params_;
  const PairMap& map_;
  std::uint32_t tiles_ = 0;  // of all units so far
  std::uint32_t units_ = 0;  // that have tiles
  float reference_[2];       // of this thread's rows
  float o_[kPairColumns / 8][4];
};

}  // namespace ringattn::sm90
