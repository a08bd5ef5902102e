// SPDX-License-Identifier: Apache-2.0
// How the KV splits of shared prefixes are cut into work tiles. The query rows of one KV head of all sequences that
// share a prefix are concatenated. A work tile is one KV split of the prefix for up to 64 of these rows. For whole
// splits it stores partials. For the last split, if it is partial, it stores states from which each sequence resumes.
// Lengths are known only on the device, and so is which sequences share (decode_common.cuh). So every CTA builds the
// member list: for each prefix the sequences that share all of its tiles, then those that share only its whole splits.
#pragma once

#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_common.cuh"

namespace ringattn::sm90 {

// DecodeMap, and after its barriers:
//
//   work_tiles [prefixes + 1]        how many work tiles come before each prefix
//   members    [2 prefixes + 1]      start of each prefix's two parts in the member list
//   list       [sequences]           the member list: sequences ordered by prefix and part
//   sums       [stages][128 threads] shares of Σ p of a tile's two rows, by thread
//   shifts     [128 threads]         −softmax_offset of a thread's two rows
//   barriers of panels and of the end, and a flag: a work tile has failed
//
// In a CTA pair the end's barriers and the flag come after everything that is used for recomputing. Q shares memory
// with the probabilities, [panels][64 rows], two panels for each tile. In a CTA of a pair, Q is in the panels of the
// first tile that it scores itself, because the peer CTA may already write to the others.
template <class C>
struct PrefixMap : DecodeMap<C> {
  static constexpr int kPanels = C::kPanels;
  static constexpr int kTilePanels = (C::kKeyTile + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kThreadPairs = kDecodeConsumerThreads * 8;  // bytes of two floats for each thread
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

  // In a pair: the CTA whose warpgroups write a panel, and the first of the panels that Q shares, which this CTA
  // writes.
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
  // Each prefix has two parts of the member list.
  __device__ std::uint32_t members_before(int part) const { return at(kMemberOffset, part); }
  __device__ std::uint32_t member_sequence(int member) const { return at(kListOffset, member); }
  __device__ std::uint32_t panel(std::uint32_t panel_index) const {
    return DecodeMap<C>::q() + panel_index * static_cast<std::uint32_t>(cuda::panel_bytes(kQueryTile));
  }
  __device__ std::uint32_t sums(std::uint32_t tile, int thread) const {
    return at(kSumOffset, 2 * thread) + tile % kSumStages * kThreadPairs;
  }
  // The part of a sequence, in two bytes. Used while the list is built, in the memory of the sums.
  __device__ std::uint32_t found(int sequence) const {
    static_assert(2 * kMaxDecodeSequences <= kSumStages * kThreadPairs);
    return at(kSumOffset, 0) + static_cast<std::uint32_t>(2 * sequence);
  }
  __device__ std::uint32_t shift(int thread) const { return at(kShiftOffset, 2 * thread); }
  // Barriers of a panel: full (probabilities written) and empty (read by the output warpgroups of all CTAs, signalled
  // at the CTA that writes it).
  __device__ std::uint32_t panel_full(std::uint32_t panel_index) const {
    return at(kPanelBarrierOffset, 0) + panel_index * kBarrierBytes;
  }
  __device__ std::uint32_t panel_empty(std::uint32_t panel_index) const { return panel_full(kPanels + panel_index); }
  // All work tiles are complete.
  __device__ std::uint32_t done() const { return at(kDoneOffset, 0); }
  // In a pair: shared memory has been reinitialized.
  __device__ std::uint32_t laid_out() const { return done() + kBarrierBytes; }
  __device__ std::uint32_t failed() const { return at(kFailedOffset, 0); }

 private:
  static __device__ std::uint32_t at(int offset, int index) {
    return shared_base<C>() + static_cast<std::uint32_t>(offset + index * 4);
  }
};

// Named barriers: Q is in shared memory; the scoring warpgroups have read it; the softmax_offsets are fixed.
inline constexpr int kPrefixQueries = 2;
inline constexpr int kPrefixQueriesRead = 3;
inline constexpr int kPrefixOffsets = 4;
// and 6: barriers of the turns of the first and the second scoring warpgroup
inline constexpr int kPrefixOrderBarrier = 5;

// k16 steps of each of a tile's two panels of probabilities.
template <class C>
constexpr int panel_steps(int panel) {
  constexpr int kSteps = C::kKeyTile / 16;
  static_assert(kSteps > 4 && kSteps <= 8 && PrefixMap<C>::kTilePanels == 2);
  return panel == 0 ? 4 : kSteps - 4;
}

// Scoring warpgroups of a CTA, or of both CTAs of a pair.
template <class C>
constexpr int scoring_warpgroups() {
  return C::kSlices * C::kScorers;
}

struct PrefixWorkTile {
  DecodeWorkTile decode_tile;  // its keys, located through the first sequence that shares them
  int first_member;            // index in the member list of the prefix's first member
  int first_row;               // index in the concatenated rows of all members
  int rows;

  __device__ int tiles() const { return decode_tile.end - decode_tile.begin; }
  // Whether the split continues after the prefix, so that states are stored.
  __device__ bool is_partial() const { return tiles() < kTilesPerKvSplit; }
  // The number of tiles, rounded up so that all scoring warpgroups have the same number of turns.
  template <class C>
  __device__ int turns() const {
    constexpr int kAtATime = scoring_warpgroups<C>();
    return (tiles() + kAtATime - 1) / kAtATime * kAtATime;
  }
  // The tile of a turn; the last one again for turns without a tile.
  __device__ int tile_at(int turn) const { return min(decode_tile.begin + turn, decode_tile.end - 1); }
};

// Coordinate of row `tile_row` of a work tile.
template <class C>
__device__ __forceinline__ DecodeCoord coord_of(const PrefixParams& p, const PrefixMap<C>& map,
                                                const PrefixWorkTile& work_tile, int tile_row) {
  const int number = work_tile.first_row + tile_row;
  const int member = p.by_sequence_rows.quotient(number);
  const int of_sequence = number - member * p.rows.per_sequence * p.blocks.ratio;
  const int i = p.blocks.by_ratio.quotient(of_sequence);
  const int sequence = load_number(map.member_sequence(work_tile.first_member + member));
  return {sequence * p.rows.per_sequence + i,
          work_tile.decode_tile.kv_head * p.blocks.ratio + (of_sequence - i * p.blocks.ratio), i};
}

// Whole KV splits of a prefix of `tiles` tiles that the cache holds.
__device__ __forceinline__ int cached_splits(const PrefixParams& p, int tiles) {
  const int splits = tiles / kTilesPerKvSplit;
  return splits <= p.splits.first ? 0 : (splits - p.splits.first - 1) / p.splits.stride + 1;
}
// Whether the cache holds the partial split after them, if there is one.
__device__ __forceinline__ bool partial_split_cached(const PrefixParams& p, int tiles) {
  const int nth = tiles / kTilesPerKvSplit - p.splits.first;
  return tiles % kTilesPerKvSplit != 0 && nth >= 0 && nth % p.splits.stride == 0;
}
__device__ __forceinline__ int prefix_blocks(const PrefixParams& p, int members) {
  return (members * p.rows.per_sequence * p.blocks.ratio + kQueryTile - 1) / kQueryTile;
}

// 16-bit signed integers.
__device__ __forceinline__ void store_short(std::uint32_t address, int number) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<std::int16_t>(number)) : "memory");
}
__device__ __forceinline__ int load_short(std::uint32_t address) {
  std::int16_t number;
  asm volatile("ld.shared.s16 %0, [%1];" : "=h"(number) : "r"(address) : "memory");
  return number;
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ int sum_up_to_lane(int number, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffU, number, step);
    if (lane >= step) number += other;
  }
  return number;
}

// Prefetches the prefix tables and lengths into L2. Data written later is seen all the same. One warp calls it.
__device__ __forceinline__ void prefetch_metadata(const PrefixParams& p) {
  const int first = thread_of_cta() % 32 * 32;  // a lane's 128 bytes
  if (first < p.blocks.sequences) {
    cuda::prefetch_to_l2(p.prefixes.of_sequence + first);
    cuda::prefetch_to_l2(p.rows.lengths + first);
  }
  if (first < p.prefixes.count) cuda::prefetch_to_l2(p.prefixes.keys + first);
}

// The part of the member list that a sequence belongs to: 2 i if it shares all tiles of prefix i, 2 i + 1 if it shares
// only whole splits, −1 if it shares nothing.
template <class C>
__device__ __forceinline__ int part_of(const PrefixParams& p, int sequence) {
  if (sequence >= p.blocks.sequences) return -1;
  const int length = __ldcg(p.rows.lengths + sequence);
  const int prefix = prefix_of(p, sequence);
  if (prefix < 0) return -1;
  const int tiles = prefix_tiles<C>(p, prefix);
  const int shared = shared_tiles<C>(p, tiles, length, length - p.rows.per_sequence);
  return shared == 0 ? -1 : 2 * prefix + (shared == tiles ? 0 : 1);
}

// Calls visit(sequence, part, rank, leads, of_part) for every sequence. part_at(sequence) is its part, or −1. Among the
// lanes with the same part, rank is the lane's index, leads whether it is the first, and of_part their number.
template <class PartAt, class Visit>
__device__ __forceinline__ void each_member(const PrefixParams& p, int lane, PartAt part_at, Visit visit) {
#pragma unroll 1
  for (int first = 0; first < p.blocks.sequences; first += 32) {
    const int sequence = first + lane;
    const int part = part_at(sequence);
    const std::uint32_t same = __match_any_sync(0xffffffffU, part);
    const int rank = __popc(same & ((1U << lane) - 1U));
    visit(sequence, part, rank, rank == 0, __popc(same));
    __syncwarp();
  }
}

// Number of work tiles of a prefix and KV head with `members` members, `of_all` of which share all of its tiles.
template <class C>
__device__ __forceinline__ int blocks_of_prefix(const PrefixParams& p, int prefix, int members, int of_all) {
  const int tiles = prefix_tiles<C>(p, prefix);
  return cached_splits(p, tiles) * prefix_blocks(p, members) +
         (partial_split_cached(p, tiles) ? prefix_blocks(p, of_all) : 0);
}

// Fills the tables of the map. One warp calls it.
template <class C>
__device__ __forceinline__ void collect_members(const PrefixParams& p, const PrefixMap<C>& map) {
  const int lane = thread_of_cta() % 32;
  for (int i = lane; i <= 2 * p.prefixes.count; i += 32) store_number(map.members_before(i), 0);
  __syncwarp();
  const auto next_of = [&map](int part) { return map.members_before(part + 1); };
  const auto look_up = [&](int sequence) {
    const int part = part_of<C>(p, sequence);
    if (sequence < p.blocks.sequences) store_short(map.found(sequence), part);
    return part;
  };
  each_member(p, lane, look_up, [&](int, int part, int, bool leads, int count) {
    if (part >= 0 && leads) store_number(next_of(part), load_number(next_of(part)) + count);
  });
  // The start of each part is stored one entry late, and advances to the part's end while its members are listed.
  int members_before = 0, work_tiles_before = 0;
#pragma unroll 1
  for (int first = 0; first < p.prefixes.count; first += 32) {
    const int prefix = first + lane;
    const bool is_one = prefix < p.prefixes.count;
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
  const auto found = [&](int sequence) { return sequence < p.blocks.sequences ? load_short(map.found(sequence)) : -1; };
  each_member(p, lane, found, [&](int sequence, int part, int rank, bool leads, int count) {
    const int begin = part < 0 ? 0 : load_number(next_of(part));
    __syncwarp();
    if (part < 0) return;
    store_number(map.member_sequence(begin + rank), sequence);
    if (leads) store_number(next_of(part), begin + count);
  });
}

// Work tiles with the same keys are consecutive, so that only one of them reads from HBM and the others hit in L2.
// A partial split has fewer tiles and comes last.
template <class C>
__device__ __forceinline__ PrefixWorkTile prefix_work_tile_of(const PrefixParams& p, const PrefixMap<C>& map,
                                                              int number) {
  int prefix = 0;
#pragma unroll 1
  for (int count = p.prefixes.count; count > 1;) {
    const int half = count / 2;
    const bool right = load_number(map.work_tiles_before(prefix + half)) <= number;
    prefix += right ? half : 0;
    count = right ? count - half : half;
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
  const int in_split = nth % (p.attention.kv_heads * blocks);
  work_tile.decode_tile.sequence = load_number(map.member_sequence(work_tile.first_member));
  work_tile.decode_tile.kv_head = in_split / blocks;
  work_tile.decode_tile.cache_split = is_partial ? whole : nth / (p.attention.kv_heads * blocks);
  work_tile.first_row = in_split % blocks * kQueryTile;
  const int left = members * p.rows.per_sequence * p.blocks.ratio - work_tile.first_row;
  work_tile.rows = left < kQueryTile ? left : kQueryTile;
  const int split = p.splits.first + work_tile.decode_tile.cache_split * p.splits.stride;
  work_tile.decode_tile.lag = (split - work_tile.decode_tile.cache_split) * (kTilesPerKvSplit * C::kKeyTile);
  work_tile.decode_tile.begin = split * kTilesPerKvSplit;
  work_tile.decode_tile.end = work_tile.decode_tile.begin + (is_partial ? tiles % kTilesPerKvSplit : kTilesPerKvSplit);
  work_tile.decode_tile.seq_info.length = work_tile.decode_tile.end * C::kKeyTile;
  return work_tile;
}

}  // namespace ringattn::sm90
