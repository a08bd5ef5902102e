// SPDX-License-Identifier: Apache-2.0
// dK and dV of the backward pass: Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q. A CTA owns 128 keys of one KV head,
// a warpgroup 64 of them, and loops over query tiles: token tiles ascending, and in each the heads of the group.
// P and dS are register operands. Warpgroup 0 is the producer.
#pragma once

#include "bench/backward_common.cuh"

namespace ringattn::spike {

// The order of a query tile's GEMMs, and what its arithmetic overlaps with.
enum class DkvForm {
  kInOrder,    // exp2 overlaps with dP; dV and dK follow dS
  kEarlyDv,    // dV is issued as soon as P is packed: dS overlaps with it
  kPipelined,  // the same, and dK is waited for after S of the next tile is issued
};
template <DkvForm kForm_, bool kPingPong_, bool kSpill_ = false>
struct DkvConfig {
  static constexpr DkvForm kForm = kForm_;
  static constexpr bool kSpill = kSpill_;        // dS is written to the workspace too
  static constexpr bool kPingPong = kPingPong_;  // the two consumers issue S and dP in turn
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2, kKeys = 128, kConsumerKeys = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kLoadRegisters = kForm == DkvForm::kInOrder ? 40 : 24,
                       kMathRegisters = kForm == DkvForm::kInOrder ? 232 : 240;
  static constexpr int kKeyBytes = kKeys * kRowBytes, kQBytes = kQueryTile * kRowBytes, kStatBytes = kQueryTile * 4;
  static constexpr std::uint32_t kV = kKeyBytes, kQ = 2 * kKeyBytes, kDout = kQ + kStages * kQBytes,
                                 kStats = kDout + kStages * kQBytes, kBarriers = kStats + kStages * 2 * kStatBytes;
  static constexpr int kWorkSlot = kBarriers + (2 + 2 * kStages) * 8;
  static constexpr int kShared = kWorkSlot + 16;
};

template <class C>
struct DkvMap {
  std::uint32_t base;
  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + C::kV; }
  __device__ std::uint32_t q(std::uint32_t stage) const { return base + C::kQ + stage * C::kQBytes; }
  __device__ std::uint32_t dout(std::uint32_t stage) const { return base + C::kDout + stage * C::kQBytes; }
  __device__ std::uint32_t lse2(std::uint32_t stage) const { return base + C::kStats + stage * 2 * C::kStatBytes; }
  __device__ std::uint32_t delta(std::uint32_t stage) const { return lse2(stage) + C::kStatBytes; }
  __device__ std::uint32_t kv_full() const { return base + C::kBarriers; }
  __device__ std::uint32_t kv_empty() const { return base + C::kBarriers + 8; }
  __device__ std::uint32_t full(std::uint32_t s) const { return base + C::kBarriers + 16 + s * 8; }
  __device__ std::uint32_t empty(std::uint32_t s) const { return full(C::kStages + s); }
};

// A work tile: 128 keys of a KV head. In an L2 swizzle group the longest come first.
template <class C>
struct DkvWorkTile {
  int key, kv, sequence, group;

  __device__ static int count(const Problem& p) { return p.seq / C::kKeys * p.batch * p.kv_heads; }
  __device__ DkvWorkTile(const Problem& p, int index) {
    const int in_swizzle = p.seq / C::kKeys * p.swizzle_heads;
    const int head = index / in_swizzle * p.swizzle_heads + index % in_swizzle % p.swizzle_heads;
    key = index % in_swizzle / p.swizzle_heads * C::kKeys;
    kv = head % p.kv_heads;
    sequence = head / p.kv_heads;
    group = p.heads / p.kv_heads;
  }
};

template <class C>
__device__ __forceinline__ void load_dkv(const Problem& p, const DkvMap<C>& map, int* work_slot) {
  sm90::PackedPipelineState<C::kStages> ring;
  const std::int64_t tokens = std::int64_t{p.batch} * p.seq;
  int index = static_cast<int>(blockIdx.x);
  for (std::uint32_t parity = 0;; parity ^= 1) {
    sm90::barrier_wait(map.kv_empty(), parity ^ 1);
    if (index >= DkvWorkTile<C>::count(p)) {
      *work_slot = kNoMoreWork;
      sm90::barrier_arrive(map.kv_full());
      return;
    }
    *work_slot = index;
    const DkvWorkTile<C> work(p, index);
    const int row = work.sequence * p.seq;
    sm90::barrier_arrive_expect(map.kv_full(), 2 * C::kKeyBytes);
    sm90::tma_load_box(map.k(), &p.k, map.kv_full(), 0, work.kv, row + work.key);
    sm90::tma_load_box(map.v(), &p.v, map.kv_full(), 0, work.kv, row + work.key);
    for (int position = work.key; position < p.seq; position += kQueryTile) {
      for (int member = 0; member < work.group; ++member, ring.advance()) {
        const int head = work.kv * work.group + member;
        const std::uint32_t stage = ring.stage(), full = map.full(stage);
        sm90::barrier_wait(map.empty(stage), ring.parity() ^ 1);
        sm90::barrier_arrive_expect(full, 2 * C::kQBytes + 2 * C::kStatBytes);
        sm90::tma_load_box(map.q(stage), &p.q, full, 0, head, row + position);
        sm90::tma_load_bytes(map.lse2(stage), p.lse2 + head * tokens + row + position, C::kStatBytes, full);
        sm90::tma_load_box(map.dout(stage), &p.dout, full, 0, head, row + position);
        sm90::tma_load_bytes(map.delta(stage), p.delta + head * tokens + row + position, C::kStatBytes, full);
      }
    }
    index = static_cast<int>(gridDim.x) + atomicAdd(p.taken, 1);
  }
}

template <class C>
class DkvMath {
 public:
  __device__ __forceinline__ DkvMath(const Problem& p, const DkvMap<C>& map, int consumer)
      : p_(p), map_(map), consumer_(consumer) {}

  __device__ __forceinline__ void run(const int* work_slot) {
    if (consumer_ == 1) ping_pong_arrive();
    for (std::uint32_t parity = 0;; parity ^= 1) {
      sm90::barrier_wait(map_.kv_full(), parity);
      const int index = static_cast<int>(sm90::of_warp(*reinterpret_cast<const volatile int*>(work_slot)));
      if (index == kNoMoreWork) return;
      const DkvWorkTile<C> work(p_, index);
      if (consumer_ == 1) {  // no query of the first token tile sees the second half of the keys
        for (int member = 0; member < work.group; ++member) {
          sm90::barrier_wait(map_.full(ring_.stage()), ring_.parity());
          release(ring_.stage());
          ring_.advance();
          ping_pong_wait();
          ping_pong_arrive();
        }
      }
      compute(work);
    }
  }

 private:
  using Scores = float[kQueryTile / 8][4];
  using Packed = std::uint32_t[kQueryTile / 16][4];

  __device__ __forceinline__ void release(std::uint32_t stage) const {
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(map_.empty(stage));
  }
  __device__ __forceinline__ std::uint32_t keys_of_consumer() const {
    return consumer_ * C::kConsumerKeys * kPanelRowBytes;
  }
  __device__ __forceinline__ void issue_s(Scores& s) {
    sm90::barrier_wait(map_.full(ring_.stage()), ring_.parity());
    multiply_rows<kQueryTile, C::kKeys, kQueryTile>(s, map_.k() + keys_of_consumer(), map_.q(ring_.stage()));
  }
  // Columns 8j + 2t and 8j + 2t + 1 of LSE or delta, loaded where they are used: registers for all are lacking.
  static __device__ __forceinline__ void load_columns(std::uint32_t row, int j, float (&x)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(row + j * 32 + threadIdx.x % 4 * 8));
  }
  static __device__ __forceinline__ void pack_tile(const Scores& s, Packed& a) {
#pragma unroll
    for (int j = 0; j < kQueryTile / 8; ++j) {
      a[j / 2][2 * (j % 2)] = pack(s[j][0], s[j][1]);
      a[j / 2][2 * (j % 2) + 1] = pack(s[j][2], s[j][3]);
    }
  }

  __device__ __forceinline__ void compute(const DkvWorkTile<C>& work) {
    const int key = work.key + consumer_ * C::kConsumerKeys;
    const int token_tiles = (p_.seq - key) / kQueryTile;
    float* merged_k = scratch_of_thread(p_.scratch + (std::int64_t{blockIdx.x} * C::kConsumers + consumer_) * 2 *
                                                         C::kConsumerKeys * kDim);
    float* merged_v = merged_k + C::kConsumerKeys * kDim;

    // Query tiles until the split ends: split boundaries are positions of the sequence.
    int split = kSplitTiles - key / kQueryTile * work.group % kSplitTiles;
    if constexpr (C::kSpill) spill_ = spill_tile(p_, work.kv * work.group, work.sequence, key / 64, key / 64);
    bool any_merged = false;
    for (int left = token_tiles * work.group;;) {
      const int tiles = left < split ? left : split;
      sum_split(tiles, left == token_tiles * work.group ? work.group : 0);
      left -= tiles;
      split = kSplitTiles;
      if (left == 0) break;
      merge_split(merged_k, dk_, !any_merged);
      merge_split(merged_v, dv_, !any_merged);
      any_merged = true;
    }
    sm90::barrier_arrive(map_.kv_empty());
    if (any_merged) {
      add_merged(merged_k, dk_);
      add_merged(merged_v, dv_);
    }
    const std::int64_t at = ((std::int64_t{work.sequence} * p_.seq + key) * p_.kv_heads + work.kv) * kDim;
    const std::int64_t stride = std::int64_t{p_.kv_heads} * kDim;
    write_rows(p_.dk + at, stride, dk_, p_.scale);
    write_rows(p_.dv + at, stride, dv_, 1.0F);
  }

  __device__ __forceinline__ void ping_pong_wait() const {
    if constexpr (C::kPingPong) sm90::named_sync(1 + consumer_, 2 * sm90::kWarpgroup);
  }
  __device__ __forceinline__ void ping_pong_arrive() const {
    if constexpr (C::kPingPong) sm90::named_arrive(2 - consumer_, 2 * sm90::kWarpgroup);
  }
  // dK and dV of one split; its first `masked` tiles are on the diagonal.
  __device__ __forceinline__ void sum_split(int tiles, int masked) {
    in_flight_ = ring_;
    first_ = true;
    any_in_flight_ = false;
    int i = 0;
#pragma unroll 1
    for (; i < masked; ++i) step<true>();
#pragma unroll 1
    for (; i < tiles; ++i) step<false>();
    if constexpr (C::kForm == DkvForm::kPipelined) await_sums();
  }
  __device__ __forceinline__ void issue_dp(Scores& dp) {
    multiply_rows<kQueryTile, C::kKeys, kQueryTile>(dp, map_.v() + keys_of_consumer(), map_.dout(ring_.stage()));
  }
  // S → P, in place.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate(Scores& s, std::uint32_t stage) const {
#pragma unroll
    for (int j = 0; j < kQueryTile / 8; ++j) {
      float x[2];
      load_columns(map_.lse2(stage), j, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = cuda::exp2_approx(fmaf(s[j][e], p_.scale2, -x[e % 2]));
    }
    if constexpr (kMasked) mask(s, sm90::tile_row_of_thread());
  }
  // dP → dS, in place.
  template <bool kMasked>
  __device__ __forceinline__ void make_ds(const Scores& s, Scores& dp, std::uint32_t stage) const {
#pragma unroll
    for (int j = 0; j < kQueryTile / 8; ++j) {
      float x[2];
      load_columns(map_.delta(stage), j, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[j][e] * (dp[j][e] - x[e % 2]);
    }
    if constexpr (kMasked) mask(dp, sm90::tile_row_of_thread());
  }
  __device__ __forceinline__ void issue_dv(std::uint32_t stage) {
    add_product<kQueryTile / 16, kQueryTile>(dv_, packed_p_, map_.dout(stage), first_);
  }
  __device__ __forceinline__ void issue_dk(std::uint32_t stage) {
    add_product<kQueryTile / 16, kQueryTile>(dk_, packed_ds_, map_.q(stage), first_);
    first_ = false;
  }

  __device__ __forceinline__ void spill_ds() {
    char* tile = spill_address(p_, spill_) + sm90::thread_of_warpgroup() * 16;
#pragma unroll
    for (int i = 0; i < kQueryTile / 16; ++i) {
      __stcs(reinterpret_cast<uint4*>(tile + i * 16 * sm90::kWarpgroup),
             make_uint4(packed_ds_[i][0], packed_ds_[i][1], packed_ds_[i][2], packed_ds_[i][3]));
    }
    spill_ += p_.seq / 64;  // the next head of the group, or the next token tile
  }
  // Waits for dV and dK of the previous tile and releases its stage; kPending later GEMMs stay in flight.
  template <int kPending = 0>
  __device__ __forceinline__ void await_sums() {
    sm90::wgmma_wait<kPending>();
    sm90::pin(dv_);
    sm90::pin(dk_);
#pragma unroll
    for (int j = 0; j < kQueryTile / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(packed_p_[j][i]), "+r"(packed_ds_[j][i])::"memory");
    }
    if (kPending == 0 || any_in_flight_) {
      release(in_flight_.stage());
      in_flight_.advance();
    }
    any_in_flight_ = true;
  }
  // One query tile.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    Scores s, dp;
    const std::uint32_t stage = ring_.stage();
    ping_pong_wait();
    issue_s(s);
    if constexpr (C::kForm == DkvForm::kPipelined) await_sums<1>();
    issue_dp(dp);
    ping_pong_arrive();
    sm90::wgmma_wait<1>();
    sm90::pin(s);
    exponentiate<kMasked>(s, stage);
    if constexpr (C::kForm == DkvForm::kInOrder) {
      sm90::wgmma_wait<0>();
      sm90::pin(dp);
      pack_tile(s, packed_p_);
      make_ds<kMasked>(s, dp, stage);
      pack_tile(dp, packed_ds_);
      issue_dv(stage);
    } else {
      pack_tile(s, packed_p_);
      issue_dv(stage);
      sm90::wgmma_wait<1>();
      sm90::pin(dp);
      make_ds<kMasked>(s, dp, stage);
      pack_tile(dp, packed_ds_);
    }
    issue_dk(stage);
    if constexpr (C::kSpill) spill_ds();
    ring_.advance();
    if constexpr (C::kForm != DkvForm::kPipelined) await_sums();
  }

  // Sets elements of a diagonal tile to zero where the query (column) precedes the key (row).
  static __device__ __forceinline__ void mask(Scores& s, int slot) {
    const int from = slot - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < kQueryTile / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (j * 8 + e % 2 < from + e / 2 * 8) s[j][e] = 0.0F;
      }
    }
  }

  const Problem& p_;
  const DkvMap<C>& map_;
  int consumer_;
  sm90::PackedPipelineState<C::kStages> ring_;
  sm90::PackedPipelineState<C::kStages> in_flight_;  // stage that dV and dK in flight read
  bool first_ = true;                                // the next dV and dK begin a split
  bool any_in_flight_ = false;                       // dV and dK of a previous tile are in flight
  float dk_[kDim / 8][4], dv_[kDim / 8][4];
  Packed packed_p_, packed_ds_;
  std::uint32_t spill_ = 0;  // tile of the workspace for the next dS
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) dkv_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DkvMap<C> map{static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))};
  int* work_slot = reinterpret_cast<int*>(shared + C::kWorkSlot);
  if (threadIdx.x == 0) {
    sm90::barrier_init(map.kv_full(), 1);
    sm90::barrier_init(map.kv_empty(), C::kConsumers * sm90::kWarpgroup);
    for (std::uint32_t s = 0; s < C::kStages; ++s) {
      sm90::barrier_init(map.full(s), 1);
      sm90::barrier_init(map.empty(s), C::kConsumers * 4);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / sm90::kWarpgroup;
  if (warpgroup == 0) {
    sm90::reg_dealloc<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_dkv<C>(p, map, work_slot);
  } else {
    sm90::reg_alloc<C::kMathRegisters>();
    DkvMath<C>(p, map, warpgroup - 1).run(work_slot);
  }
}

}  // namespace ringattn::spike
