// SPDX-License-Identifier: Apache-2.0
// The warp that decides what a CTA folds next. CTAs take from one counter, and late: what one has taken nobody else can
// take who is done sooner. Of CTAs that walk side by side the first one takes, and sends the other one word.
#pragma once

#include "kernels/cuda/work_order.hpp"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/visibility.hpp"

namespace ringattn::sm90 {

// So many tiles of a round come behind the one that is fetched next when the next round is taken: early enough for its
// tables and its Q. Rounds that are no longer than that are not waited for: their next one is taken at once.
inline constexpr int kTilesAhead = 4;

// With which of a round's tiles its CTA tells the scheduler so; −1: with none, as the round is short, or another CTA
// takes.
template <class C>
__device__ __forceinline__ int wanted_with(int tiles) {
  const bool takes = C::kWalkCtas == 1 || rank_in_cluster() == 0;
  return takes && tiles > kTilesAhead ? tiles - kTilesAhead - 1 : -1;
}

// Writes down what a unit's rows see of its tiles, and for which of those the plain steps are enough: the tiles of
// which every row sees all keys, and with which no group ends. `first` is the number of the unit's first tile in its
// sequence. Where a unit's tiles lie in several runs (`one_run` is false) they don't follow each other, and all of them
// count as masked.
template <class C>
__device__ __forceinline__ void set_edges(const cuda::FoldParams& p, const cuda::WorkItem& item, std::int64_t first,
                                          bool one_run, UnitWork& unit) {
  const int tiles = unit.end - unit.begin;
  const std::int64_t origin = first * C::kKeyTile;
  const auto edge = [&](std::int64_t key) {
    const std::int64_t from_origin = key - origin;
    return static_cast<int>(from_origin < -kNoEdge ? -kNoEdge : from_origin > kNoEdge ? kNoEdge : from_origin);
  };
  const Visibility visibility({p.mask_left, p.mask_right}, item.key_length);
  const KeyRange reach = visibility.reach(item.position);
  unit.origin = static_cast<int>(first);
  unit.from = edge(reach.begin);
  unit.to = edge(reach.end);
  unit.length = edge(item.key_length);

  const auto tiles_before = [](int key) { return key < 0 ? 0 : key / C::kKeyTile; };
  const KeyRange common = visibility.common_keys(item.position, item.position + kQueryTile - 1);
  const int plain_begin = tiles_before(edge(common.begin) + C::kKeyTile - 1);
  const int plain_end = tiles_before(edge(common.end));
  unit.head = tiles - (plain_begin < tiles ? plain_begin : tiles);
  unit.tail = one_run ? tiles - (plain_end < tiles ? plain_end : tiles) : tiles;
  if (p.save && (first + tiles) % kGroupTiles == 0 && unit.tail == 0) unit.tail = 1;  // consume() looks at it
  unit.group = static_cast<int>((first + tiles) % kGroupTiles);
}

// Tells the number of what comes next. One warp's, all lanes together.
template <class C>
class Counter {
 public:
  __device__ __forceinline__ Counter(const cuda::FoldParams& p, const SharedMap<C>& map)
      : p_(p), map_(map), rank_(C::kWalkCtas > 1 ? rank_in_cluster() : 0) {}

  __device__ __forceinline__ std::uint32_t rank() const { return rank_; }
  __device__ __forceinline__ int work() const { return p_.bundle_count * p_.kv_heads; }

  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) / C::kWalkCtas; }
  // From work() on: there is nothing more.
  __device__ __forceinline__ int take() {
    const bool leads = threadIdx.x % 32 == 0;
    int number = 0;
    if (leads) number = rank_ > 0 ? told() : taken();
    number = __shfl_sync(0xffffffffU, number, 0);
    // The next word may come as soon as this one counts as read. So the lane that has read it says so, with a release
    // of the cluster, and behind the number's use: an arrival overtakes a load that has only been issued.
    if (rank_ > 0 && leads) barrier_release_at(in_cta(map_.word_read(), 0));
    return number;
  }

 private:
  // These are of one lane.
  __device__ __forceinline__ int taken() {
    int number = atomicAdd(p_.taken, 1);
    // Each takes once more than there is, so this one is the last of all. The next task may find the same tables.
    if (number == work() - 1) atomicExch(p_.taken, 0);
    number += static_cast<int>(gridDim.x) / C::kWalkCtas;
    if constexpr (C::kWalkCtas > 1) tell(number);
    return number;
  }
  __device__ __forceinline__ void tell(int number) {
    barrier_acquire(map_.word_read(), parity_ ^ 1U);
    parity_ ^= 1U;
    send_number(in_cta(map_.word(), 1), in_cta(map_.word_sent(), 1), number);
  }
  __device__ __forceinline__ int told() {
    barrier_arrive_expect(map_.word_sent(), sizeof(int));
    barrier_acquire(map_.word_sent(), parity_);
    parity_ ^= 1U;
    return load_number(map_.word());
  }

  const cuda::FoldParams& p_;
  const SharedMap<C>& map_;
  std::uint32_t rank_;
  std::uint32_t parity_ = 0;
};

// For each round its units and what is to be fetched for them.
template <class C>
__device__ __forceinline__ void schedule(const cuda::FoldParams& p, const SharedMap<C>& map, unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.kv_heads;
  Counter<C> counter(p, map);
  const int first_unit = static_cast<int>(counter.rank()) * C::kUnits;
  RingCursor<C::kRounds> cursor;
  int tiles = 0;             // of the round before
  std::uint32_t wanted = 0;  // parity
  for (int round = 0;; ++round, cursor.advance()) {
    if (wanted_with<C>(tiles) >= 0) {
      barrier_wait(map.work_wanted(), wanted);
      wanted ^= 1U;
    }
    const int index = round == 0 ? counter.first() : counter.take();
    BundleWork* const work = work_of<C>(shared, cursor.stage());
    UnitWork* const units = units_of<C>(shared, cursor.stage());
    if (round >= C::kRounds) barrier_wait(map.q_empty(cursor.stage()), cursor.parity() ^ 1U);
    const bool any = index < counter.work();
    if (any) {
      const cuda::WorkPlace place = cuda::work_place(p.early_count, p.kv_heads, p.section_heads / group, index);
      const cuda::WorkBundle& bundle = p.bundles[place.piece];
      const int kv_head = place.head;
      tiles = bundle.tiles;
      if (lane < C::kUnits) {
        UnitWork unit{};
        unit.walk = bundle.tiles;
        if (first_unit + lane < bundle.units) {
          const int in_group = bundle.head + first_unit + lane;
          const cuda::WorkItem& item = p.items[bundle.item + in_group / group];
          unit.row = item.row;
          unit.first = item.first;
          unit.run_begin = item.run_begin;
          unit.runs = item.runs;
          unit.slot_begin = item.slot_begin;
          unit.slot_end = item.slot_end;
          unit.query_head = kv_head * group + in_group % group;
          if (item.tiles > 0) {
            unit.begin = static_cast<int>(item.first - bundle.first);
            unit.end = unit.begin + item.tiles;
            set_edges<C>(p, item, item.first_tile, item.runs == 1, unit);
          }
        }
        units[lane] = unit;
      }
      if (lane == 0) {
        work->first = bundle.first;
        work->first_tile = bundle.first_tile;
        work->table = bundle.table;
        work->key_length = p.items[bundle.item].key_length;
        work->run_begin = bundle.run_begin;
        work->runs = bundle.runs;
        work->kv_head = kv_head;
        const int own = bundle.units - first_unit;
        work->units = own < 0 ? 0 : own < C::kUnits ? own : C::kUnits;
        work->tiles = bundle.tiles;
      }
    } else {
      if (lane < C::kUnits) units[lane].walk = -1;
      if (lane == 0) work->tiles = -1;
    }
    barrier_arrive(map.work_full(cursor.stage()));
    if (!any) return;
  }
}

}  // namespace ringattn::sm90
