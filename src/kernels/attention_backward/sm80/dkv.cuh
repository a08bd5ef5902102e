// SPDX-License-Identifier: Apache-2.0
// dK and dV: Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q. A CTA owns a tile of 64 keys of one KV head and loops
// over the queries that see them: token tiles ascending, and in each the heads of the group. 16 or 32 keys belong to a
// pair of warps: one computes P and dV, the other dP, dS and dK, so that each holds one gradient and reads half of the
// operands. P goes from the first to the second in fp32, through shared memory.
#pragma once

#include "kernels/attention_backward/sm80/tiles.cuh"

namespace ringattn::sm80 {

template <class Element_, BackwardConfig kConfig, bool kScaledFirst_>
struct DkvTraits {
  using Element = Element_;
  static constexpr bool kScaledFirst = kScaledFirst_;  // AttentionParams::Softmax::scaled_first
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kRowBlocks = kConfig.row_blocks;
  static constexpr int kPairs = kConfig.dkv_pairs();
  static constexpr int kQueries = kConfig.dkv_queries;
  static constexpr int kStages = BackwardConfig::kStages;
  static constexpr int kThreads = kConfig.dkv_threads();
  static constexpr int kCtas = kConfig.dkv_ctas();
  static constexpr int kKBytes = cuda::kTileBytes<kBackwardTile, kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<kBackwardTile, kDimV>;
  static constexpr int kQBytes = cuda::kTileBytes<kQueries, kDim>, kDoutBytes = cuda::kTileBytes<kQueries, kDimV>;
  static constexpr int kStatBytes = kQueries * static_cast<int>(sizeof(float));
  static constexpr int kExchangeBytes = kConfig.exchange_bytes();
  static constexpr bool kKeysInRegisters = kConfig.keys_in_registers();
  // Shared memory, in this order. If keys are kept in registers, the stages reuse their memory.
  static constexpr int kV = kKBytes;
  static constexpr int kQ = kKeysInRegisters ? 0 : kV + kVBytes;
  static constexpr int kDout = kQ + kStages * kQBytes;
  static constexpr int kExchange = kDout + kStages * kDoutBytes;
  static constexpr int kStats = kExchange + kPairs * kExchangeBytes;
  static constexpr int kStagesEnd = kStats + kStages * static_cast<int>(kRowStats) * kStatBytes;
  static constexpr int kShared = kConfig.dkv_bytes();
  static_assert(kStagesEnd <= kShared && kV + kVBytes <= kShared);
  // Named barriers: of the CTA, and of each pair of warps from kPairBarrier on.
  static constexpr int kCtaBarrier = 1;
  static constexpr int kPairBarrier = 2;
};

// Addresses in shared memory.
template <class C>
struct DkvMap {
  std::uint32_t base;
  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + C::kV; }
  __device__ std::uint32_t q(int stage) const { return base + C::kQ + stage * C::kQBytes; }
  __device__ std::uint32_t dout(int stage) const { return base + C::kDout + stage * C::kDoutBytes; }
  __device__ std::uint32_t exchange(int pair) const { return base + C::kExchange + pair * C::kExchangeBytes; }
  __device__ std::uint32_t lse2(int stage) const {
    return base + C::kStats + stage * static_cast<int>(kRowStats) * C::kStatBytes;
  }
  __device__ std::uint32_t delta(int stage) const { return lse2(stage) + C::kStatBytes; }
};

// A warp that computes dV, or dK. All warps load tiles.
template <class C, bool kOfV>
class DkvWarp {
 public:
  using Work = cuda::BackwardWork<1>;
  using Element = typename C::Element;
  using Loop = StageLoop<C::kQueries>;

  __device__ __forceinline__ DkvWarp(const DkvParams& p, const DkvMap<C>& map, const Work& work, Loop& loop)
      : p_(p), map_(map), work_(work), loop_(loop) {}

  __device__ __forceinline__ void compute() {
    const cuda::BackwardTables& tables = p_.common.tables;
    const auto place = [this] { return place_of_sum(); };
    const RowTile& tile = work_.row_tiles[0];
    Sum sum(p_.common.sums);
    if (loop_.steps > 0) {
      load_keys();
      if constexpr (!C::kKeysInRegisters) load_queries(0);
    }
    cuda::copy_commit();
    sum.begin(place());
    if constexpr (C::kKeysInRegisters) {
      if (loop_.steps > 0) {
        cuda::copy_wait<0>();
        cuda::named_sync(C::kCtaBarrier, C::kThreads);
        load_operands<kOperandDim, kBackwardTile>(keys_, keys_operand());
        cuda::named_sync(C::kCtaBarrier, C::kThreads);
        load_queries(0);
        cuda::copy_commit();
      }
    }
#pragma unroll 1
    for (int step = 0; step < loop_.steps; ++step) {
      cuda::copy_wait<0>();
      // the stage has arrived, and all warps are done with the other one
      cuda::named_sync(C::kCtaBarrier, C::kThreads);
      if (step + 1 < loop_.steps) load_queries(step + 1);
      cuda::copy_commit();
      if (cuda::thread_of_cta() == 0) loop_.look_up(tables, work_.pair, p_.common.heads * kRowStats);
      const int tile_number = loop_.at(step).part / Loop::kParts;
      sum.enter(place, loop_.at(step));
      add(sum, step, tile_number < tile.unmasked_begin || tile_number >= tile.unmasked_end);
    }
    if constexpr (kOfV) {
      sum.end(place(), p_.dv, work_.kv_head, 1.0F);
    } else {
      sum.end(place(), p_.dk, work_.kv_head, p_.common.softmax.scale);
    }
  }

 private:
  static constexpr int kColumns = kOfV ? C::kDimV : C::kDim;
  static constexpr int kOperandDim = kOfV ? C::kDim : C::kDimV;  // columns of the keys that this warp multiplies
  static constexpr int kBlocks = C::kQueries / 8;
  using Sum = GradientSum<Element, C::kRowBlocks, kColumns>;
  using Scores = float[C::kRowBlocks][kBlocks][4];
  using Packed = std::uint32_t[C::kRowBlocks][C::kQueries / 16][4];

  static __device__ __forceinline__ int pair_of_warp() { return cuda::thread_of_cta() / 32 % C::kPairs; }
  static __device__ __forceinline__ int row_of_warp() { return pair_of_warp() * C::kRowBlocks * 16; }
  // dK's sum is followed by dV's.
  __device__ __forceinline__ SumPlace place_of_sum() const {
    return {work_.row_tiles[0],        row_of_warp(), static_cast<int>(blockIdx.x),
            p_.common.tables.kv_heads, work_.kv_head, C::kDim + C::kDimV,
            kOfV ? C::kDim : 0};
  }

  // The warp's rows of K, or of V.
  __device__ __forceinline__ std::uint32_t keys_operand() const {
    return a_operand(kOfV ? map_.k() : map_.v(), row_of_warp());
  }
  __device__ __forceinline__ void load_keys() const {
    const RowTile& tile = work_.row_tiles[0];
    cuda::copy_tile<kBackwardTile, C::kDim, C::kThreads>(map_.k(), rows_at(p_.common.own[0], tile.row, work_.kv_head),
                                                         tile.valid_begin, tile.valid_end);
    cuda::copy_tile<kBackwardTile, C::kDimV, C::kThreads>(map_.v(), rows_at(p_.common.own[1], tile.row, work_.kv_head),
                                                          tile.valid_begin, tile.valid_end);
  }

  __device__ __forceinline__ void load_queries(int step) const {
    const StageRows& from = loop_.at(step);
    const int stage = step % C::kStages;
    cuda::copy_tile<C::kQueries, C::kDim, C::kThreads>(map_.q(stage), from.rows[0], from.begin, from.end);
    cuda::copy_tile<C::kQueries, C::kDimV, C::kThreads>(map_.dout(stage), from.rows[1], from.begin, from.end);
    constexpr int kStats = static_cast<int>(kRowStats);
    static_assert(C::kThreads >= kStats * C::kQueries);
    const int query = cuda::thread_of_cta() / kStats;
    const int stat = cuda::thread_of_cta() % kStats;
    if (query < C::kQueries) {
      cuda::copy_4(map_.lse2(stage) + static_cast<std::uint32_t>(stat * C::kStatBytes + query * 4),
                   from.stats + query * p_.common.heads * kRowStats + stat, query >= from.begin && query < from.end);
    }
  }

  // Columns 8 · block + 2t and 8 · block + 2t + 1 of LSE or delta.
  static __device__ __forceinline__ float2 load_columns(std::uint32_t stats, int block) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(stats + static_cast<std::uint32_t>((block * 8 + cuda::first_column_of_thread()) * 4))
                 : "memory");
    return x;
  }

  // The pair's lanes with the same number hold the same elements of P.
  __device__ __forceinline__ std::uint32_t exchanged(int block, int j) const {
    return map_.exchange(pair_of_warp()) +
           static_cast<std::uint32_t>(((block * kBlocks + j) * 32 + lane_of_warp()) * 16);
  }

  __device__ __forceinline__ SeenColumns seen_columns(int block, int step) const {
    const int offset = work_.row_tiles[0].offset + row_of_warp() + block * 16 + lane_of_warp() / 4;
    return cuda::seen_columns(p_.common.tables, offset, loop_.at(step).part * C::kQueries,
                              static_cast<int>(cuda::kMaxBackwardPosition));
  }

  // Selects zero for pairs that the mask excludes.
  __device__ __forceinline__ void mask_scores(Scores& s, int step) const {
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) cuda::mask_columns(s[block], seen_columns(block, step));
  }
  static __device__ __forceinline__ void pack(const Scores& s, Packed& packed) {
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) cuda::pack_block<Element>(s[block][j], packed[block], j);
    }
  }

  // Computes P from S, packs it, and passes it to the other warp of the pair. With a softcap it passes P times the
  // softcap's factor of dS.
  __device__ __forceinline__ void make_p(Scores& s, Packed& packed, int step, bool masked) const {
    const cuda::AttentionParams::Softmax& softmax = p_.common.softmax;
    const cuda::ScoreScaling scaling(softmax);
    const int stage = step % C::kStages;
    Scores factor;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 lse2 = load_columns(map_.lse2(stage), j);
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[block][j][e];
          if constexpr (C::kScaledFirst) {
            x = scaling.scaled(x);
            const float ratio = x * p_.common.inverse_cap;
            factor[block][j][e] = __fmaf_rn(-ratio, ratio, 1.0F);
          }
          x = cuda::exp2_approx(__fmaf_rn(x, softmax.exponent_base2, e % 2 == 0 ? -lse2.x : -lse2.y));
        }
      }
    }
    if (masked) mask_scores(s, step);
    pack(s, packed);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        float(&x)[4] = s[block][j];
        if constexpr (C::kScaledFirst) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] *= factor[block][j][e];
        }
        cuda::store_shared(exchanged(block, j), uint4{__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                      __float_as_uint(x[2]), __float_as_uint(x[3])});
      }
    }
    cuda::named_arrive(C::kPairBarrier + pair_of_warp(), 64);
  }

  // dP → dS, packed.
  __device__ __forceinline__ void make_ds(Scores& dp, Packed& packed, int step, bool masked) const {
    const int stage = step % C::kStages;
    cuda::named_sync(C::kPairBarrier + pair_of_warp(), 64);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 delta = load_columns(map_.delta(stage), j);
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
        float(&x)[4] = dp[block][j];
        const uint4 p = cuda::load_shared_16(exchanged(block, j));
        x[0] = __uint_as_float(p.x) * (x[0] - delta.x);
        x[1] = __uint_as_float(p.y) * (x[1] - delta.y);
        x[2] = __uint_as_float(p.z) * (x[2] - delta.x);
        x[3] = __uint_as_float(p.w) * (x[3] - delta.y);
      }
    }
    if (masked) mask_scores(dp, step);
    pack(dp, packed);
  }

  // Adds the queries of a stage.
  __device__ __forceinline__ void add(Sum& sum, int step, bool masked) const {
    const int stage = step % C::kStages;
    Scores s;
    Packed packed;
    const std::uint32_t queries = b_operand(kOfV ? map_.q(stage) : map_.dout(stage));
    if constexpr (C::kKeysInRegisters) {
      multiply_transposed<Element, kOperandDim, C::kQueries>(s, keys_, queries);
    } else {
      multiply_transposed<Element, kOperandDim, kBackwardTile, C::kQueries>(s, keys_operand(), queries);
    }
    if constexpr (kOfV) {
      make_p(s, packed, step, masked);
    } else {
      make_ds(s, packed, step, masked);
    }
    multiply_add<Element, kColumns, C::kQueries>(sum.d, packed,
                                                 b_operand_transposed(kOfV ? map_.dout(stage) : map_.q(stage)));
  }

  const DkvParams& p_;
  const DkvMap<C>& map_;
  const Work& work_;
  Loop& loop_;
  std::uint32_t keys_[C::kKeysInRegisters ? kOperandDim / 16 : 1][C::kRowBlocks][4];  // if C::kKeysInRegisters
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) dkv_kernel(const __grid_constant__ DkvParams p) {
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ cuda::BackwardWork<1> work;
  __shared__ StageLoop<C::kQueries> loop;
  const DkvMap<C> map{cuda::aligned_shared_address<cuda::kPanelRowBytes>(dynamic_shared)};
  const bool of_v = __shfl_sync(0xffffffffU, cuda::thread_of_cta() / 32 / C::kPairs, 0) == 0;
  for (;;) {
    take_work(p.common, p.common.heads / p.common.tables.kv_heads, work, loop);
    if (work.kv_head == cuda::kNoWorkLeft) return;
    if (of_v) {
      DkvWarp<C, true>(p, map, work, loop).compute();
    } else {
      DkvWarp<C, false>(p, map, work, loop).compute();
    }
  }
}

}  // namespace ringattn::sm80
