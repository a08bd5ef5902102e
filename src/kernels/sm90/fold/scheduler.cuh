// SPDX-License-Identifier: Apache-2.0
// The scheduler: one warp of each CTA, which decides what the CTA folds next and writes it down for the other warps.
//
// All CTAs take work from one counter in memory. Each takes as late as it can, because work that it has taken and not
// begun can't go to another CTA that is free sooner. Of two CTAs that walk side by side the first one takes, and sends
// the other one the number that it got.
#pragma once

#include "kernels/cuda/work_order.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/visibility.hpp"

namespace ringattn::sm90 {

// The next round is taken when the producer fetches a tile of this round that has so many tiles behind it. That is
// early enough for the next round's tables and Q to arrive in time. After a round with no more tiles than that, the
// scheduler does not wait for the producer, and takes the next one at once.
inline constexpr int kTilesAhead = 4;

// The number of the tile with which the producer tells the scheduler to take the next round, of a round of `tiles`
// tiles; kNotTold where it doesn't: the round is short, or the other CTA takes.
inline constexpr int kNotTold = -1;
template <class C>
__device__ __forceinline__ int wanted_with(int tiles) {
  const bool takes = C::kWalkCtas == 1 || rank_in_cluster() == 0;
  return takes && tiles > kTilesAhead ? tiles - kTilesAhead - 1 : kNotTold;
}

// Writes down what a unit's rows see of its tiles, and for which of those the plain steps are enough: the tiles of
// which every row sees all keys, and with which no group ends. The masked ones are the first and the last ones, as
// tiles ascend; where they lie in several runs the host has counted them.
template <class C>
__device__ __forceinline__ void set_edges(const cuda::FoldParams& p, const cuda::WorkItem& item, UnitWork& unit) {
  const int tiles = item.tiles;
  const std::int64_t first = item.first_tile;
  const std::int64_t origin = first * C::kKeyTile;
  const auto edge = [&](std::int64_t key) {
    const std::int64_t from_origin = key - origin;
    return static_cast<int>(from_origin < -kNoEdge ? -kNoEdge : from_origin > kNoEdge ? kNoEdge : from_origin);
  };
  const Visibility visibility(p.mask, item.key_length);
  const KeyRange reach = visibility.reach(item.position);
  unit.origin = static_cast<int>(first);
  unit.from = edge(reach.begin);
  unit.to = edge(reach.end);
  unit.length = edge(item.key_length);

  const auto tiles_before = [](int key) { return key < 0 ? 0 : key / C::kKeyTile; };
  const KeyRange common = visibility.common_keys(item.position, item.position + kQueryTile - 1);
  const bool one_run = item.runs == 1;
  const int plain_begin = one_run ? tiles_before(edge(common.begin) + C::kKeyTile - 1) : item.plain_begin;
  const int plain_end = one_run ? tiles_before(edge(common.end)) : item.plain_end;
  unit.head = tiles - (plain_begin < tiles ? plain_begin : tiles);
  unit.tail = tiles - (plain_end < tiles ? plain_end : tiles);
  unit.group = (item.place + tiles) % kGroupTiles;
  if (p.state.save && unit.group == 0 && unit.tail == 0) unit.tail = 1;  // the consumer notes there that it is full
}

// Takes numbers of work from the counter. Work n is piece and KV head cuda::work_place(…, n). All lanes of the warp
// call it together.
template <class C>
class Counter {
 public:
  __device__ __forceinline__ Counter(const cuda::FoldParams& p, const SharedMap<C>& map)
      : p_(p), map_(map), rank_(C::kWalkCtas > 1 ? rank_in_cluster() : 0) {}

  __device__ __forceinline__ std::uint32_t rank() const { return rank_; }
  __device__ __forceinline__ int work() const { return p_.tables.bundle_count * p_.schedule.piece_heads; }

  // A CTA's first number; take() goes on behind those of all CTAs.
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) / C::kWalkCtas; }
  // The next number; there is no more work where it is work() or more.
  __device__ __forceinline__ int take() {
    const bool leads = threadIdx.x % 32 == 0;
    int number = 0;
    if (leads) number = rank_ > 0 ? receive() : take_and_tell();
    number = __shfl_sync(0xffffffffU, number, 0);
    // The first CTA may overwrite the number as soon as it counts as read. A load that has only been issued may be
    // overtaken by an arrival, so the arrival stands behind the number's use, is made by the lane that has read it, and
    // releases to the cluster.
    if (rank_ > 0 && leads) barrier_release_at(in_cta(map_.number_read(), 0));
    return number;
  }

 private:
  // One lane calls each of these.
  __device__ __forceinline__ int take_and_tell() {
    int number = atomicAdd(p_.schedule.taken, 1);
    // A CTA's first work is not taken, but each CTA takes once in vain at the end. So as many numbers are taken as
    // there is work, and whoever gets the last one leaves the counter as the next task that uses these tables expects
    // it.
    if (number == work() - 1) atomicExch(p_.schedule.taken, 0);
    number += static_cast<int>(gridDim.x) / C::kWalkCtas;
    if constexpr (C::kWalkCtas > 1) tell(number);
    return number;
  }
  __device__ __forceinline__ void tell(int number) {
    barrier_acquire(map_.number_read(), parity_ ^ 1U);
    parity_ ^= 1U;
    send_number(in_cta(map_.number(), 1), in_cta(map_.number_sent(), 1), number);
  }
  __device__ __forceinline__ int receive() {
    barrier_arrive_expect(map_.number_sent(), sizeof(int));
    barrier_acquire(map_.number_sent(), parity_);
    parity_ ^= 1U;
    return load_number(map_.number());
  }

  const cuda::FoldParams& p_;
  const SharedMap<C>& map_;
  std::uint32_t rank_;
  std::uint32_t parity_ = 0;
};

// The scheduler's work: writes for each round the walk and the units, until there is no more work.
template <class C>
__device__ __forceinline__ void schedule(const cuda::FoldParams& p, const SharedMap<C>& map, unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int unit_heads = p.schedule.unit_heads;
  Counter<C> counter(p, map);
  const int first_unit = static_cast<int>(counter.rank()) * C::kUnits;
  RingCursor<C::kRounds> cursor;
  int tiles = 0;             // of the round before
  std::uint32_t wanted = 0;  // parity of work_wanted()
  for (int round = 0;; ++round, cursor.advance()) {
    if (wanted_with<C>(tiles) != kNotTold) {
      barrier_wait(map.work_wanted(), wanted);
      wanted ^= 1U;
    }
    const int index = round == 0 ? counter.first() : counter.take();
    // All that the round needs is read and worked out before its place is free: of short rounds nothing else hides it.
    const bool any = index < counter.work();
    UnitWork unit{};
    BundleWork work{};
    unit.walk = work.tiles = kNoMoreWork;
    if (any) {
      const cuda::WorkPlace place =
          cuda::work_place(p.schedule.early_count, p.schedule.piece_heads, p.schedule.section_heads, index);
      const cuda::WorkBundle& bundle = p.tables.bundles[place.piece];
      const int query_head = p.tables.items[bundle.item].head + place.head * unit_heads;
      tiles = bundle.tiles;
      unit.walk = bundle.tiles;
      if (lane < C::kUnits && first_unit + lane < bundle.units) {
        const int nth = bundle.head + first_unit + lane;
        const cuda::WorkItem& item = p.tables.items[bundle.item + nth / unit_heads];
        unit.row = item.row;
        unit.first = item.first;
        unit.run_begin = item.run_begin;
        unit.runs = item.runs;
        unit.slot_begin = item.slot_begin;
        unit.slot_end = item.slot_end;
        unit.query_head = query_head + nth % unit_heads;
        if (item.tiles > 0) {
          unit.begin = static_cast<int>(item.first - bundle.first);
          unit.end = unit.begin + item.tiles;
          set_edges<C>(p, item, unit);
        }
      }
      work.first = bundle.first;
      work.first_tile = bundle.first_tile;
      work.table = bundle.table;
      work.key_length = p.tables.items[bundle.item].key_length;
      work.run_begin = bundle.run_begin;
      work.runs = bundle.runs;
      work.kv_head = query_head / (p.heads / p.kv_heads);
      const int own = bundle.units - first_unit;
      work.units = own < 0 ? 0 : own < C::kUnits ? own : C::kUnits;
      work.tiles = bundle.tiles;
    }
    if (round >= C::kRounds) barrier_wait(map.q_empty(cursor.stage()), cursor.parity() ^ 1U);
    if (lane < C::kUnits) units_of<C>(shared, cursor.stage())[lane] = unit;
    if (lane == 0) *work_of<C>(shared, cursor.stage()) = work;
    barrier_arrive(map.work_full(cursor.stage()));
    if (!any) return;
  }
}

}  // namespace ringattn::sm90
