// SPDX-License-Identifier: Apache-2.0
// dK and dV: Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q. A CTA owns a pair of tiles of 64 keys of one KV head,
// one per warpgroup, and loops over the queries that see them: token tiles ascending, and in each the heads of the
// group. P and dS are register operands. Warp 0 is the producer. If both gradients don't fit into registers, dK and dV
// have a kernel each, and S is computed twice. A kernel that computes both gradients can also store dS, for
// dq_from_ds.cuh.
#pragma once

#include "kernels/attention_backward/sm90/work.cuh"

namespace ringattn::sm90 {

enum class KeyGradients { kBoth, kDk, kDv };

template <class Element_, BackwardConfig kConfig, bool kScaledFirst_, KeyGradients kGradients = KeyGradients::kBoth,
          bool kSpills_ = false>
struct DkvTraits {
  using Element = Element_;
  static constexpr bool kDk = kGradients != KeyGradients::kDv, kDv = kGradients != KeyGradients::kDk;
  static constexpr bool kBoth = kDk && kDv;
  static constexpr bool kScaledFirst = kScaledFirst_;  // AttentionParams::Softmax::scaled_first
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  // With both gradients, a stage of Q and one of dO are one stage, with one pair of barriers.
  static constexpr QueryStages kQueryStages = kBoth ? kConfig.dkv_stages : kDk ? kConfig.dk_stages : kConfig.dv_stages;
  static constexpr int kQStages = kQueryStages.q, kDoutStages = kQueryStages.dout;
  static_assert(!kBoth || kQStages == kDoutStages);
  // After S, a tile is computed in this many parts, one after the other: for wide heads, the accumulators leave too few
  // registers for P, dP and the packed elements of a whole tile.
  static constexpr int kParts = kBoth && kDim + kDimV > 256 ? 2 : 1;
  static constexpr int kPartQueries = kBackwardTile / kParts;
  static constexpr bool kSpills = kSpills_;  // stores dS
  static_assert(!kSpills || (kBoth && kParts == 1 && !kScaledFirst));
  // For narrow heads the GEMMs are too short for taking turns. K and V are kept in registers, so that they are not read
  // from shared memory each time.
  static constexpr bool kTakesTurns = kDim + kDimV > 128;
  static constexpr bool kKeysInRegisters = !kTakesTurns;
  static constexpr int kKBytes = kBackwardTile * cuda::padded_row_bytes(kDim);
  static constexpr int kVBytes = kBackwardTile * cuda::padded_row_bytes(kDimV);
  static constexpr int kQBytes = kKBytes, kDoutBytes = kVBytes;
  static constexpr int kStatBytes = kBackwardTile * static_cast<int>(sizeof(float));
  // Shared memory, in this order.
  static constexpr int kV = kBackwardConsumers * kKBytes;
  static constexpr int kQ = kV + (kDk ? kBackwardConsumers * kVBytes : 0);  // dV doesn't need V
  static constexpr int kDout = kQ + kQStages * kQBytes;
  static constexpr int kStats = kDout + kDoutStages * kDoutBytes;
  static constexpr int kBarriers = kStats + kQStages * static_cast<int>(kRowStats) * kStatBytes;
  static constexpr int kBarrierCount = 3 + 2 * kQStages + (kBoth ? 0 : 2 * kDoutStages);
  static constexpr int kWork = kBarriers + (kBarrierCount * kBarrierBytes + 15) / 16 * 16;
  static constexpr int kShared = kWork + kWorkSlots * static_cast<int>(sizeof(BackwardWork));
};
template <class Element, BackwardConfig kConfig>
using SpillingDkvTraits = DkvTraits<Element, kConfig, false, KeyGradients::kBoth, true>;

// Addresses in shared memory.
template <class C>
struct DkvMap {
  std::uint32_t base;
  __device__ std::uint32_t k(int consumer) const { return base + consumer * C::kKBytes; }
  __device__ std::uint32_t v(int consumer) const { return base + C::kV + consumer * C::kVBytes; }
  __device__ std::uint32_t q(std::uint32_t stage) const { return base + C::kQ + stage * C::kQBytes; }
  __device__ std::uint32_t dout(std::uint32_t stage) const { return base + C::kDout + stage * C::kDoutBytes; }
  __device__ std::uint32_t lse2(std::uint32_t stage) const {
    return base + C::kStats + stage * static_cast<std::uint32_t>(kRowStats * C::kStatBytes);
  }
  __device__ std::uint32_t delta(std::uint32_t stage) const { return lse2(stage) + C::kStatBytes; }
  // Work has been published and its K and V have landed; the consumers are done with them.
  __device__ std::uint32_t work_full() const { return barrier(0); }
  __device__ std::uint32_t work_empty() const { return barrier(1); }
  // A partial tile of queries has landed, and its absent rows can be zeroed.
  __device__ std::uint32_t partial_landed() const { return barrier(2); }
  // Q and the row stats, and also dO if both gradients are computed.
  __device__ std::uint32_t full(std::uint32_t stage) const { return barrier(3 + stage); }
  __device__ std::uint32_t empty(std::uint32_t stage) const { return barrier(3 + C::kQStages + stage); }
  // dO by itself.
  __device__ std::uint32_t dout_full(std::uint32_t stage) const { return barrier(3 + 2 * C::kQStages + stage); }
  __device__ std::uint32_t dout_empty(std::uint32_t stage) const {
    return barrier(3 + 2 * C::kQStages + C::kDoutStages + stage);
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t index) const { return base + C::kBarriers + index * kBarrierBytes; }
};

// A tile of queries of one head, at an entry of BackwardTables::tiles.
struct QueryTile {
  int table, head;
  cuda::OtherTile from;
  const float* stats;
};

// Loads Q with the row stats, or dO, or all of these into a stage. kBulk: TMA loads the tensors.
template <class C, bool kBulk, bool kOfQ, bool kOfDout>
__device__ __forceinline__ void load_queries(const DkvParams& p, const DkvMap<C>& map, const QueryTile& tile,
                                             std::uint32_t q_stage, std::uint32_t dout_stage, std::uint32_t full,
                                             std::uint32_t& partial_parity) {
  constexpr std::uint32_t kStatBytes = static_cast<std::uint32_t>(kRowStats) * C::kStatBytes;
  const bool leads = thread_of_cta() % kWarp == 0;
  const cuda::OtherTile& from = tile.from;
  if constexpr (!kBulk) {
    const cuda::TileRows& rows = p.common.tables.tile_rows[tile.table];
    if constexpr (kOfQ) {
      copy_tile_rows<kBackwardTile, C::kDim>(map.q(q_stage), rows.rows[0], from.row, tile.head, from.begin, from.end);
    }
    if constexpr (kOfDout) {
      copy_tile_rows<kBackwardTile, C::kDimV>(map.dout(dout_stage), rows.rows[1], from.row, tile.head, from.begin,
                                              from.end);
    }
    if constexpr (kOfQ) {
      proxy_fence();
      __syncwarp();
      if (leads) {
        barrier_arrive_expect(full, kStatBytes);
        tma_load_bytes(map.lse2(q_stage), tile.stats, kStatBytes, full);
      }
    } else {
      publish_tile(full);
    }
    return;
  }
  const bool whole = from.begin == 0 && from.end == kBackwardTile;
  const std::uint32_t landed = whole ? full : map.partial_landed();
  if (leads) {
    const int row = static_cast<int>(from.row);
    barrier_arrive_expect(landed, (kOfQ ? C::kQBytes + kStatBytes : 0) + (kOfDout ? C::kDoutBytes : 0));
    if constexpr (kOfQ) {
      load_rows<C::kDim>(map.q(q_stage), cuda::panel_bytes(kBackwardTile), p.q[from.source], landed, tile.head, row);
      tma_load_bytes(map.lse2(q_stage), tile.stats, kStatBytes, landed);
    }
    if constexpr (kOfDout) {
      load_rows<C::kDimV>(map.dout(dout_stage), cuda::panel_bytes(kBackwardTile), p.dout[from.source], landed,
                          tile.head, row);
    }
  }
  if (!whole) {
    barrier_wait(landed, partial_parity);
    partial_parity ^= 1U;
    if constexpr (kOfQ) zero_rows<kBackwardTile, C::kDim>(map.q(q_stage), from.begin, from.end);
    if constexpr (kOfDout) zero_rows<kBackwardTile, C::kDimV>(map.dout(dout_stage), from.begin, from.end);
    publish_tile(full);
  }
  __syncwarp();
}

// Main loop of the producer warp.
template <class C, bool kBulk>
__device__ __forceinline__ void produce_dkv(const DkvParams& p, const DkvMap<C>& map, BackwardWork* slots) {
  const cuda::BackwardTables& tables = p.common.tables;
  const bool leads = thread_of_cta() % kWarp == 0;
  const int group = p.common.heads / tables.kv_heads;
  constexpr int kStatFloats = static_cast<int>(kRowStats) * kBackwardTile;
  PackedPipelineState<C::kQStages> ring;
  PackedPipelineState<C::kDoutStages> dout_ring;
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
        copy_tile_rows<kBackwardTile, C::kDim>(map.k(consumer), p.common.own[0], tile.row, work.kv_head,
                                               tile.valid_begin, tile.valid_end);
        if constexpr (C::kDk) {
          copy_tile_rows<kBackwardTile, C::kDimV>(map.v(consumer), p.common.own[1], tile.row, work.kv_head,
                                                  tile.valid_begin, tile.valid_end);
        }
      }
      publish_tile(map.work_full());
    } else if (leads) {
      barrier_arrive_expect(map.work_full(), count * (C::kKBytes + (C::kDk ? C::kVBytes : 0)));
      for (int consumer = 0; consumer < count; ++consumer) {
        const int row = static_cast<int>(work.row_tiles[consumer].row);
        load_rows<C::kDim>(map.k(consumer), cuda::panel_bytes(kBackwardTile), p.k, map.work_full(), work.kv_head, row);
        if constexpr (C::kDk) {
          load_rows<C::kDimV>(map.v(consumer), cuda::panel_bytes(kBackwardTile), p.v, map.work_full(), work.kv_head,
                              row);
        }
      }
    }
    for (int i = work.pair.run_begin; i < work.pair.run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval range = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      for (int tile = range.begin; tile < range.end; ++tile) {
        const int table = run.table - run.first_tile + tile;
        const int first_head = work.kv_head * group;
        QueryTile queries{table, first_head, tables.tiles[table],
                          p.stats + (std::int64_t{table} * p.common.heads + first_head) * kStatFloats};
        for (; queries.head < first_head + group; ++queries.head, queries.stats += kStatFloats) {
          const std::uint32_t stage = ring.stage();
          barrier_wait(map.empty(stage), ring.parity() ^ 1U);
          if constexpr (C::kBoth) {
            load_queries<C, kBulk, true, true>(p, map, queries, stage, stage, map.full(stage), partial_parity);
          } else {
            const std::uint32_t dout_stage = dout_ring.stage();
            load_queries<C, kBulk, true, false>(p, map, queries, stage, 0, map.full(stage), partial_parity);
            barrier_wait(map.dout_empty(dout_stage), dout_ring.parity() ^ 1U);
            load_queries<C, kBulk, false, true>(p, map, queries, 0, dout_stage, map.dout_full(dout_stage),
                                                partial_parity);
            dout_ring.advance();
          }
          ring.advance();
        }
      }
    }
    index = take_work(tables);
  }
}

template <class C>
class DkvConsumer {
 public:
  __device__ __forceinline__ DkvConsumer(const DkvParams& p, const DkvMap<C>& map, int consumer)
      : p_(p), map_(map), consumer_(consumer), ping_pong_(consumer) {}

  __device__ __forceinline__ void run(const BackwardWork* slots) {
    ping_pong_.begin();
    for (std::uint32_t parity = 0;; parity ^= 1U) {
      barrier_wait(map_.work_full(), parity);
      const BackwardWork& work = slots[parity];
      if (uniform(work.kv_head) == kNoWorkLeft) break;
      compute(work);
    }
    ping_pong_.end();
  }

 private:
  using Scores = float[kBackwardTile / 8][4];
  using PartScores = float[C::kPartQueries / 8][4];
  using Packed = std::uint32_t[C::kPartQueries / kGemmStep][4];

  static __device__ __forceinline__ int uniform(int number) {
    return static_cast<int>(warp_uniform(static_cast<std::uint32_t>(number)));
  }

  // dK's sum, or dV's, which follows it.
  __device__ __forceinline__ SumRows sum(const BackwardWork& work, bool of_v, bool open) const {
    return sum_rows(p_.common.sums, work.row_tiles[consumer_], scratch_tile(p_.common.tables, work, consumer_),
                    tile_row_of_thread(), p_.common.tables.kv_heads, work.kv_head, C::kDim + C::kDimV,
                    of_v ? C::kDim : 0, open);
  }

  __device__ __forceinline__ void compute(const BackwardWork& work) {
    const cuda::BackwardTables& tables = p_.common.tables;
    const RowTile& tile = work.row_tiles[consumer_];
    const bool active = uniform(consumer_ < work.pair.count ? 1 : 0) != 0;
    const int begin = uniform(tile.begin_tile);
    const int end = active ? uniform(min(tile.end_tile, work.pair.end_tile)) : begin;
    const int flags = active ? uniform(tile.flags) : 0;
    const int phase = uniform(work.pair.split_phase);
    const int group = uniform(p_.common.heads / tables.kv_heads);
    const TileInterval unmasked{uniform(tile.unmasked_begin), uniform(tile.unmasked_end)};
    const int offset = tile.offset + tile_row_of_thread();

    if constexpr (C::kKeysInRegisters) {
      load_operands<C::kDim, kBackwardTile>(k_, map_.k(consumer_));
      load_operands<C::kDimV, kBackwardTile>(v_, map_.v(consumer_));
    }
    bool any_closed = (flags & RowTile::kHasClosedSum) != 0;
    bool any_open = (flags & RowTile::kHasOpenSum) != 0;
    first_ = !any_open;
    if constexpr (C::kDk) load_sum(sum(work, false, true), any_open, dk_);
    if constexpr (C::kDv) load_sum(sum(work, true, true), any_open, dv_);
    const int run_end = uniform(work.pair.run_end);
    for (int i = uniform(work.pair.run_begin); i < run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval of_pair = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      const int run_from = uniform(of_pair.begin);
      const int run_to = uniform(of_pair.end);
      int from = run_from > begin ? run_from : begin;
      const int to = run_to < end ? run_to : end;
      if (from >= to) {
        skip((run_to - run_from) * group);
        continue;
      }
      skip((from - run_from) * group);
      if constexpr (C::kSpills) {
        ds_tile_ = work.kv_head * p_.common.spill.tiles_of_head + tile.ds + (from - begin) * group;
      }
      while (from < to) {
        const int split_end = ((from + phase) / tables.tiles_per_split + 1) * tables.tiles_per_split - phase;
        const int stop = to < split_end ? to : split_end;
        add_tiles(from, stop, unmasked, offset, group);
        any_open = true;
        if (stop == split_end && stop != end) {
          if constexpr (C::kDk) add_sum(sum(work, false, false), dk_, !any_closed);
          if constexpr (C::kDv) add_sum(sum(work, true, false), dv_, !any_closed);
          any_closed = true;
          any_open = false;
          first_ = true;
        }
        from = stop;
      }
      skip((run_to - to) * group);
    }
    release_stage(map_.work_empty());
    if (!active) return;
    const SumEnd how{any_open, any_closed, (flags & RowTile::kStaysOpen) != 0, p_.common.sums.save};
    if constexpr (C::kDk) end_rows(work, how, dk_, false, p_.dk, p_.common.softmax.scale);
    if constexpr (C::kDv) end_rows(work, how, dv_, true, p_.dv, 1.0F);
  }

  // After the task's tiles: saves a sum, or finishes it.
  template <int kBlocks>
  __device__ __forceinline__ void end_rows(const BackwardWork& work, const SumEnd& end, const float (&d)[kBlocks][4],
                                           bool of_v, const cuda::BackwardGradient& gradient, float factor) const {
    if (end.any_open && end.stays_open && end.save) add_sum(sum(work, of_v, true), d, true);
    if (p_.common.sums.finish && work.pair.partial == cuda::RowTilePair::kNoPartial) {
      finish_sum<typename C::Element>(sum(work, of_v, false), end, gradient, work.row_tiles[consumer_],
                                      tile_row_of_thread(), work.kv_head, d, factor);
    } else if (end.any_open && !end.stays_open) {
      add_sum(sum(work, of_v, false), d, !end.any_closed);
    }
  }

  // Skips stages that only the other consumer computes.
  __device__ __forceinline__ void skip(int stages) {
#pragma unroll 1
    for (; stages > 0; --stages) {
      barrier_wait(map_.full(ring_.stage()), ring_.parity());
      release_stage(map_.empty(ring_.stage()));
      ring_.advance();
      if constexpr (!C::kBoth) {
        barrier_wait(map_.dout_full(dout_ring_.stage()), dout_ring_.parity());
        release_stage(map_.dout_empty(dout_ring_.stage()));
        dout_ring_.advance();
      }
      ping_pong_.wait();
      ping_pong_.pass();
    }
  }

  // Adds token tiles from … to − 1, all of one split, to dK and dV.
  __device__ __forceinline__ void add_tiles(int from, int to, const TileInterval& unmasked, int offset, int group) {
    any_in_flight_ = false;
    if constexpr (C::kDk) {
      in_flight_ = ring_;
    } else {
      in_flight_ = dout_ring_;
    }
    const int masked_end = to < unmasked.begin ? to : unmasked.begin;
    const int unmasked_end = to < unmasked.end ? to : unmasked.end;
#pragma unroll 1
    for (; from < masked_end; ++from) masked_tile(from, offset, group);
    const int plain = from < unmasked_end ? unmasked_end - from : 0;
#pragma unroll 1
    for (int i = plain * group; i > 0; --i) step<false>(SeenColumns{});
    if constexpr (C::kSpills) await_sums();
#pragma unroll 1
    for (from += plain; from < to; ++from) masked_tile(from, offset, group);
    await_sums();
  }
  __device__ __forceinline__ void masked_tile(int tile, int offset, int group) {
    const SeenColumns seen =
        seen_columns(p_.common.tables, offset, tile * kBackwardTile, static_cast<int>(cuda::kMaxBackwardPosition));
#pragma unroll 1
    for (int member = 0; member < group; ++member) step<true>(seen);
  }

  // Waits for dV and dK of the previous tile, stores its dS and releases the stage that they read. kPending later GEMMs
  // stay in flight.
  template <int kPending = 0>
  __device__ __forceinline__ void await_sums() {
    wgmma_wait<kPending>();
    if constexpr (C::kDv) pin(dv_);
    if constexpr (C::kDk) pin(dk_);
    pin_part(C::kParts - 1);
    const bool any = any_in_flight_ || (kPending == 0 && !C::kSpills);
    if constexpr (C::kSpills) store_ds(any);
    if (any) {
      if constexpr (C::kDk) {
        release_stage(map_.empty(in_flight_.stage()));
      } else {
        release_stage(map_.dout_empty(in_flight_.stage()));
      }
      in_flight_.advance();
    }
    any_in_flight_ = kPending > 0;
  }

  // Stores dS of the tile before, if there is one. It is read once, after more has been written than L2 holds. ptxas
  // would serialise wgmma if dS were stored while dK reads it, or by a branch.
  __device__ __forceinline__ void store_ds(bool any) {
    constexpr int kPieceBytes = 16;
    const auto& ds = packed_ds_[0];
    char* const to = p_.common.spill.tiles + std::int64_t{ds_tile_} * cuda::kDsTileBytes +
                     static_cast<int>(threadIdx.x) % kWarpgroup * kPieceBytes;
#pragma unroll
    for (int step = 0; step < kBackwardTile / kGemmStep; ++step) {
      asm volatile(
          "{\n"
          ".reg .pred any;\n"
          "setp.ne.s32 any, %5, 0;\n"
          "@any st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n"
          "}" ::"l"(to + step * kWarpgroup * kPieceBytes),
          "r"(ds[step][0]), "r"(ds[step][1]), "r"(ds[step][2]), "r"(ds[step][3]), "r"(any ? 1 : 0)
          : "memory");
    }
    ds_tile_ += any ? 1 : 0;
  }

  __device__ __forceinline__ void pin_part(int part) {
    if constexpr (C::kDv) pin_packed(packed_p_[part]);
    if constexpr (C::kDk) pin_packed(packed_ds_[part]);
  }

  // Columns 8j + 2t and 8j + 2t + 1 of LSE or delta. They are loaded when they are used, because there are not enough
  // registers for all columns.
  static __device__ __forceinline__ void load_columns(std::uint32_t row, int j, float (&x)[2]) {
    asm volatile(
        "ld.shared.v2.f32 {%0, %1}, [%2];"
        : "=f"(x[0]), "=f"(x[1])
        : "r"(row + static_cast<std::uint32_t>((j * 8 + first_column_of_thread()) * static_cast<int>(sizeof(float)))));
  }

  static constexpr int kPartBlocks = C::kPartQueries / 8;
  // P is packed, and dV issued, before dS is computed.
  static constexpr bool kPacksEarly = C::kDv && C::kParts == 1;

  // Computes P from S for a part, in place and, if kPacksEarly, packed. With a softcap, leaves P times the softcap's
  // factor of dS in place, and packs P.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate(Scores& s, int part, std::uint32_t stage, const SeenColumns& seen) {
    const cuda::AttentionParams::Softmax& softmax = p_.common.softmax;
    const cuda::ScoreScaling scaling(softmax);
    const int first = part * kPartBlocks;
#pragma unroll
    for (int j = first; j < first + kPartBlocks; ++j) {
      float lse2[2];
      load_columns(map_.lse2(stage), j, lse2);
      float factor[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[j][e];
        if constexpr (C::kScaledFirst) {
          x = scaling.scaled(x);
          const float ratio = x * p_.common.inverse_cap;
          factor[e] = __fmaf_rn(-ratio, ratio, 1.0F);
        }
        x = cuda::exp2_approx(__fmaf_rn(x, softmax.exponent_base2, -lse2[e % 2]));
        if constexpr (kMasked) {
          if (!seen.has(j, e)) x = 0.0F;
        }
      }
      if constexpr (C::kScaledFirst) {
        if constexpr (C::kDv) pack_block<typename C::Element>(s[j], packed_p_[part], j - first);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] *= factor[e];
      }
    }
    if constexpr (kPacksEarly && !C::kScaledFirst) pack_p(s, part);
  }
  __device__ __forceinline__ void pack_p(const Scores& s, int part) {
#pragma unroll
    for (int j = 0; j < kPartBlocks; ++j) {
      pack_block<typename C::Element>(s[part * kPartBlocks + j], packed_p_[part], j);
    }
  }
  // P and dP → dS of a part, packed. Packs P unless exponentiate() did.
  template <bool kMasked>
  __device__ __forceinline__ void make_ds(const Scores& s, PartScores& dp, int part, std::uint32_t stage,
                                          const SeenColumns& seen) {
    const int first = part * kPartBlocks;
#pragma unroll
    for (int j = 0; j < kPartBlocks; ++j) {
      float delta[2];
      load_columns(map_.delta(stage), first + j, delta);
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[first + j][e] * (dp[j][e] - delta[e % 2]);
    }
    if constexpr (kMasked) mask_columns(dp, seen.from(first * 8));
#pragma unroll
    for (int j = 0; j < kPartBlocks; ++j) pack_block<typename C::Element>(dp[j], packed_ds_[part], j);
    if constexpr (C::kDv && !kPacksEarly && !C::kScaledFirst) pack_p(s, part);
  }

  // A part's rows of Q or dO.
  static __device__ __forceinline__ std::uint32_t rows_of_part(std::uint32_t tile, int part) {
    return tile + static_cast<std::uint32_t>(part * cuda::panel_bytes(C::kPartQueries));
  }
  // Issue Sᵀ = K Qᵀ, and dPᵀ = V dOᵀ, dV += Pᵀ dO and dK += dSᵀ Q of a part.
  __device__ __forceinline__ void issue_s(Scores& s, std::uint32_t q) {
    if constexpr (C::kKeysInRegisters) {
      multiply_transposed<typename C::Element, C::kDim, kBackwardTile, kBackwardTile>(s, k_, q);
    } else {
      multiply_transposed<typename C::Element, C::kDim, kBackwardTile, kBackwardTile, kBackwardTile>(
          s, map_.k(consumer_), q);
    }
  }
  __device__ __forceinline__ void issue_dp(PartScores& dp, std::uint32_t dout, int part) {
    if constexpr (C::kKeysInRegisters) {
      multiply_transposed<typename C::Element, C::kDimV, C::kPartQueries, kBackwardTile>(dp, v_,
                                                                                         rows_of_part(dout, part));
    } else {
      multiply_transposed<typename C::Element, C::kDimV, C::kPartQueries, kBackwardTile, kBackwardTile>(
          dp, map_.v(consumer_), rows_of_part(dout, part));
    }
  }
  __device__ __forceinline__ void issue_dv(std::uint32_t dout, int part) {
    keep_packed(packed_p_[part]);
    multiply_add<typename C::Element, C::kDimV, C::kPartQueries / kGemmStep, kBackwardTile>(
        dv_, packed_p_[part], rows_of_part(dout, part), first_ && part == 0);
  }
  __device__ __forceinline__ void issue_dk(std::uint32_t q, int part) {
    keep_packed(packed_ds_[part]);
    multiply_add<typename C::Element, C::kDim, C::kPartQueries / kGemmStep, kBackwardTile>(
        dk_, packed_ds_[part], rows_of_part(q, part), first_ && part == 0);
  }

  // One tile of queries of one head. It waits for dV and dK only after S of the next tile has been issued. If dS is
  // stored and there is a mask, there are not enough registers for that, and it waits at once.
  template <bool kMasked>
  __device__ __forceinline__ void step(const SeenColumns& seen) {
    Scores s;
    PartScores dp[C::kParts];
    const std::uint32_t stage = ring_.stage();
    const std::uint32_t q = map_.q(stage), dout = map_.dout(C::kBoth ? stage : dout_ring_.stage());
    ping_pong_.wait();
    barrier_wait(map_.full(stage), ring_.parity());
    issue_s(s, q);
    constexpr bool kPipelined = !C::kSpills || !kMasked;
    if constexpr (kPipelined) await_sums<1>();
    if constexpr (C::kDk) {
      if constexpr (!C::kBoth) barrier_wait(map_.dout_full(dout_ring_.stage()), dout_ring_.parity());
      issue_dp(dp[0], dout, 0);
    }
    ping_pong_.pass();
    wgmma_wait<C::kDk ? 1 : 0>();
    pin(s);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      exponentiate<kMasked>(s, part, stage, seen);
      if constexpr (kPacksEarly) {
        if constexpr (!C::kDk) {
          release_stage(map_.empty(stage));
          barrier_wait(map_.dout_full(dout_ring_.stage()), dout_ring_.parity());
        }
        issue_dv(dout, part);
      }
      if constexpr (C::kDk) {
        if (part == 0) {
          wgmma_wait<kPacksEarly ? 1 : 0>();
        } else {
          wgmma_wait<2>();  // for dP alone: dV and dK of the previous part stay in flight
        }
        pin(dp[part]);
        if constexpr (!C::kDv) release_stage(map_.dout_empty(dout_ring_.stage()));
        make_ds<kMasked>(s, dp[part], part, stage, seen);
        if (part > 0) {
          wgmma_wait<0>();
          pin(dv_);
          pin(dk_);
          pin_part(part - 1);
        }
        if (part + 1 < C::kParts) issue_dp(dp[(part + 1) % C::kParts], dout, part + 1);
        if constexpr (C::kDv && !kPacksEarly) issue_dv(dout, part);
        issue_dk(q, part);
      }
    }
    first_ = false;
    ring_.advance();
    if constexpr (!C::kBoth) dout_ring_.advance();
    if constexpr (!kPipelined) {
      any_in_flight_ = true;
      await_sums();
    }
  }

  const DkvParams& p_;
  const DkvMap<C>& map_;
  int consumer_;
  PingPong<C::kTakesTurns> ping_pong_;
  PackedPipelineState<C::kQStages> ring_;
  PackedPipelineState<C::kDoutStages> dout_ring_;  // unless C::kBoth
  // The stage that dV and dK in flight read: of Q, or of dO if dK isn't computed.
  PackedPipelineState<C::kDk ? C::kQStages : C::kDoutStages> in_flight_;
  bool first_ = true;           // the next dV and dK begin a split
  bool any_in_flight_ = false;  // dV and dK of a previous tile are in flight
  std::int32_t ds_tile_ = 0;    // DsSpill::tiles of the next dS
  float dk_[C::kDk ? C::kDim / 8 : 1][4], dv_[C::kDv ? C::kDimV / 8 : 1][4];
  Packed packed_p_[C::kParts], packed_ds_[C::kParts];
  std::uint32_t k_[C::kDim / kGemmStep][4], v_[C::kDimV / kGemmStep][4];  // if C::kKeysInRegisters
};

template <class C>
__global__ void __launch_bounds__(kBackwardThreads, 1) dkv_kernel(const __grid_constant__ DkvParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* const memory = cuda::aligned_shared<kSharedAlignment>(shared);
  const DkvMap<C> map{cuda::shared_address(memory)};
  auto* slots = reinterpret_cast<BackwardWork*>(memory + C::kWork);
  if (threadIdx.x == 0) {
    barrier_init(map.work_full(), 1);
    barrier_init(map.work_empty(), kBackwardConsumers * kWarpsOfWarpgroup);
    barrier_init(map.partial_landed(), 1);
    for (std::uint32_t stage = 0; stage < C::kQStages; ++stage) {
      barrier_init(map.full(stage), 1);
      barrier_init(map.empty(stage), kBackwardConsumers * kWarpsOfWarpgroup);
    }
    for (std::uint32_t stage = 0; !C::kBoth && stage < C::kDoutStages; ++stage) {
      barrier_init(map.dout_full(stage), 1);
      barrier_init(map.dout_empty(stage), kBackwardConsumers * kWarpsOfWarpgroup);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    reg_dealloc<kDkvProducerRegisters>();
    if (threadIdx.x < kWarp) {
      if (p.common.bulk) {
        produce_dkv<C, true>(p, map, slots);
      } else {
        produce_dkv<C, false>(p, map, slots);
      }
    }
  } else {
    reg_alloc<kDkvConsumerRegisters>();
    DkvConsumer<C>(p, map, warpgroup - 1).run(slots);
  }
}

}  // namespace ringattn::sm90
