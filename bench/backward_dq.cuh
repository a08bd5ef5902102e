// SPDX-License-Identifier: Apache-2.0
// dQ of the backward pass: S = Q Kᵀ, dP = dO Vᵀ, dQ += dS K. A CTA owns kConsumers query tiles of one KV head, one a
// warpgroup, and loops over the keys that they see. dS is a register operand. Warpgroup 0 is the producer.
#pragma once

#include "bench/backward_common.cuh"

namespace ringattn::spike {

// The order of a key tile's GEMMs.
enum class DqForm {
  kInOrder,    // exp2 overlaps with dP; dQ follows dS
  kPipelined,  // the same, and dQ is waited for after S of the next tile is issued
};
template <int kKeys_, int kConsumers_, int kStagesK_, int kStagesV_, DqForm kForm_, bool kPingPong_>
struct DqConfig {
  static constexpr DqForm kForm = kForm_;
  static constexpr bool kPingPong = kPingPong_;
  static_assert(!kPingPong || kConsumers_ == 2);
  static constexpr int kKeys = kKeys_, kConsumers = kConsumers_, kStagesK = kStagesK_, kStagesV = kStagesV_;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kLoadRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kMathRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kQBytes = kQueryTile * kRowBytes, kTileBytes = kKeys * kRowBytes;
  static constexpr std::uint32_t kDout = kConsumers * kQBytes, kK = 2 * kDout, kV = kK + kStagesK * kTileBytes,
                                 kBarriers = kV + kStagesV * kTileBytes;
  static constexpr int kBarrierCount = 2 + 2 * kStagesK + 2 * kStagesV;
  static constexpr int kWorkSlot = kBarriers + kBarrierCount * 8;
  static constexpr int kShared = kWorkSlot + 16;
};

template <class C>
struct DqMap {
  std::uint32_t base;
  __device__ std::uint32_t q(int consumer) const { return base + consumer * C::kQBytes; }
  __device__ std::uint32_t dout(int consumer) const { return base + C::kDout + consumer * C::kQBytes; }
  __device__ std::uint32_t k(std::uint32_t stage) const { return base + C::kK + stage * C::kTileBytes; }
  __device__ std::uint32_t v(std::uint32_t stage) const { return base + C::kV + stage * C::kTileBytes; }
  __device__ std::uint32_t q_full() const { return base + C::kBarriers; }
  __device__ std::uint32_t q_empty() const { return base + C::kBarriers + 8; }
  __device__ std::uint32_t k_full(std::uint32_t s) const { return base + C::kBarriers + 16 + s * 8; }
  __device__ std::uint32_t k_empty(std::uint32_t s) const { return k_full(C::kStagesK + s); }
  __device__ std::uint32_t v_full(std::uint32_t s) const { return k_full(2 * C::kStagesK + s); }
  __device__ std::uint32_t v_empty(std::uint32_t s) const { return k_full(2 * C::kStagesK + C::kStagesV + s); }
};

// A work tile: kConsumers query tiles of a KV head, one for each consumer. They are numbered by position, then by head
// of the group; `first` is the first consumer's. In an L2 swizzle group the longest come first.
template <class C>
struct DqWorkTile {
  int first, kv, sequence, group;

  __device__ static int per_kv_head(const Problem& p) {
    return (p.seq / kQueryTile * (p.heads / p.kv_heads) + C::kConsumers - 1) / C::kConsumers;
  }
  __device__ static int count(const Problem& p) { return per_kv_head(p) * p.batch * p.kv_heads; }
  __device__ DqWorkTile(const Problem& p, int index) {
    const int in_swizzle = per_kv_head(p) * p.swizzle_heads;
    const int head = index / in_swizzle * p.swizzle_heads + index % in_swizzle % p.swizzle_heads;
    first = (per_kv_head(p) - 1 - index % in_swizzle / p.swizzle_heads) * C::kConsumers;
    kv = head % p.kv_heads;
    sequence = head / p.kv_heads;
    group = p.heads / p.kv_heads;
  }
  __device__ bool has(const Problem& p, int consumer) const { return first + consumer < p.seq / kQueryTile * group; }
  __device__ int position(int consumer) const { return (first + consumer) / group * kQueryTile; }
  __device__ int head(int consumer) const { return kv * group + (first + consumer) % group; }
  __device__ int tiles(const Problem& p, int consumer) const {
    return has(p, consumer) ? (position(consumer) + kQueryTile - 1) / C::kKeys + 1 : 0;
  }
  __device__ int tiles(const Problem& p) const {
    int last = C::kConsumers - 1;
    while (!has(p, last)) --last;
    return tiles(p, last);
  }
};

template <class C>
__device__ __forceinline__ void load_dq(const Problem& p, const DqMap<C>& map, int* work_slot) {
  sm90::PackedPipelineState<C::kStagesK> k;
  sm90::PackedPipelineState<C::kStagesV> v;
  int index = static_cast<int>(blockIdx.x);
  for (std::uint32_t parity = 0;; parity ^= 1) {
    sm90::barrier_wait(map.q_empty(), parity ^ 1);
    if (index >= DqWorkTile<C>::count(p)) {
      *work_slot = kNoMoreWork;
      sm90::barrier_arrive(map.q_full());
      return;
    }
    *work_slot = index;
    const DqWorkTile<C> work(p, index);
    const int row = work.sequence * p.seq;
    int consumers = 0;
    while (consumers < C::kConsumers && work.has(p, consumers)) ++consumers;
    sm90::barrier_arrive_expect(map.q_full(), 2 * consumers * C::kQBytes);
    for (int consumer = 0; consumer < consumers; ++consumer) {
      sm90::tma_load_box(map.q(consumer), &p.q, map.q_full(), 0, work.head(consumer), row + work.position(consumer));
      sm90::tma_load_box(map.dout(consumer), &p.dout, map.q_full(), 0, work.head(consumer),
                         row + work.position(consumer));
    }
    const int tiles = work.tiles(p);
    for (int i = 0; i < tiles; ++i, k.advance(), v.advance()) {
      sm90::barrier_wait(map.k_empty(k.stage()), k.parity() ^ 1);
      sm90::barrier_arrive_expect(map.k_full(k.stage()), C::kTileBytes);
      sm90::tma_load_box(map.k(k.stage()), &p.k, map.k_full(k.stage()), 0, work.kv, row + i * C::kKeys);
      sm90::barrier_wait(map.v_empty(v.stage()), v.parity() ^ 1);
      sm90::barrier_arrive_expect(map.v_full(v.stage()), C::kTileBytes);
      sm90::tma_load_box(map.v(v.stage()), &p.v, map.v_full(v.stage()), 0, work.kv, row + i * C::kKeys);
    }
    index = static_cast<int>(gridDim.x) + atomicAdd(p.taken, 1);
  }
}

template <class C>
class DqMath {
 public:
  __device__ __forceinline__ DqMath(const Problem& p, const DqMap<C>& map, int consumer)
      : p_(p), map_(map), consumer_(consumer) {}

  __device__ __forceinline__ void run(const int* work_slot) {
    if (consumer_ == 1) ping_pong_arrive();
    for (std::uint32_t parity = 0;; parity ^= 1) {
      sm90::barrier_wait(map_.q_full(), parity);
      const int index = static_cast<int>(sm90::of_warp(*reinterpret_cast<const volatile int*>(work_slot)));
      if (index == kNoMoreWork) return;
      const DqWorkTile<C> work(p_, index);
      const int tiles = work.tiles(p_, consumer_);
      if (tiles > 0) compute(work, tiles);
      if (tiles == 0) sm90::barrier_arrive(map_.q_empty());
      for (int left = work.tiles(p_) - tiles; left > 0; --left) {  // key tiles that only other consumers see
        sm90::barrier_wait(map_.k_full(k_.stage()), k_.parity());
        sm90::barrier_wait(map_.v_full(v_.stage()), v_.parity());
        release(map_.k_empty(k_.stage()));
        release(map_.v_empty(v_.stage()));
        k_.advance();
        in_flight_.advance();
        v_.advance();
      }
    }
  }

 private:
  using Scores = float[C::kKeys / 8][4];
  static constexpr int kTilesPerSplit = kKvSplit / C::kKeys;

  // One lane of each warp arrives.
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(barrier);
  }
  __device__ __forceinline__ void issue_s(Scores& s) {
    sm90::barrier_wait(map_.k_full(k_.stage()), k_.parity());
    multiply_rows<C::kKeys, kQueryTile, C::kKeys>(s, map_.q(consumer_), map_.k(k_.stage()));
  }

  __device__ __forceinline__ void compute(const DqWorkTile<C>& work, int tiles) {
    const int position = work.position(consumer_);
    const std::int64_t row = std::int64_t{work.sequence} * p_.seq + position;
    const std::int64_t tokens = std::int64_t{p_.batch} * p_.seq;
    const int slot = sm90::tile_row_of_thread();
    const float* lse2 = p_.lse2 + work.head(consumer_) * tokens + row + slot;
    const float* delta = p_.delta + work.head(consumer_) * tokens + row + slot;
    const float negative_lse[2] = {-lse2[0], -lse2[8]};
    const float deltas[2] = {delta[0], delta[8]};
    float* merged =
        scratch_of_thread(p_.scratch + (std::int64_t{blockIdx.x} * C::kConsumers + consumer_) * kQueryTile * kDim);

    bool any_merged = false;
    for (int i = 0;;) {
      const int end = i + kTilesPerSplit < tiles ? i + kTilesPerSplit : tiles;
      sum_split(i, end, end == tiles, position, negative_lse, deltas);
      if (end == tiles) break;
      merge_split(merged, dq_, !any_merged);
      any_merged = true;
      i = end;
    }
    if (any_merged) add_merged(merged, dq_);
    write_rows(p_.dq + (row * p_.heads + work.head(consumer_)) * kDim, std::int64_t{p_.heads} * kDim, dq_, p_.scale);
  }

  __device__ __forceinline__ void ping_pong_wait() const {
    if constexpr (C::kPingPong) sm90::named_sync(1 + consumer_, 2 * sm90::kWarpgroup);
  }
  __device__ __forceinline__ void ping_pong_arrive() const {
    if constexpr (C::kPingPong) sm90::named_arrive(2 - consumer_, 2 * sm90::kWarpgroup);
  }

  __device__ __forceinline__ void issue_dp(Scores& dp) {
    sm90::barrier_wait(map_.v_full(v_.stage()), v_.parity());
    multiply_rows<C::kKeys, kQueryTile, C::kKeys>(dp, map_.dout(consumer_), map_.v(v_.stage()));
  }
  __device__ __forceinline__ void exponentiate(Scores& s, const float (&negative_lse)[2]) {
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = cuda::exp2_approx(fmaf(s[j][e], p_.scale2, negative_lse[e / 2]));
    }
  }
  // P and dP → dS of tile i, packed. Only the last tile crosses the diagonal.
  template <bool kLast>
  __device__ __forceinline__ void make_ds(Scores& s, const Scores& dp, int i, int position, const float (&deltas)[2]) {
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] *= dp[j][e] - deltas[e / 2];
    }
    if constexpr (kLast) {
      const int seen = position + sm90::tile_row_of_thread() - i * C::kKeys - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (j * 8 + e % 2 > seen + e / 2 * 8) s[j][e] = 0.0F;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) {
      ds_[j / 2][2 * (j % 2)] = pack(s[j][0], s[j][1]);
      ds_[j / 2][2 * (j % 2) + 1] = pack(s[j][2], s[j][3]);
    }
  }
  // dQ of the split's tiles i … end − 1. `last`: tile end − 1 crosses the diagonal.
  __device__ __forceinline__ void sum_split(int i, int end, bool last, int position, const float (&negative_lse)[2],
                                            const float (&deltas)[2]) {
    first_ = true;
    any_in_flight_ = false;
    in_flight_ = k_;
    const int plain_end = last ? end - 1 : end;
#pragma unroll 1
    for (; i < plain_end; ++i) step<false>(i, position, negative_lse, deltas);
    if (last) {
      step<true>(i, position, negative_lse, deltas);
      sm90::barrier_arrive(map_.q_empty());
    }
    if constexpr (C::kForm == DqForm::kPipelined) await_dq();
  }

  // Waits for dQ of the previous tile and releases its K; kPending later GEMMs stay in flight.
  template <int kPending = 0>
  __device__ __forceinline__ void await_dq() {
    sm90::wgmma_wait<kPending>();
    sm90::pin(dq_);
#pragma unroll
    for (int j = 0; j < C::kKeys / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(ds_[j][i])::"memory");
    }
    if (kPending == 0 || any_in_flight_) {
      release(map_.k_empty(in_flight_.stage()));
      in_flight_.advance();
    }
    any_in_flight_ = true;
  }

  // One key tile.
  template <bool kLast>
  __device__ __forceinline__ void step(int i, int position, const float (&negative_lse)[2], const float (&deltas)[2]) {
    Scores s, dp;
    ping_pong_wait();
    issue_s(s);
    if constexpr (C::kForm == DqForm::kPipelined) await_dq<1>();
    issue_dp(dp);
    ping_pong_arrive();
    sm90::wgmma_wait<1>();
    sm90::pin(s);
    exponentiate(s, negative_lse);
    sm90::wgmma_wait<0>();
    sm90::pin(dp);
    release(map_.v_empty(v_.stage()));
    v_.advance();
    make_ds<kLast>(s, dp, i, position, deltas);
    add_product<C::kKeys / 16, C::kKeys>(dq_, ds_, map_.k(k_.stage()), first_);
    first_ = false;
    k_.advance();
    if constexpr (C::kForm == DqForm::kInOrder) await_dq();
  }

  const Problem& p_;
  const DqMap<C>& map_;
  int consumer_;
  sm90::PackedPipelineState<C::kStagesK> k_;
  sm90::PackedPipelineState<C::kStagesV> v_;
  sm90::PackedPipelineState<C::kStagesK> in_flight_;  // K that dQ in flight reads
  bool first_ = true;                                 // the next dQ begins a split
  bool any_in_flight_ = false;                        // dQ of a previous tile is in flight
  float dq_[kDim / 8][4];
  std::uint32_t ds_[C::kKeys / 16][4];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) dq_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DqMap<C> map{static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))};
  int* work_slot = reinterpret_cast<int*>(shared + C::kWorkSlot);
  if (threadIdx.x == 0) {
    sm90::barrier_init(map.q_full(), 1);
    sm90::barrier_init(map.q_empty(), C::kConsumers * sm90::kWarpgroup);
    for (std::uint32_t s = 0; s < C::kStagesK; ++s) {
      sm90::barrier_init(map.k_full(s), 1);
      sm90::barrier_init(map.k_empty(s), C::kConsumers * 4);
    }
    for (std::uint32_t s = 0; s < C::kStagesV; ++s) {
      sm90::barrier_init(map.v_full(s), 1);
      sm90::barrier_init(map.v_empty(s), C::kConsumers * 4);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / sm90::kWarpgroup;
  if (warpgroup == 0) {
    sm90::reg_dealloc<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_dq<C>(p, map, work_slot);
  } else {
    sm90::reg_alloc<C::kMathRegisters>();
    DqMath<C>(p, map, warpgroup - 1).run(work_slot);
  }
}

}  // namespace ringattn::spike
