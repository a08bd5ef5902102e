// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA, who writes it and who reads it. The words are explained in
// kernels/README.md.
//
//   Q      [q_stages][head_tiles][64 rows]     the producer writes it, the consumers read it; then a consumer puts
//   finished
//                                       rows there, from where the copy engine writes them to memory
//   K, V   [stages][key_tile rows]      the producer writes them, the consumers read them
//   head_tiles  [q_stages][head_tiles]              the scheduler writes what each head_tile is, the producer and the
//   consumers read it work   [q_stages]                     the scheduler writes what a q_stage's kv_loop is, the
//   producer reads it merged [head_tiles][64 rows]             a consumer's own: R and L of its rows' merged groups
//   (kernels/merge.hpp) barriers, and a few numbers that warps leave for each other
//
// A tile of [rows, dim] is cut into panels of 64 columns. In a panel a row is 128 bytes, with the 128-byte swizzle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/device/tile_lookup.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"
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

__device__ __forceinline__ float load_float(std::uint32_t address) {
  float number;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number) : "r"(address) : "memory");
  return number;
}
__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}
__device__ __forceinline__ void store_pair(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// The number of tiles of a q_stage behind which no other comes: there is no more work.
inline constexpr int kNoMoreWork = -1;

// A head_tile: 64 slots of one query head, which one warpgroup folds. Slots [valid_row_begin, valid_row_end) hold rows;
// the memory of the others belongs to somebody else.
struct HeadWorkTileInfo {
  std::int64_t row;         // where tile_row 0's row would be in q
  std::int64_t first;       // as in cuda::WorkTile
  std::int32_t kv_loop;     // tiles of the gqa_tile's kv_loop, or kNoMoreWork
  std::int32_t begin, end;  // the head_tile's own tiles are numbers [begin, end) of the kv_loop
  std::int32_t valid_row_begin, valid_row_end;
  std::int32_t query_head;
  std::int32_t run_begin, runs;  // as in cuda::WorkTile
  // The head_tile's first tile is number `origin` of the sequence. Keys are counted from the first one of that tile:
  // tile_row 0 sees keys [from, to), tile_row s the keys [from + s, to + s), and the sequence ends before key `length`.
  std::int32_t origin;
  std::int32_t from, to, length;
  // Most tiles take the plain steps alone: all rows see all of their keys, and they lie inside of a group. The others
  // are found by how many of the head_tile's tiles are left when one begins, itself included: those with more than
  // `head` left and those with at most `tail` left may have masked keys, and a group begins where `group`, `group` −
  // kTilesPerKvSplit, … are left.
  std::int32_t head, tail, group;
  std::int32_t padding[12];
};
static_assert(sizeof(HeadWorkTileInfo) == 128);
inline constexpr int kNoEdge = 1 << 30;  // farther than any key of the kv_loop, in either direction

// A HeadWorkTileInfo as consumers read it: from shared memory each time that they ask, since they have no registers to
// spare.
struct HeadWorkTile {
  std::uint32_t address;

  __device__ std::int64_t row() const { return load_wide(offsetof(HeadWorkTileInfo, row)); }
  __device__ int kv_loop() const { return load(offsetof(HeadWorkTileInfo, kv_loop)); }
  __device__ int begin() const { return load(offsetof(HeadWorkTileInfo, begin)); }
  __device__ int end() const { return load(offsetof(HeadWorkTileInfo, end)); }
  __device__ int valid_row_begin() const { return load(offsetof(HeadWorkTileInfo, valid_row_begin)); }
  __device__ int valid_row_end() const { return load(offsetof(HeadWorkTileInfo, valid_row_end)); }
  __device__ bool whole() const {
    return valid_row_begin() == 0 && valid_row_end() == kQueryTile;
  }  // every tile_row holds a row
  __device__ int query_head() const { return load(offsetof(HeadWorkTileInfo, query_head)); }
  __device__ int origin() const { return load(offsetof(HeadWorkTileInfo, origin)); }
  __device__ int from() const { return load(offsetof(HeadWorkTileInfo, from)); }
  __device__ int to() const { return load(offsetof(HeadWorkTileInfo, to)); }
  __device__ int length() const { return load(offsetof(HeadWorkTileInfo, length)); }
  // The number in its sequence of the tile that begins when `left` tiles are left.
  __device__ int number(const cuda::AttentionParams& p, int left) const {
    const int nth = end() - begin() - left;
    const int runs = load(offsetof(HeadWorkTileInfo, runs));
    if (runs == 1) return origin() + nth;
    const std::int64_t in_runs = load_wide(offsetof(HeadWorkTileInfo, first)) + nth;
    const cuda::RunEntry& run =
        cuda::find_run(p.tables.runs + load(offsetof(HeadWorkTileInfo, run_begin)), runs, in_runs);
    return static_cast<int>(run.first_tile + in_runs - run.first);
  }
  // Whether the tile that begins when `left` tiles are left may have keys that some row does not see.
  __device__ bool masked(int left) const {
    return left > load(offsetof(HeadWorkTileInfo, head)) || left <= load(offsetof(HeadWorkTileInfo, tail));
  }
  // Whether a group begins where `left` tiles are left.
  __device__ bool begins_split(int left) const {
    return ((left - load(offsetof(HeadWorkTileInfo, group))) & (kTilesPerKvSplit - 1)) == 0;
  }
  // How many tiles will be left when the next one begins that takes more than the plain steps; `left` are left now.
  __device__ int stop(int left) const {
    if (left > load(offsetof(HeadWorkTileInfo, head))) return left;
    const int tail = load(offsetof(HeadWorkTileInfo, tail));
    const int group = load(offsetof(HeadWorkTileInfo, group));
    const int begins = left - ((left - group) & (kTilesPerKvSplit - 1));
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

// A q_stage's gqa_tile: its kv_loop, and how many of its head_tiles this CTA folds.
struct GqaPackedTileInfo {
  std::int64_t first, first_tile, table;  // as in cuda::GqaPackedTile
  std::int64_t key_length;                // of the sequence
  std::int32_t tiles;                     // of the kv_loop, or kNoMoreWork
  std::int32_t run_begin, runs;           // as in cuda::GqaPackedTile
  std::int32_t kv_head;
  std::int32_t head_tiles;
  std::int32_t padding;
};

template <class C>
struct SharedMap {
  // Barriers of which there is one. Those of q_stages and stages come before them.
  enum Single : int {
    kTailLanded,
    kTailRequested,
    kTailDone,
    kPaceRequested,
    kPaceFree,
    kWorkRequested,
    kNumberSent,
    kNumberRead,
    kSingles
  };

  static constexpr int kQPanel = cuda::panel_bytes(kQueryTile);
  static constexpr int kTilePanel = cuda::panel_bytes(C::kKeyTile);
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = C::kQStages * C::kHeadTiles * C::kQBytes;
  static constexpr int kVOffset = kKOffset + C::kStages * C::kKBytes;
  static constexpr int kWorkTileOffset = kVOffset + C::kStages * C::kVBytes;
  static constexpr int kWorkInfoOffset =
      kWorkTileOffset + C::kQStages * C::kHeadTiles * static_cast<int>(sizeof(HeadWorkTileInfo));
  static constexpr int kBarrierOffset = kWorkInfoOffset + C::kQStages * static_cast<int>(sizeof(GqaPackedTileInfo));
  static constexpr int kNumberOffset = kBarrierOffset + (3 * C::kQStages + 4 * C::kStages + kSingles) * kBarrierBytes;
  static constexpr int kMergedStatsOffset = kNumberOffset + 32;
  static constexpr int kBytes = kMergedStatsOffset + C::kHeadTiles * kQueryTile * 8;
  static_assert(kWorkTileOffset % 1024 == 0 && kBarrierOffset % kBarrierBytes == 0 && kBytes <= 232448);

  // Where it all begins in the shared window: behind what the device keeps for itself (config.hpp). A constant
  // costs no register. Where CTAs kv_loop side by side, an address also says whose memory it is, because copies and
  // arrivals reach the other CTA's too.
  static __device__ std::uint32_t base() {
    if constexpr (C::kClusterCtas > 1) return in_cta(kReservedBytes, rank_in_cluster());
    return kReservedBytes;
  }

  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
  __device__ std::uint32_t q(std::uint32_t q_stage, int head_tile) const {
    return at(kQOffset, q_stage * C::kHeadTiles + static_cast<std::uint32_t>(head_tile), C::kQBytes);
  }
  __device__ HeadWorkTile head_tile(std::uint32_t q_stage, int head_tile) const {
    return {
        at(kWorkTileOffset, q_stage * C::kHeadTiles + static_cast<std::uint32_t>(head_tile), sizeof(HeadWorkTileInfo))};
  }
  // Q of a head_tile, worked out from the address of its HeadWorkTileInfo, so that consumers keep one address and not
  // two.
  __device__ std::uint32_t q(const HeadWorkTile& head_tile) const {
    static_assert(C::kQBytes % sizeof(HeadWorkTileInfo) == 0);
    return at(kQOffset, head_tile.address - (base() + kWorkTileOffset), C::kQBytes / sizeof(HeadWorkTileInfo));
  }
  // R and L of a row's merged groups, two floats.
  __device__ std::uint32_t merged(int warpgroup, int tile_row) const {
    return at(kMergedStatsOffset, static_cast<std::uint32_t>((warpgroup - 1) * kQueryTile + tile_row), 8);
  }
  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }

  // Barriers of a q_stage: the scheduler has written its work; its Q has arrived; everyone is done with both.
  __device__ std::uint32_t work_full(std::uint32_t q_stage) const { return at(kBarrierOffset, q_stage, kBarrierBytes); }
  __device__ std::uint32_t q_full(std::uint32_t q_stage) const { return work_full(C::kQStages + q_stage); }
  __device__ std::uint32_t q_empty(std::uint32_t q_stage) const { return work_full(2 * C::kQStages + q_stage); }
  // Barriers of a stage: its K has arrived; its V has; every consumer is done with its K; and with its V. The last two
  // are one barrier unless K is given back before V (C::kKeysAhead).
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return work_full(3 * C::kQStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return work_full(3 * C::kQStages + C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const {
    return work_full(3 * C::kQStages + 2 * C::kStages + stage);
  }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const {
    return C::kKeysAhead ? work_full(3 * C::kQStages + 3 * C::kStages + kSingles + stage) : k_empty(stage);
  }
  // A V tile that reaches past its sequence's end has arrived; the tail warp has been told of it, with its stage and
  // how many keys it has; the tail warp is done with it. Side by side the last one waits for both CTAs' tail warps,
  // since the next such tile arrives in halves at both.
  __device__ std::uint32_t tail_landed() const { return single(kTailLanded); }
  __device__ std::uint32_t tail_requested() const { return single(kTailRequested); }
  __device__ std::uint32_t tail_done() const { return single(kTailDone); }
  __device__ std::uint32_t tail_stage() const { return base() + kNumberOffset; }
  __device__ std::uint32_t tail_keys() const { return base() + kNumberOffset + 4; }
  // The pace warp has been told how many tiles come next; it lets the producer fetch them.
  __device__ std::uint32_t pace_requested() const { return single(kPaceRequested); }
  __device__ std::uint32_t pace_free() const { return single(kPaceFree); }
  __device__ std::uint32_t pace_tiles() const { return base() + kNumberOffset + 8; }
  // A q_stage comes to its end, so the scheduler may take the next one.
  __device__ std::uint32_t work_requested() const { return single(kWorkRequested); }
  // Side by side: the first CTA has sent the number of what both fold next; the other one has read it.
  __device__ std::uint32_t number_sent() const { return single(kNumberSent); }
  __device__ std::uint32_t number_read() const { return single(kNumberRead); }
  __device__ std::uint32_t number() const { return base() + kNumberOffset + 16; }

 private:
  __device__ std::uint32_t single(Single which) const { return work_full(3 * C::kQStages + 3 * C::kStages + which); }
};

// Generic addresses of the same memory, for plain data.
template <class C>
__device__ __forceinline__ GqaPackedTileInfo* work_info_of(unsigned char* shared, std::uint32_t q_stage) {
  return reinterpret_cast<GqaPackedTileInfo*>(shared + SharedMap<C>::kWorkInfoOffset) + q_stage;
}
template <class C>
__device__ __forceinline__ HeadWorkTileInfo* head_tile_infos(unsigned char* shared, std::uint32_t q_stage) {
  return reinterpret_cast<HeadWorkTileInfo*>(shared + SharedMap<C>::kWorkTileOffset) + q_stage * C::kHeadTiles;
}

}  // namespace ringattn::sm90
