// SPDX-License-Identifier: Apache-2.0
// dQ: S = Q Kᵀ, dP = dO Vᵀ, dQ += dS K. A CTA owns a pair of head tiles of one KV head, one a warpgroup, and loops over
// the keys that they see. dS is a register operand. Warp 0 is the producer.
#pragma once

#include "kernels/attention_backward/sm90/work.cuh"

namespace ringattn::sm90 {

template <class Element_, BackwardConfig kConfig, bool kScaledFirst_>
struct DqTraits {
  using Element = Element_;
  static constexpr bool kScaledFirst = kScaledFirst_;  // AttentionParams::Softmax::scaled_first
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kKeys = kConfig.dq_key_tile;
  static constexpr int kStagesK = kConfig.dq_k_stages, kStagesV = kConfig.dq_v_stages;
  static constexpr int kQBytes = kBackwardTile * cuda::padded_row_bytes(kDim);
  static constexpr int kDoutBytes = kBackwardTile * cuda::padded_row_bytes(kDimV);
  static constexpr int kKBytes = kKeys * cuda::padded_row_bytes(kDim);
  static constexpr int kVBytes = kKeys * cuda::padded_row_bytes(kDimV);
  // Shared memory, in this order.
  static constexpr int kDout = kBackwardConsumers * kQBytes;
  static constexpr int kK = kDout + kBackwardConsumers * kDoutBytes;
  static constexpr int kV = kK + kStagesK * kKBytes;
  static constexpr int kBarriers = kV + kStagesV * kVBytes;
  static constexpr int kBarrierCount = 3 + 2 * kStagesK + 2 * kStagesV;
  static constexpr int kWork = kBarriers + (kBarrierCount * kBarrierBytes + 15) / 16 * 16;
  static constexpr int kShared = kWork + kWorkSlots * static_cast<int>(sizeof(BackwardWork));
};

// Addresses in shared memory.
template <class C>
struct DqMap {
  std::uint32_t base;
  __device__ std::uint32_t q(int consumer) const { return base + consumer * C::kQBytes; }
  __device__ std::uint32_t dout(int consumer) const { return base + C::kDout + consumer * C::kDoutBytes; }
  __device__ std::uint32_t k(std::uint32_t stage) const { return base + C::kK + stage * C::kKBytes; }
  __device__ std::uint32_t v(std::uint32_t stage) const { return base + C::kV + stage * C::kVBytes; }
  // Work has been published and its Q and dO have landed; the consumers are done with them.
  __device__ std::uint32_t work_full() const { return barrier(0); }
  __device__ std::uint32_t work_empty() const { return barrier(1); }
  // A partial K tile has landed, and its absent rows can be zeroed.
  __device__ std::uint32_t partial_landed() const { return barrier(2); }
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return barrier(3 + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return barrier(3 + C::kStagesK + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return barrier(3 + 2 * C::kStagesK + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const {
    return barrier(3 + 2 * C::kStagesK + C::kStagesV + stage);
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t index) const { return base + C::kBarriers + index * kBarrierBytes; }
};

// Main loop of the producer warp. kBulk: TMA loads the tensors.
template <class C, bool kBulk>
__device__ __forceinline__ void produce_dq(const DqParams& p, const DqMap<C>& map, BackwardWork* slots) {
  const cuda::BackwardTables& tables = p.common.tables;
  const bool leads = thread_of_cta() % kWarp == 0;
  PackedPipelineState<C::kStagesK> k;
  PackedPipelineState<C::kStagesV> v;
  std::uint32_t partial_parity = 0;
  int index = static_cast<int>(blockIdx.x);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    BackwardWork& work = slots[parity];
    barrier_wait(map.work_empty(), parity ^ 1U);
    const bool any = publish_work(tables, index, work);
    if (!any) {
      if (leads) barrier_arrive(map.work_full());
      return;
    }
    const int count = work.pair.count;
    if constexpr (!kBulk) {
      for (int consumer = 0; consumer < count; ++consumer) {
        const RowTile& tile = work.row_tiles[consumer];
        const int head = head_of(tables, work, consumer);
        copy_tile_rows<kBackwardTile, C::kDim>(map.q(consumer), p.common.own[0], tile.row, head, tile.valid_begin,
                                               tile.valid_end);
        copy_tile_rows<kBackwardTile, C::kDimV>(map.dout(consumer), p.common.own[1], tile.row, head, tile.valid_begin,
                                                tile.valid_end);
      }
      publish_tile(map.work_full());
    } else if (leads) {
      barrier_arrive_expect(map.work_full(), count * (C::kQBytes + C::kDoutBytes));
      for (int consumer = 0; consumer < count; ++consumer) {
        const int head = head_of(tables, work, consumer);
        const int row = static_cast<int>(work.row_tiles[consumer].row);
        load_rows<C::kDim>(map.q(consumer), cuda::panel_bytes(kBackwardTile), p.q, map.work_full(), head, row);
        load_rows<C::kDimV>(map.dout(consumer), cuda::panel_bytes(kBackwardTile), p.dout, map.work_full(), head, row);
      }
    }
    const int kv_head = work.kv_head;
    for (int i = work.pair.run_begin; i < work.pair.run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval range = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      for (int tile = range.begin; tile < range.end; ++tile, k.advance(), v.advance()) {
        const int table = run.table - run.first_tile + tile;
        const cuda::OtherTile from = tables.tiles[table];
        const int row = static_cast<int>(from.row);
        const bool whole = from.end == C::kKeys;
        barrier_wait(map.k_empty(k.stage()), k.parity() ^ 1U);
        if constexpr (!kBulk) {
          const cuda::TileRows& rows = tables.tile_rows[table];
          copy_tile_rows<C::kKeys, C::kDim>(map.k(k.stage()), rows.rows[0], from.row, kv_head, 0, from.end);
          publish_tile(map.k_full(k.stage()));
          barrier_wait(map.v_empty(v.stage()), v.parity() ^ 1U);
          copy_tile_rows<C::kKeys, C::kDimV>(map.v(v.stage()), rows.rows[1], from.row, kv_head, 0, from.end);
          publish_tile(map.v_full(v.stage()));
          continue;
        }
        const std::uint32_t landed = whole ? map.k_full(k.stage()) : map.partial_landed();
        if (leads) {
          barrier_arrive_expect(landed, C::kKBytes);
          load_rows<C::kDim>(map.k(k.stage()), cuda::panel_bytes(C::kKeys), p.k[from.source], landed, kv_head, row);
        }
        barrier_wait(map.v_empty(v.stage()), v.parity() ^ 1U);
        if (leads) {
          barrier_arrive_expect(map.v_full(v.stage()), C::kVBytes);
          load_rows<C::kDimV>(map.v(v.stage()), cuda::panel_bytes(C::kKeys), p.v[from.source], map.v_full(v.stage()),
                              kv_head, row);
        }
        if (!whole) {
          barrier_wait(landed, partial_parity);
          partial_parity ^= 1U;
          zero_rows<C::kKeys, C::kDim>(map.k(k.stage()), 0, from.end);
          publish_tile(map.k_full(k.stage()));
        }
        __syncwarp();
      }
    }
    index = take_work(tables);
  }
}

template <class C>
class DqConsumer {
 public:
  __device__ __forceinline__ DqConsumer(const DqParams& p, const DqMap<C>& map, int consumer)
      : p_(p), map_(map), consumer_(consumer), ping_pong_(consumer) {}

  __device__ __forceinline__ void run(const BackwardWork* slots) {
    ping_pong_.begin();
    for (std::uint32_t parity = 0;; parity ^= 1U) {
      barrier_wait(map_.work_full(), parity);
      const BackwardWork& work = slots[parity];
      if (static_cast<int>(warp_uniform(static_cast<std::uint32_t>(work.kv_head))) == kNoWorkLeft) break;
      compute(work);
    }
    ping_pong_.end();
  }

 private:
  using Scores = float[C::kKeys / 8][4];

  static __device__ __forceinline__ int uniform(int number) {
    return static_cast<int>(warp_uniform(static_cast<std::uint32_t>(number)));
  }

  __device__ __forceinline__ SumRows sum(const BackwardWork& work, bool open) const {
    return sum_rows(p_.common.sums, work.row_tiles[consumer_], scratch_tile(p_.common.tables, work, consumer_),
                    tile_row_of_thread(), p_.common.heads, head_of(p_.common.tables, work, consumer_), C::kDim, 0,
                    open);
  }

  __device__ __forceinline__ void compute(const BackwardWork& work) {
    const cuda::BackwardTables& tables = p_.common.tables;
    const RowTile& tile = work.row_tiles[consumer_];
    const bool active = uniform(consumer_ < work.pair.count ? 1 : 0) != 0;
    const int begin = uniform(tile.begin_tile);
    const int end = active ? uniform(min(tile.end_tile, work.pair.end_tile)) : begin;
    const int flags = active ? uniform(tile.flags) : 0;
    const int phase = uniform(work.pair.split_phase);
    unmasked_ = {uniform(tile.unmasked_begin), uniform(tile.unmasked_end)};
    offset_ = tile.offset + tile_row_of_thread();
    keys_end_ = work.pair.other_end;
    read_stats(work);

    bool any_closed = (flags & RowTile::kHasClosedSum) != 0;
    bool any_open = (flags & RowTile::kHasOpenSum) != 0;
    first_ = !any_open;
    load_sum(sum(work, true), any_open, dq_);
    const int run_end = uniform(work.pair.run_end);
    for (int i = uniform(work.pair.run_begin); i < run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval of_pair = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      const int run_from = uniform(of_pair.begin);
      const int run_to = uniform(of_pair.end);
      int from = run_from > begin ? run_from : begin;
      const int to = run_to < end ? run_to : end;
      if (from >= to) {
        skip(run_to - run_from);
        continue;
      }
      skip(from - run_from);
      while (from < to) {
        const int split_end = ((from + phase) / tables.tiles_per_split + 1) * tables.tiles_per_split - phase;
        const int stop = to < split_end ? to : split_end;
        add_tiles(from, stop);
        any_open = true;
        if (stop == split_end && stop != end) {
          add_sum(sum(work, false), dq_, !any_closed);
          any_closed = true;
          any_open = false;
          first_ = true;
        }
        from = stop;
      }
      skip(run_to - to);
    }
    release_stage(map_.work_empty());
    if (active) end_rows(work, flags, any_closed, any_open);
  }

  __device__ __forceinline__ void read_stats(const BackwardWork& work) {
    const RowTile& tile = work.row_tiles[consumer_];
    const int head = head_of(p_.common.tables, work, consumer_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = tile_row_of_thread() + 8 * half;
      float2 stats{0.0F, 0.0F};
      if (slot >= tile.valid_begin && slot < tile.valid_end) {
        stats = *reinterpret_cast<const float2*>(p_.stats + ((tile.row + slot) * p_.common.heads + head) * kRowStats);
      }
      negative_lse_[half] = -stats.x;
      delta_[half] = stats.y;
    }
  }

  // After the task's tiles: saves the sums, or finishes the rows.
  __device__ __forceinline__ void end_rows(const BackwardWork& work, int flags, bool any_closed, bool any_open) {
    const cuda::BackwardSums& sums = p_.common.sums;
    const SumEnd end{any_open, any_closed, (flags & RowTile::kStaysOpen) != 0, sums.save};
    if (any_open && end.stays_open && sums.save) add_sum(sum(work, true), dq_, true);
    if (sums.finish && work.pair.partial == cuda::RowTilePair::kNoPartial) {
      finish_sum<typename C::Element>(sum(work, false), end, p_.dq, work.row_tiles[consumer_], tile_row_of_thread(),
                                      head_of(p_.common.tables, work, consumer_), dq_, p_.common.softmax.scale);
    } else if (any_open && !end.stays_open) {
      add_sum(sum(work, false), dq_, !any_closed);
    }
  }

  // Skips tiles that only the other consumer computes.
  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      barrier_wait(map_.k_full(k_.stage()), k_.parity());
      barrier_wait(map_.v_full(v_.stage()), v_.parity());
      release_stage(map_.k_empty(k_.stage()));
      release_stage(map_.v_empty(v_.stage()));
      k_.advance();
      v_.advance();
      ping_pong_.wait();
      ping_pong_.pass();
    }
  }

  // Adds tiles from … to − 1, all of one split, to dQ.
  __device__ __forceinline__ void add_tiles(int from, int to) {
    any_in_flight_ = false;
    in_flight_ = k_;
    const int masked_end = to < unmasked_.begin ? to : unmasked_.begin;
    const int unmasked_end = to < unmasked_.end ? to : unmasked_.end;
#pragma unroll 1
    for (; from < masked_end; ++from) step<true>(from);
#pragma unroll 1
    for (; from < unmasked_end; ++from) step<false>(from);
#pragma unroll 1
    for (; from < to; ++from) step<true>(from);
    await_dq();
  }

  // Waits for dQ of the previous tile and releases its K. kPending later GEMMs stay in flight.
  template <int kPending = 0>
  __device__ __forceinline__ void await_dq() {
    wgmma_wait<kPending>();
    pin(dq_);
    pin_packed(ds_);
    if (kPending == 0 || any_in_flight_) {
      release_stage(map_.k_empty(in_flight_.stage()));
      in_flight_.advance();
    }
    any_in_flight_ = true;
  }

  // Computes P from S in place. With a softcap, P times the softcap's factor of dS.
  __device__ __forceinline__ void exponentiate(Scores& s) const {
    const cuda::AttentionParams::Softmax& softmax = p_.common.softmax;
    const cuda::ScoreScaling scaling(softmax);
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[j][e];
        if constexpr (C::kScaledFirst) {
          const float score = scaling.scaled(x);
          const float ratio = score * p_.common.inverse_cap;
          x = cuda::exp2_approx(__fmaf_rn(score, softmax.exponent_base2, negative_lse_[e / 2])) *
              __fmaf_rn(-ratio, ratio, 1.0F);
        } else {
          x = cuda::exp2_approx(__fmaf_rn(x, softmax.exponent_base2, negative_lse_[e / 2]));
        }
      }
    }
  }

  // P and dP → dS of a tile, packed.
  template <bool kMasked>
  __device__ __forceinline__ void make_ds(Scores& s, const Scores& dp, int tile) {
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] *= dp[j][e] - delta_[e / 2];
    }
    if constexpr (kMasked) mask_columns(s, seen_columns(p_.common.tables, offset_, tile * C::kKeys, keys_end_));
#pragma unroll
    for (int j = 0; j < C::kKeys / 8; ++j) pack_block<typename C::Element>(s[j], ds_, j);
  }

  // One key tile.
  template <bool kMasked>
  __device__ __forceinline__ void step(int tile) {
    Scores s, dp;
    ping_pong_.wait();
    barrier_wait(map_.k_full(k_.stage()), k_.parity());
    multiply_transposed<typename C::Element, C::kDim, C::kKeys, kBackwardTile, C::kKeys>(s, map_.q(consumer_),
                                                                                         map_.k(k_.stage()));
    await_dq<1>();
    barrier_wait(map_.v_full(v_.stage()), v_.parity());
    multiply_transposed<typename C::Element, C::kDimV, C::kKeys, kBackwardTile, C::kKeys>(dp, map_.dout(consumer_),
                                                                                          map_.v(v_.stage()));
    ping_pong_.pass();
    wgmma_wait<1>();
    pin(s);
    exponentiate(s);
    wgmma_wait<0>();
    pin(dp);
    release_stage(map_.v_empty(v_.stage()));
    v_.advance();
    make_ds<kMasked>(s, dp, tile);
    keep_packed(ds_);
    multiply_add<typename C::Element, C::kDim, C::kKeys / kGemmStep, C::kKeys>(dq_, ds_, map_.k(k_.stage()), first_);
    first_ = false;
    k_.advance();
  }

  const DqParams& p_;
  const DqMap<C>& map_;
  int consumer_;
  PingPong<> ping_pong_;
  PackedPipelineState<C::kStagesK> k_;
  PackedPipelineState<C::kStagesV> v_;
  PackedPipelineState<C::kStagesK> in_flight_;  // K that dQ in flight reads
  bool first_ = true;                           // the next dQ begins a split
  bool any_in_flight_ = false;                  // dQ of a previous tile is in flight
  TileInterval unmasked_{};
  int offset_ = 0;    // of the thread's first row
  int keys_end_ = 0;  // keys of the sequence
  float negative_lse_[2], delta_[2];
  float dq_[C::kDim / 8][4];
  std::uint32_t ds_[C::kKeys / 16][4];
};

template <class C>
__global__ void __launch_bounds__(kBackwardThreads, 1) dq_kernel(const __grid_constant__ DqParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* const memory = cuda::aligned_shared<kSharedAlignment>(shared);
  const DqMap<C> map{cuda::shared_address(memory)};
  auto* slots = reinterpret_cast<BackwardWork*>(memory + C::kWork);
  if (threadIdx.x == 0) {
    barrier_init(map.work_full(), 1);
    barrier_init(map.work_empty(), kBackwardConsumers * kWarpsOfWarpgroup);
    barrier_init(map.partial_landed(), 1);
    for (std::uint32_t stage = 0; stage < C::kStagesK; ++stage) {
      barrier_init(map.k_full(stage), 1);
      barrier_init(map.k_empty(stage), kBackwardConsumers * kWarpsOfWarpgroup);
    }
    for (std::uint32_t stage = 0; stage < C::kStagesV; ++stage) {
      barrier_init(map.v_full(stage), 1);
      barrier_init(map.v_empty(stage), kBackwardConsumers * kWarpsOfWarpgroup);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    reg_dealloc<kDqProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (p.common.bulk) {
        produce_dq<C, true>(p, map, slots);
      } else {
        produce_dq<C, false>(p, map, slots);
      }
    }
  } else {
    reg_alloc<kDqConsumerRegisters>();
    DqConsumer<C>(p, map, warpgroup - 1).run(slots);
  }
}

}  // namespace ringattn::sm90
