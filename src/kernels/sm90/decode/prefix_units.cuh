// SPDX-License-Identifier: Apache-2.0
// How the groups of shared prefixes are cut into units. The query rows of one KV head of all sequences that share a
// prefix lie one behind the other; a unit is one whole group of the prefix for up to 64 of them. As lengths are known
// on the device alone, so is which sequences share (units.cuh); every CTA lists them for itself.
#pragma once

#include "kernels/sm90/decode/decode_map.cuh"
#include "kernels/sm90/decode/slots.cuh"

namespace ringattn::sm90 {

// DecodeMap, and behind its barriers:
//
//   units    [prefixes + 1]   how many units come before each prefix
//   members  [prefixes + 1]   how many sequences share the prefixes before each
//   list     [sequences]      those sequences, by their prefixes
template <class C>
struct PrefixMap : DecodeMap<C> {
  static constexpr int kMemberOffset = DecodeMap<C>::kUnitOffset + (kMostPrefixes + 1) * 4;
  static constexpr int kListOffset = kMemberOffset + (kMostPrefixes + 1) * 4;
  static constexpr int kBytes = kListOffset + kMostDecodeSequences * 4;
  static_assert(kBytes <= kMostSharedBytes);

  __device__ std::uint32_t units_before(int prefix) const { return at(DecodeMap<C>::kUnitOffset, prefix); }
  __device__ std::uint32_t members_before(int prefix) const { return at(kMemberOffset, prefix); }
  __device__ std::uint32_t listed(int member) const { return at(kListOffset, member); }

 private:
  static __device__ std::uint32_t at(int offset, int index) {
    return static_cast<std::uint32_t>(kReservedBytes + offset + index * 4);
  }
};

struct PrefixUnit {
  DecodeUnit of;     // where its keys lie: those of the first sequence that shares them
  int first_member;  // of the prefix, in the list
  int first_row;     // of the rows of all members
  int rows;
};

// Row `slot` of a unit.
template <class C>
__device__ __forceinline__ DecodePlace place_of(const DecodeParams& p, const PrefixMap<C>& map, const PrefixUnit& unit,
                                                int slot) {
  const int number = unit.first_row + slot;
  const int member = p.by_sequence_rows.quotient(number);
  const int of_sequence = number - member * p.rows * p.ratio;
  const int i = p.by_ratio.quotient(of_sequence);
  const int sequence = load_number(map.listed(unit.first_member + member));
  return {sequence * p.rows + i, unit.of.kv_head * p.ratio + (of_sequence - i * p.ratio), i};
}

// Groups of the prefix that the cache holds.
template <class C>
__device__ __forceinline__ int cached_groups(const DecodeParams& p, int prefix) {
  const int groups = prefix_groups<C>(p, prefix);
  return groups <= p.first_group ? 0 : (groups - p.first_group - 1) / p.every_group + 1;
}
__device__ __forceinline__ int prefix_blocks(const DecodeParams& p, int members) {
  return (members * p.rows * p.ratio + kQueryTile - 1) / kQueryTile;
}

// The sum of the lanes up to this one.
__device__ __forceinline__ int sum_up_to_lane(int number, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffU, number, step);
    if (lane >= step) number += other;
  }
  return number;
}

// Calls visit(sequence, prefix, rank, leads, of_prefix) for every sequence: the prefix that it shares, or −1; and among
// the lanes of its prefix, its rank, whether it is the first, and how many there are.
template <class C, class Visit>
__device__ __forceinline__ void each_member(const DecodeParams& p, int lane, Visit visit) {
#pragma unroll 1
  for (int first = 0; first < p.sequences; first += 32) {
    const int sequence = first + lane;
    int prefix = sequence < p.sequences ? prefix_of(p, sequence) : -1;
    if (prefix >= 0) {
      const int length = __ldcg(p.lengths + sequence);
      if (shared_groups<C>(p, prefix, length, length - p.rows) == 0) prefix = -1;
    }
    const std::uint32_t same = __match_any_sync(0xffffffffU, prefix);
    const int rank = __popc(same & ((1U << lane) - 1U));
    visit(sequence, prefix, rank, rank == 0, __popc(same));
    __syncwarp();
  }
}

// Fills the map's tables. By one warp.
template <class C>
__device__ __forceinline__ void list_members(const DecodeParams& p, const PrefixMap<C>& map) {
  const int lane = thread_of_cta() % 32;
  for (int i = lane; i <= p.prefixes; i += 32) store_number(map.members_before(i), 0);
  __syncwarp();
  const auto next_of = [&map](int prefix) { return map.members_before(prefix + 1); };
  each_member<C>(p, lane, [&](int, int prefix, int, bool leads, int count) {
    if (prefix >= 0 && leads) store_number(next_of(prefix), load_number(next_of(prefix)) + count);
  });
  // Where each prefix's members begin, one place late: listing them moves that to where they end.
  int members_before = 0, units_before = 0;
#pragma unroll 1
  for (int first = 0; first < p.prefixes; first += 32) {
    const int prefix = first + lane;
    const bool is_one = prefix < p.prefixes;
    const int members = is_one ? load_number(next_of(prefix)) : 0;
    const int units = members == 0 ? 0 : cached_groups<C>(p, prefix) * p.fold.kv_heads * prefix_blocks(p, members);
    const int members_here = sum_up_to_lane(members, lane);
    const int units_here = sum_up_to_lane(units, lane);
    if (is_one) {
      store_number(next_of(prefix), members_before + members_here - members);
      store_number(map.units_before(prefix + 1), units_before + units_here);
    }
    members_before += __shfl_sync(0xffffffffU, members_here, 31);
    units_before += __shfl_sync(0xffffffffU, units_here, 31);
  }
  if (lane == 0) store_number(map.units_before(0), 0);
  __syncwarp();
  each_member<C>(p, lane, [&](int sequence, int prefix, int rank, bool leads, int count) {
    const int begin = prefix < 0 ? 0 : load_number(next_of(prefix));
    __syncwarp();
    if (prefix < 0) return;
    store_number(map.listed(begin + rank), sequence);
    if (leads) store_number(next_of(prefix), begin + count);
  });
}

// Units of the same keys follow each other, so that the second level of the caches serves all but one of them.
template <class C>
__device__ __forceinline__ PrefixUnit prefix_unit_of(const DecodeParams& p, const PrefixMap<C>& map, int number) {
  int prefix = 0;
#pragma unroll 1
  for (int count = p.prefixes; count > 1;) {
    const int half = count / 2;
    const bool behind = load_number(map.units_before(prefix + half)) <= number;
    prefix += behind ? half : 0;
    count = behind ? count - half : half;
  }
  PrefixUnit unit{};
  unit.first_member = load_number(map.members_before(prefix));
  const int members = load_number(map.members_before(prefix + 1)) - unit.first_member;
  const int blocks = prefix_blocks(p, members);
  const int nth = number - load_number(map.units_before(prefix));
  const int of_group = nth % (p.fold.kv_heads * blocks);
  unit.of.sequence = load_number(map.listed(unit.first_member));
  unit.of.kv_head = of_group / blocks;
  unit.of.cache_group = nth / (p.fold.kv_heads * blocks);
  unit.first_row = of_group % blocks * kQueryTile;
  const int left = members * p.rows * p.ratio - unit.first_row;
  unit.rows = left < kQueryTile ? left : kQueryTile;
  const int group = p.first_group + unit.of.cache_group * p.every_group;
  unit.of.lag = (group - unit.of.cache_group) * (kGroupTiles * C::kKeyTile);
  unit.of.begin = group * kGroupTiles;
  unit.of.end = unit.of.begin + kGroupTiles;
  unit.of.of.length = unit.of.end * C::kKeyTile;
  return unit;
}

}  // namespace ringattn::sm90
