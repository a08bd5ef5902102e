// SPDX-License-Identifier: Apache-2.0
// dQ: S = Q Kᵀ, dP = dO Vᵀ, dQ += dS K. A CTA owns one head tile of 64 queries, or a pair of them that share a KV head,
// and loops over the keys that they see. A warp owns 16 or 32 queries, and dS is its register operand. cp.async loads
// the next keys of a stage while the warps multiply those of the other one.
#pragma once

#include "kernels/attention_backward/sm80/tiles.cuh"

namespace ringattn::sm80 {

template <class Element_, BackwardConfig kConfig, bool kScaledFirst_>
struct DqTraits {
  using Element = Element_;
  static constexpr bool kScaledFirst = kScaledFirst_;  // AttentionParams::Softmax::scaled_first
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kRowBlocks = kConfig.row_blocks;
  static constexpr int kHeadTiles = kConfig.dq_head_tiles();
  static constexpr int kKeys = kConfig.dq_keys;
  static constexpr int kStages = BackwardConfig::kStages;
  static constexpr int kThreads = kConfig.dq_threads();
  static constexpr int kCtas = BackwardConfig::kDqCtas;
  static constexpr int kQBytes = cuda::kTileBytes<kBackwardTile, kDim>;
  static constexpr int kDoutBytes = cuda::kTileBytes<kBackwardTile, kDimV>;
  static constexpr int kKBytes = cuda::kTileBytes<kKeys, kDim>, kVBytes = cuda::kTileBytes<kKeys, kDimV>;
  // Shared memory, in this order.
  static constexpr int kDout = kHeadTiles * kQBytes;
  static constexpr int kK = kDout + kHeadTiles * kDoutBytes;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kShared = kV + kStages * kVBytes;
  static_assert(kShared == kConfig.dq_bytes());
};

// Addresses in shared memory.
template <class C>
struct DqMap {
  std::uint32_t base;
  __device__ std::uint32_t q(int head_tile) const { return base + head_tile * C::kQBytes; }
  __device__ std::uint32_t dout(int head_tile) const { return base + C::kDout + head_tile * C::kDoutBytes; }
  __device__ std::uint32_t k(int stage) const { return base + C::kK + stage * C::kKBytes; }
  __device__ std::uint32_t v(int stage) const { return base + C::kV + stage * C::kVBytes; }
};

template <class C>
class DqCta {
 public:
  using Work = cuda::BackwardWork<C::kHeadTiles>;
  using Element = typename C::Element;
  using Loop = StageLoop<C::kKeys>;
  // −LSE and delta of the queries.
  using Stats = float2[C::kHeadTiles * kBackwardTile];

  __device__ __forceinline__ DqCta(const DqParams& p, const DqMap<C>& map, const Work& work, Loop& loop, Stats& stats)
      : p_(p), map_(map), work_(work), loop_(loop), stats_(stats) {}

  __device__ __forceinline__ void compute() {
    if (loop_.steps > 0) {
      load_queries();
      load_keys(0);
    }
    cuda::copy_commit();
    const auto place = [this] { return place_of_sum(); };
    Sum sum(p_.common.sums);
    if (is_active()) sum.begin(place());
#pragma unroll 1
    for (int step = 0; step < loop_.steps; ++step) {
      cuda::copy_wait<0>();
      __syncthreads();  // the stage has arrived, and all warps are done with the other one
      if (step + 1 < loop_.steps) load_keys(step + 1);
      cuda::copy_commit();
      if (cuda::thread_of_cta() == 0) loop_.look_up(p_.common.tables, work_.pair, 0);
      const RowTile& tile = work_.row_tiles[head_tile()];
      const int tile_number = loop_.at(step).part / Loop::kParts;
      if (tile_number < tile.begin_tile || tile_number >= tile.end_tile) continue;
      sum.enter(place, loop_.at(step));
      add(sum, step);
    }
    if (is_active()) sum.end(place(), p_.dq, place().head, p_.common.softmax.scale);
  }

 private:
  using Sum = GradientSum<Element, C::kRowBlocks, C::kDim>;
  static constexpr int kWarpsOfTile = C::kThreads / 32 / C::kHeadTiles;
  static constexpr int kBlocks = C::kKeys / 8;

  static __device__ __forceinline__ int head_tile() { return cuda::thread_of_cta() / 32 / kWarpsOfTile; }
  static __device__ __forceinline__ int row_of_warp() {
    return cuda::thread_of_cta() / 32 % kWarpsOfTile * C::kRowBlocks * 16;
  }
  __device__ __forceinline__ bool is_active() const { return head_tile() < work_.pair.count; }
  __device__ __forceinline__ SumPlace place_of_sum() const {
    return {work_.row_tiles[head_tile()],
            row_of_warp(),
            static_cast<int>(blockIdx.x) * C::kHeadTiles + head_tile(),
            p_.common.heads,
            cuda::head_of(p_.common.tables, work_, head_tile()),
            C::kDim,
            0};
  }

  __device__ __forceinline__ void load_queries() const {
#pragma unroll 1
    for (int i = 0; i < work_.pair.count; ++i) {
      const RowTile& tile = work_.row_tiles[i];
      const int head = cuda::head_of(p_.common.tables, work_, i);
      cuda::copy_tile<kBackwardTile, C::kDim, C::kThreads>(map_.q(i), rows_at(p_.common.own[0], tile.row, head),
                                                           tile.valid_begin, tile.valid_end);
      cuda::copy_tile<kBackwardTile, C::kDimV, C::kThreads>(map_.dout(i), rows_at(p_.common.own[1], tile.row, head),
                                                            tile.valid_begin, tile.valid_end);
      const int row = cuda::thread_of_cta();
      if (row >= kBackwardTile) continue;
      float2 stats{0.0F, 0.0F};
      if (row >= tile.valid_begin && row < tile.valid_end) {
        stats = *reinterpret_cast<const float2*>(p_.stats + ((tile.row + row) * p_.common.heads + head) * kRowStats);
      }
      stats_[i * kBackwardTile + row] = {-stats.x, stats.y};
    }
  }

  __device__ __forceinline__ void load_keys(int step) const {
    const StageRows& from = loop_.at(step);
    const int stage = step % C::kStages;
    cuda::copy_tile<C::kKeys, C::kDim, C::kThreads>(map_.k(stage), from.rows[0], from.begin, from.end);
    cuda::copy_tile<C::kKeys, C::kDimV, C::kThreads>(map_.v(stage), from.rows[1], from.begin, from.end);
  }

  // −LSE or delta of the thread's rows.
  template <float float2::*kStat>
  __device__ __forceinline__ void read_stats(float (&x)[C::kRowBlocks][2]) const {
    const float2* const first = stats_ + head_tile() * kBackwardTile + row_of_warp() + lane_of_warp() / 4;
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; ++i) x[i / 2][i % 2] = first[8 * i].*kStat;
  }

  // Computes P from S in place. With a softcap, P times the softcap's factor of dS.
  __device__ __forceinline__ void exponentiate(float (&s)[C::kRowBlocks][kBlocks][4]) const {
    const cuda::AttentionParams::Softmax& softmax = p_.common.softmax;
    const cuda::ScoreScaling scaling(softmax);
    float negative_lse[C::kRowBlocks][2];
    read_stats<&float2::x>(negative_lse);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[block][j][e];
          if constexpr (C::kScaledFirst) {
            const float score = scaling.scaled(x);
            const float ratio = score * p_.common.inverse_cap;
            x = cuda::exp2_approx(__fmaf_rn(score, softmax.exponent_base2, negative_lse[block][e / 2])) *
                __fmaf_rn(-ratio, ratio, 1.0F);
          } else {
            x = cuda::exp2_approx(__fmaf_rn(x, softmax.exponent_base2, negative_lse[block][e / 2]));
          }
        }
      }
    }
  }

  // Adds the keys of a stage.
  __device__ __forceinline__ void add(Sum& sum, int step) const {
    const int stage = step % C::kStages;
    float s[C::kRowBlocks][kBlocks][4], dp[C::kRowBlocks][kBlocks][4];
    multiply_transposed<Element, C::kDim, kBackwardTile, C::kKeys>(s, a_operand(map_.q(head_tile()), row_of_warp()),
                                                                   b_operand(map_.k(stage)));
    exponentiate(s);
    // Never true. It ends the basic block, as in TileStep::attend(): otherwise ptxas loads operands of dP before P is
    // complete, and spills.
    if (p_.common.heads == 0) __trap();
    multiply_transposed<Element, C::kDimV, kBackwardTile, C::kKeys>(
        dp, a_operand(map_.dout(head_tile()), row_of_warp()), b_operand(map_.v(stage)));
    float delta[C::kRowBlocks][2];
    read_stats<&float2::y>(delta);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[block][j][e] *= dp[block][j][e] - delta[block][e / 2];
      }
    }
    const RowTile& tile = work_.row_tiles[head_tile()];
    const int tile_number = loop_.at(step).part / Loop::kParts;
    if (tile_number < tile.unmasked_begin || tile_number >= tile.unmasked_end) {
      const int column = loop_.at(step).part * C::kKeys;
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
        const int offset = tile.offset + row_of_warp() + block * 16 + lane_of_warp() / 4;
        cuda::mask_columns(s[block], cuda::seen_columns(p_.common.tables, offset, column, work_.pair.other_end));
      }
    }
    std::uint32_t ds[C::kRowBlocks][C::kKeys / 16][4];
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) cuda::pack_block<Element>(s[block][j], ds[block], j);
    }
    multiply_add<Element, C::kDim, C::kKeys>(sum.d, ds, b_operand_transposed(map_.k(stage)));
  }

  const DqParams& p_;
  const DqMap<C>& map_;
  const Work& work_;
  Loop& loop_;
  Stats& stats_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) dq_kernel(const __grid_constant__ DqParams p) {
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ cuda::BackwardWork<C::kHeadTiles> work;
  __shared__ StageLoop<C::kKeys> loop;
  __shared__ typename DqCta<C>::Stats stats;
  const DqMap<C> map{cuda::aligned_shared_address<cuda::kPanelRowBytes>(dynamic_shared)};
  for (;;) {
    take_work(p.common, 1, work, loop);
    if (work.kv_head == cuda::kNoWorkLeft) return;
    DqCta<C>(p, map, work, loop, stats).compute();
  }
}

}  // namespace ringattn::sm80
