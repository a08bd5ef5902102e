// SPDX-License-Identifier: Apache-2.0
// How the groups of shared prefixes are cut into work_tiles. The query rows of one KV head of all sequences that share
// a prefix lie one behind the other; a work_tile is one split of the prefix for up to 64 of them. Of whole splits it
// leaves partials. The last split may be is_partial: of its tiles, as far as the prefix has them, a work_tile leaves
// states, from which each sequence goes on. As lengths are known on the device alone, so is which sequences share
// (work_tiles.cuh); every CTA lists them for itself, first those that share all tiles of a prefix, and then those that
// share its whole splits alone.
#pragma once

#include "kernels/sm90/decode/decode_map.cuh"
#include "kernels/sm90/decode/slots.cuh"

namespace ringattn::sm90 {

// DecodeMap, and behind its barriers:
//
//   work_tiles    [prefixes + 1]   how many work_tiles come before each prefix
//   members  [2 prefixes + 1] how many sequences share the prefixes before each, and with those that share all of it
//   mask_row     [sequences]      those sequences, by their prefixes
//   sums     [places][128 threads]  shares of Σ p of a tile's rows, those of the thread that has them; tiles take turns
//   shifts   [128 threads]    minus the softmax_offsets of a thread's two rows
//   barriers of panels and of the end, and a flag: a work_tile has failed
//
// The end's barriers and the flag of a pair's CTA lie behind all that has a panel_index where work_tiles are folded
// again. Where Q lies, tiles' probabilities do later: [panels][64 rows], of which a tile has two. In a CTA of a pair
// that is the panel_index of the first tile that it scores itself: into the others' the other CTA may write already.
template <class C>
struct PrefixMap : DecodeMap<C> {
  static constexpr int kPanels = C::kPanels;
  static constexpr int kTilePanels = (C::kKeyTile + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kThreadPairs = kDecodeConsumerThreads * 8;  // bytes of two numbers of each thread
  static constexpr int kMemberOffset = DecodeMap<C>::kWorkTileOffset + (kMaxPrefixes + 1) * 4;
  static constexpr int kListOffset = kMemberOffset + (2 * kMaxPrefixes + 1) * 4;
  static constexpr int kSumOffset = (kListOffset + kMaxDecodeSequences * 4 + 15) / 16 * 16;
  static constexpr int kSumStages = C::kSlices == 1 ? 2 : kPanels / kTilePanels;
  static constexpr int kShiftOffset = kSumOffset + kSumStages * kThreadPairs;
  static constexpr int kPanelBarrierOffset = kShiftOffset + kThreadPairs;
  static constexpr int end_offset() {
    constexpr int kEnd = kPanelBarrierOffset + 2 * kPanels * kBarrierBytes;
    if constexpr (C::kSlices == 1) {
      return kEnd;
    } else {
      constexpr int kWhole = (PrefixMap<typename C::Whole>::kBytes + kBarrierBytes - 1) / kBarrierBytes * kBarrierBytes;
      return kEnd > kWhole ? kEnd : kWhole;
    }
  }
  static constexpr int kDoneOffset = end_offset();
  static constexpr int kFailedOffset = kDoneOffset + 2 * kBarrierBytes;
  static constexpr int kBytes = kFailedOffset + 4;
  static_assert(C::kQCapacity >= kPanels * cuda::panel_bytes(kQueryTile) && kBytes <= kMaxSharedBytes);

  // In a pair, which CTA's warpgroups write the probabilities of a panel, and the first of the panels where Q lies: one
  // that its own write.
  __device__ static std::uint32_t writer_of(std::uint32_t panel) {
    static_assert(C::kSlices == 1 || kPanels / kTilePanels % C::kSlices == 0);
    return panel / kTilePanels % C::kSlices;
  }
  __device__ static std::uint32_t q_panel() {
    if constexpr (C::kSlices == 1) return 0;
    static_assert(C::kSlices == 1 || C::kQBytes <= kTilePanels * cuda::panel_bytes(kQueryTile));
    return rank_in_cluster() * kTilePanels;
  }
  __device__ std::uint32_t q() const { return panel(q_panel()); }
  __device__ std::uint32_t work_tiles_before(int prefix) const { return at(DecodeMap<C>::kWorkTileOffset, prefix); }
  // Two parts of each prefix's members.
  __device__ std::uint32_t members_before(int part) const { return at(kMemberOffset, part); }
  __device__ std::uint32_t listed(int member) const { return at(kListOffset, member); }
  __device__ std::uint32_t panel(std::uint32_t panel_index) const {
    return DecodeMap<C>::q() + panel_index * static_cast<std::uint32_t>(cuda::panel_bytes(kQueryTile));
  }
  __device__ std::uint32_t sums(std::uint32_t tile, int thread) const {
    return at(kSumOffset, 2 * thread) + tile % kSumStages * kThreadPairs;
  }
  // Which part of which members a sequence is in, in two bytes: while sequences are listed, where sums lie later.
  __device__ std::uint32_t found(int sequence) const {
    static_assert(2 * kMaxDecodeSequences <= kSumStages * kThreadPairs);
    return at(kSumOffset, 0) + static_cast<std::uint32_t>(2 * sequence);
  }
  __device__ std::uint32_t shift(int thread) const { return at(kShiftOffset, 2 * thread); }
  // Of a panel: probabilities are there; they have been read, by both CTAs of a pair, which the one that writes there
  // is told.
  __device__ std::uint32_t panel_full(std::uint32_t panel_index) const {
    return at(kPanelBarrierOffset, 0) + panel_index * kBarrierBytes;
  }
  __device__ std::uint32_t panel_empty(std::uint32_t panel_index) const { return panel_full(kPanels + panel_index); }
  // All work_tiles are done.
  __device__ std::uint32_t done() const { return at(kDoneOffset, 0); }
  // Of a pair: memory has been laid out anew.
  __device__ std::uint32_t laid_out() const { return done() + kBarrierBytes; }
  __device__ std::uint32_t failed() const { return at(kFailedOffset, 0); }

 private:
  static __device__ std::uint32_t at(int offset, int index) {
    return shared_base<C>() + static_cast<std::uint32_t>(offset + index * 4);
  }
};

// Named barriers: query rows are there; those that score have read them; softmax_offsets are there.
inline constexpr int kPrefixQueries = 2;
inline constexpr int kPrefixQueriesRead = 3;
inline constexpr int kPrefixOffsets = 4;
inline constexpr int kPrefixOrderBarrier = 5;  // and 6, in pairs: of the first and of the second warpgroup that scores

// Steps of 16 keys in each of a tile's two panels of probabilities.
template <class C>
constexpr int panel_steps(int panel) {
  constexpr int kSteps = C::kKeyTile / 16;
  static_assert(kSteps > 4 && kSteps <= 8 && PrefixMap<C>::kTilePanels == 2);
  return panel == 0 ? 4 : kSteps - 4;
}

// How many warpgroups score, of a CTA or of both of a pair.
template <class C>
constexpr int scoring_warpgroups() {
  return C::kSlices * C::kScorers;
}

struct PrefixWorkTile {
  DecodeWorkTile of;  // where its keys lie: those of the first sequence that shares them
  int first_member;   // of the prefix, in the mask_row
  int first_row;      // of the rows of all members
  int rows;

  __device__ int tiles() const { return of.end - of.begin; }
  // Whether the split goes on behind the prefix: states are left.
  __device__ bool is_partial() const { return tiles() < kTilesPerKvSplit; }
  // As many as there are tiles, and more, for nothing, where not all that score would have had as many.
  template <class C>
  __device__ int turns() const {
    constexpr int kAtATime = scoring_warpgroups<C>();
    return (tiles() + kAtATime - 1) / kAtATime * kAtATime;
  }
  // The tile of a turn: of those that are for nothing, the last one again.
  __device__ int tile_at(int turn) const { return min(of.begin + turn, of.end - 1); }
};

// Row `slot` of a work_tile.
template <class C>
__device__ __forceinline__ DecodeCoord coord_of(const DecodeParams& p, const PrefixMap<C>& map,
                                                const PrefixWorkTile& work_tile, int slot) {
  const int number = work_tile.first_row + slot;
  const int member = p.by_sequence_rows.quotient(number);
  const int of_sequence = number - member * p.rows * p.ratio;
  const int i = p.by_ratio.quotient(of_sequence);
  const int sequence = load_number(map.listed(work_tile.first_member + member));
  return {sequence * p.rows + i, work_tile.of.kv_head * p.ratio + (of_sequence - i * p.ratio), i};
}

// Whole groups of a prefix of so many tiles that the cache holds.
__device__ __forceinline__ int cached_splits(const DecodeParams& p, int tiles) {
  const int splits = tiles / kTilesPerKvSplit;
  return splits <= p.first_split ? 0 : (splits - p.first_split - 1) / p.split_stride + 1;
}
// And whether it holds the is_partial one behind them, if there is one.
__device__ __forceinline__ bool partial_split_cached(const DecodeParams& p, int tiles) {
  const int behind = tiles / kTilesPerKvSplit - p.first_split;
  return tiles % kTilesPerKvSplit != 0 && behind >= 0 && behind % p.split_stride == 0;
}
__device__ __forceinline__ int prefix_blocks(const DecodeParams& p, int members) {
  return (members * p.rows * p.ratio + kQueryTile - 1) / kQueryTile;
}

// A number of 16 bits with its sign.
__device__ __forceinline__ void store_short(std::uint32_t address, int number) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<std::int16_t>(number)) : "memory");
}
__device__ __forceinline__ int load_short(std::uint32_t address) {
  std::int16_t number;
  asm volatile("ld.shared.s16 %0, [%1];" : "=h"(number) : "r"(address) : "memory");
  return number;
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

// Has what tells who shares which prefix brought to the second level of the caches: whatever is written there later is
// seen all the same. By one warp.
__device__ __forceinline__ void prefetch_metadata(const DecodeParams& p) {
  const int first = thread_of_cta() % 32 * 32;  // numbers that follow each other, 128 bytes of them
  if (first < p.sequences) {
    cuda::prefetch_to_l2(p.prefix_of + first);
    cuda::prefetch_to_l2(p.lengths + first);
  }
  if (first < p.prefixes) cuda::prefetch_to_l2(p.prefix_keys + first);
}

// The part of a prefix's members that a sequence is in: 2 i, of prefix i, where it shares all tiles, 2 i + 1 where it
// shares whole splits alone, and −1 where it shares nothing.
template <class C>
__device__ __forceinline__ int part_of(const DecodeParams& p, int sequence) {
  if (sequence >= p.sequences) return -1;
  const int length = __ldcg(p.lengths + sequence);
  const int prefix = prefix_of(p, sequence);
  if (prefix < 0) return -1;
  const int tiles = prefix_tiles<C>(p, prefix);
  const int shared = shared_tiles<C>(p, tiles, length, length - p.rows);
  return shared == 0 ? -1 : 2 * prefix + (shared == tiles ? 0 : 1);
}

// Calls visit(sequence, part, rank, leads, of_part) for every sequence: part_at(sequence), the part that it is in, or
// −1; and among the lanes of its part, its rank, whether it is the first, and how many there are.
template <class PartAt, class Visit>
__device__ __forceinline__ void each_member(const DecodeParams& p, int lane, PartAt part_at, Visit visit) {
#pragma unroll 1
  for (int first = 0; first < p.sequences; first += 32) {
    const int sequence = first + lane;
    const int part = part_at(sequence);
    const std::uint32_t same = __match_any_sync(0xffffffffU, part);
    const int rank = __popc(same & ((1U << lane) - 1U));
    visit(sequence, part, rank, rank == 0, __popc(same));
    __syncwarp();
  }
}

// Units of a prefix and KV head, of so many members, `of_all` of which share all of its tiles.
template <class C>
__device__ __forceinline__ int blocks_of_prefix(const DecodeParams& p, int prefix, int members, int of_all) {
  const int tiles = prefix_tiles<C>(p, prefix);
  return cached_splits(p, tiles) * prefix_blocks(p, members) +
         (partial_split_cached(p, tiles) ? prefix_blocks(p, of_all) : 0);
}

// Fills the map's tables. By one warp.
template <class C>
__device__ __forceinline__ void collect_members(const DecodeParams& p, const PrefixMap<C>& map) {
  const int lane = thread_of_cta() % 32;
  for (int i = lane; i <= 2 * p.prefixes; i += 32) store_number(map.members_before(i), 0);
  __syncwarp();
  const auto next_of = [&map](int part) { return map.members_before(part + 1); };
  const auto look_up = [&](int sequence) {
    const int part = part_of<C>(p, sequence);
    if (sequence < p.sequences) store_short(map.found(sequence), part);
    return part;
  };
  each_member(p, lane, look_up, [&](int, int part, int, bool leads, int count) {
    if (part >= 0 && leads) store_number(next_of(part), load_number(next_of(part)) + count);
  });
  // Where each part begins, one panel_index late: listing its members moves that to where they end.
  int members_before = 0, work_tiles_before = 0;
#pragma unroll 1
  for (int first = 0; first < p.prefixes; first += 32) {
    const int prefix = first + lane;
    const bool is_one = prefix < p.prefixes;
    const int of_all = is_one ? load_number(next_of(2 * prefix)) : 0;
    const int members = of_all + (is_one ? load_number(next_of(2 * prefix + 1)) : 0);
    const int work_tiles = members == 0 ? 0 : p.attention.kv_heads * blocks_of_prefix<C>(p, prefix, members, of_all);
    const int members_here = sum_up_to_lane(members, lane);
    const int work_tiles_here = sum_up_to_lane(work_tiles, lane);
    if (is_one) {
      store_number(next_of(2 * prefix), members_before + members_here - members);
      store_number(next_of(2 * prefix + 1), members_before + members_here - members + of_all);
      store_number(map.work_tiles_before(prefix + 1), work_tiles_before + work_tiles_here);
    }
    members_before += __shfl_sync(0xffffffffU, members_here, 31);
    work_tiles_before += __shfl_sync(0xffffffffU, work_tiles_here, 31);
  }
  if (lane == 0) store_number(map.work_tiles_before(0), 0);
  __syncwarp();
  const auto found = [&](int sequence) { return sequence < p.sequences ? load_short(map.found(sequence)) : -1; };
  each_member(p, lane, found, [&](int sequence, int part, int rank, bool leads, int count) {
    const int begin = part < 0 ? 0 : load_number(next_of(part));
    __syncwarp();
    if (part < 0) return;
    store_number(map.listed(begin + rank), sequence);
    if (leads) store_number(next_of(part), begin + count);
  });
}

// Units of the same keys follow each other, so that the second level of the caches serves all but one of them. Those of
// an is_partial split, which are shorter, come last.
template <class C>
__device__ __forceinline__ PrefixWorkTile prefix_work_tile_of(const DecodeParams& p, const PrefixMap<C>& map,
                                                              int number) {
  int prefix = 0;
#pragma unroll 1
  for (int count = p.prefixes; count > 1;) {
    const int half = count / 2;
    const bool behind = load_number(map.work_tiles_before(prefix + half)) <= number;
    prefix += behind ? half : 0;
    count = behind ? count - half : half;
  }
  PrefixWorkTile work_tile{};
  work_tile.first_member = load_number(map.members_before(2 * prefix));
  const auto members_to = [&](int part) { return load_number(map.members_before(part)) - work_tile.first_member; };
  const int tiles = prefix_tiles<C>(p, prefix);
  const int whole = cached_splits(p, tiles);
  int nth = number - load_number(map.work_tiles_before(prefix));
  int members = members_to(2 * prefix + 2);
  const int of_whole = whole * p.attention.kv_heads * prefix_blocks(p, members);
  const bool is_partial = nth >= of_whole;
  if (is_partial) {
    nth -= of_whole;
    members = members_to(2 * prefix + 1);
  }
  const int blocks = prefix_blocks(p, members);
  const int of_group = nth % (p.attention.kv_heads * blocks);
  work_tile.of.sequence = load_number(map.listed(work_tile.first_member));
  work_tile.of.kv_head = of_group / blocks;
  work_tile.of.cache_split = is_partial ? whole : nth / (p.attention.kv_heads * blocks);
  work_tile.first_row = of_group % blocks * kQueryTile;
  const int left = members * p.rows * p.ratio - work_tile.first_row;
  work_tile.rows = left < kQueryTile ? left : kQueryTile;
  const int split = p.first_split + work_tile.of.cache_split * p.split_stride;
  work_tile.of.lag = (split - work_tile.of.cache_split) * (kTilesPerKvSplit * C::kKeyTile);
  work_tile.of.begin = split * kTilesPerKvSplit;
  work_tile.of.end = work_tile.of.begin + (is_partial ? tiles % kTilesPerKvSplit : kTilesPerKvSplit);
  work_tile.of.of.length = work_tile.of.end * C::kKeyTile;
  return work_tile;
}

}  // namespace ringattn::sm90
