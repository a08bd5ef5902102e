// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA, who fills it and who waits for it.
//
//   Q      [rounds][units][64 rows]     copies → consumers; then a unit's finished rows on their way out
//   K, V   [stages][key_tile rows]      copies → consumers
//   units  [rounds][units]              scheduler → copies, consumers: a unit's part of the work
//   work   [rounds]                     scheduler → copies
//   closed [units][64 rows]             a consumer's own: R and L of its rows' closed groups
//
// A tile of [rows, dim] is cut into panels of 64 columns, rows of 128 bytes with the 128-byte swizzle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/fold/walk.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ int load_number(std::uint32_t address) {
  int number;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(address) : "memory");
  return number;
}
__device__ __forceinline__ void store_number(std::uint32_t address, int number) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(number) : "memory");
}

__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}
__device__ __forceinline__ void store_pair(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Sixty-four rows of one query head: what a warpgroup folds. Slots [slot_begin, slot_end) are rows; the others are
// absent: their memory belongs to somebody else.
struct UnitWork {
  std::int64_t row;         // of q: of slot 0
  std::int64_t first;       // as in cuda::WorkItem
  std::int32_t walk;        // tiles of the bundle's walk; −1: nothing more
  std::int32_t begin, end;  // of the walk: its own tiles
  std::int32_t slot_begin, slot_end;
  std::int32_t query_head;
  std::int32_t run_begin, runs;  // as in cuda::WorkItem
  // Keys that slot 0 sees, and where the sequence ends, counted from the first key of tile `origin`.
  std::int32_t origin;
  std::int32_t from, to, length;
  // What takes more than the plain steps, counted as the tiles that are left before them: the first ones down to
  // `head`, the last ones from `tail` on, and, from `group` down, every kGroupTiles-th: it begins a group.
  std::int32_t head, tail, group;
  std::int32_t padding[12];
};
static_assert(sizeof(UnitWork) == 128);
inline constexpr int kNoEdge = 1 << 30;  // farther than any key of the walk, in either direction

// The same as consumers read it: from shared memory each time, for the sake of registers.
struct Unit {
  std::uint32_t address;

  __device__ std::int64_t row() const { return load_wide(offsetof(UnitWork, row)); }
  __device__ int walk() const { return load(offsetof(UnitWork, walk)); }
  __device__ int begin() const { return load(offsetof(UnitWork, begin)); }
  __device__ int end() const { return load(offsetof(UnitWork, end)); }
  __device__ int slot_begin() const { return load(offsetof(UnitWork, slot_begin)); }
  __device__ int slot_end() const { return load(offsetof(UnitWork, slot_end)); }
  __device__ bool whole() const { return slot_begin() == 0 && slot_end() == kQueryTile; }  // no row is absent
  __device__ int query_head() const { return load(offsetof(UnitWork, query_head)); }
  __device__ int origin() const { return load(offsetof(UnitWork, origin)); }
  __device__ int from() const { return load(offsetof(UnitWork, from)); }
  __device__ int to() const { return load(offsetof(UnitWork, to)); }
  __device__ int length() const { return load(offsetof(UnitWork, length)); }
  // Which tile of the sequence comes with `left` tiles to go.
  __device__ int number(const cuda::FoldParams& p, int left) const {
    const int nth = end() - begin() - left;
    const int runs = load(offsetof(UnitWork, runs));
    if (runs == 1) return origin() + nth;
    const std::int64_t in_runs = load_wide(offsetof(UnitWork, first)) + nth;
    const cuda::RunEntry& run = find_run(p.runs + load(offsetof(UnitWork, run_begin)), runs, in_runs);
    return static_cast<int>(run.first_tile + in_runs - run.first);
  }
  // Whether the tile that comes with `left` tiles to go has keys that some row doesn't see.
  __device__ bool masked(int left) const {
    return left > load(offsetof(UnitWork, head)) || left <= load(offsetof(UnitWork, tail));
  }
  // What will be left when the next tile comes that takes more than the plain steps.
  __device__ int stop(int left) const {
    if (left > load(offsetof(UnitWork, head))) return left;
    const int tail = load(offsetof(UnitWork, tail));
    const int group = load(offsetof(UnitWork, group));
    const int begins = left - ((left - group) & (kGroupTiles - 1));
    const int stop = begins > tail ? begins : tail;
    return stop < left ? stop : left;
  }

 private:
  __device__ int load(std::size_t offset) const { return load_number(address + static_cast<std::uint32_t>(offset)); }
  __device__ std::int64_t load_wide(std::size_t offset) const {
    std::int64_t number;
    asm volatile("ld.shared.s64 %0, [%1];"
                 : "=l"(number)
                 : "r"(address + static_cast<std::uint32_t>(offset))
                 : "memory");
    return number;
  }
};

struct BundleWork {
  std::int64_t first, first_tile, table;  // as in cuda::WorkBundle
  std::int64_t key_length;
  std::int32_t tiles;  // −1: nothing more
  std::int32_t run_begin, runs;
  std::int32_t kv_head;
  std::int32_t units;
  std::int32_t padding;
};

template <class C>
struct SharedMap {
  static constexpr int kQPanel = kQueryTile * kPanelRowBytes;
  static constexpr int kTilePanel = C::kKeyTile * kPanelRowBytes;
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = C::kRounds * C::kUnits * C::kQBytes;
  static constexpr int kVOffset = kKOffset + C::kStages * C::kKBytes;
  static constexpr int kUnitOffset = kVOffset + C::kStages * C::kVBytes;
  static constexpr int kWorkOffset = kUnitOffset + C::kRounds * C::kUnits * static_cast<int>(sizeof(UnitWork));
  static constexpr int kBarrierOffset = kWorkOffset + C::kRounds * static_cast<int>(sizeof(BundleWork));
  static constexpr int kTailOffset = kBarrierOffset + (3 * C::kRounds + 4 * C::kStages + 8) * kBarrierBytes;
  static constexpr int kClosedOffset = kTailOffset + 32;
  static constexpr int kBytes = kClosedOffset + C::kUnits * kQueryTile * 8;
  static_assert(kUnitOffset % 1024 == 0 && kBarrierOffset % kBarrierBytes == 0 && kBytes <= 232448);

  // Address of the whole in the shared window: behind what the device keeps for itself (hopper_params.hpp). As a
  // constant it costs no register. In a cluster addresses name their CTA, as copies and arrivals take those of any.
  static __device__ std::uint32_t base() {
    if constexpr (C::kWalkCtas > 1) return in_cta(kReservedBytes, rank_in_cluster());
    return kReservedBytes;
  }

  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
  __device__ std::uint32_t q(std::uint32_t round, int unit) const {
    return at(kQOffset, round * C::kUnits + static_cast<std::uint32_t>(unit), C::kQBytes);
  }
  __device__ Unit unit(std::uint32_t round, int unit) const {
    return {at(kUnitOffset, round * C::kUnits + static_cast<std::uint32_t>(unit), sizeof(UnitWork))};
  }
  // Q of a unit, from where its work is: one register tells both.
  __device__ std::uint32_t q(const Unit& unit) const {
    static_assert(C::kQBytes % sizeof(UnitWork) == 0);
    return at(kQOffset, unit.address - (base() + kUnitOffset), C::kQBytes / sizeof(UnitWork));
  }
  // R and L of a row's closed groups, two floats.
  __device__ std::uint32_t closed(int warpgroup, int slot) const {
    return at(kClosedOffset, static_cast<std::uint32_t>((warpgroup - 1) * kQueryTile + slot), 8);
  }
  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }

  // The scheduler has written a round's work; its Q is there; everyone is done with both.
  __device__ std::uint32_t work_full(std::uint32_t round) const { return at(kBarrierOffset, round, kBarrierBytes); }
  __device__ std::uint32_t q_full(std::uint32_t round) const { return work_full(C::kRounds + round); }
  __device__ std::uint32_t q_empty(std::uint32_t round) const { return work_full(2 * C::kRounds + round); }
  // A stage's K is there; its V is; every consumer is done with K, and with V: with both at once unless K goes ahead.
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return work_full(3 * C::kRounds + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return work_full(3 * C::kRounds + C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const {
    return work_full(3 * C::kRounds + 2 * C::kStages + stage);
  }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const {
    return C::kKeysAhead ? work_full(3 * C::kRounds + 3 * C::kStages + 8 + stage) : k_empty(stage);
  }
  // A V tile that reaches past its sequence's end: it has arrived; the tail warp is told; it is done, side by side in
  // both CTAs, as the next one's halves arrive at both.
  __device__ std::uint32_t tail_landed() const { return work_full(3 * C::kRounds + 3 * C::kStages); }
  __device__ std::uint32_t tail_told() const { return work_full(3 * C::kRounds + 3 * C::kStages + 1); }
  __device__ std::uint32_t tail_done() const { return work_full(3 * C::kRounds + 3 * C::kStages + 2); }
  __device__ std::uint32_t tail() const { return base() + kTailOffset; }
  // The pace warp is told how many tiles come next; it lets them come.
  __device__ std::uint32_t pace_told() const { return work_full(3 * C::kRounds + 3 * C::kStages + 3); }
  __device__ std::uint32_t pace_free() const { return work_full(3 * C::kRounds + 3 * C::kStages + 4); }
  __device__ std::uint32_t pace() const { return tail() + 8; }
  // The tiles of a round come to their end: the scheduler may take what comes next.
  __device__ std::uint32_t work_wanted() const { return work_full(3 * C::kRounds + 3 * C::kStages + 5); }
  // Where CTAs walk side by side: the first one has sent word of what comes next; it has been read.
  __device__ std::uint32_t word_sent() const { return work_full(3 * C::kRounds + 3 * C::kStages + 6); }
  __device__ std::uint32_t word_read() const { return work_full(3 * C::kRounds + 3 * C::kStages + 7); }
  __device__ std::uint32_t word() const { return tail() + 16; }
};

// Generic addresses of the same memory, for plain data.
template <class C>
__device__ __forceinline__ BundleWork* work_of(unsigned char* shared, std::uint32_t round) {
  return reinterpret_cast<BundleWork*>(shared + SharedMap<C>::kWorkOffset) + round;
}
template <class C>
__device__ __forceinline__ UnitWork* units_of(unsigned char* shared, std::uint32_t round) {
  return reinterpret_cast<UnitWork*>(shared + SharedMap<C>::kUnitOffset) + round * C::kUnits;
}

}  // namespace ringattn::sm90
