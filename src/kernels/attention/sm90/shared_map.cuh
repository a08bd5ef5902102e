// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA: layout, writers and readers.
//
//   Q          [q_stages][head_tiles][64 rows]   written by the producer, read by the consumers; then a consumer
//                                                stages its finished rows there for the TMA store
//   K, V       [stages][key_tile rows]           written by the producer, read by the consumers
//   head_tiles [q_stages][head_tiles]            HeadWorkTileInfo: written by the scheduler, read by producer and
//                                                consumers
//   work       [q_stages]                        GqaPackedTileInfo: written by the scheduler, read by the producer
//   barriers, and a few integers that warps post to each other
//   merged     [head_tiles][64 rows]             a consumer's own: softmax_offset and sum of its rows' merged splits
//                                                (kernels/attention/merge.hpp)
//
// A tile of [rows, dim] is cut into panels of 64 columns. A row of a panel is 128 bytes, with the 128-byte swizzle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/cuda/tile_lookup.cuh"
#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"

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

// Instead of a tile count: there is no more work.
inline constexpr int kNoMoreWork = -1;

// A head work tile: a query tile of 64 rows of one query head, which one warpgroup computes. The task has the rows
// [valid_row_begin, valid_row_end) of the tile. The memory of the other rows is not the task's.
struct HeadWorkTileInfo {
  std::int64_t row;         // index in q of tile row 0
  std::int64_t first;       // as in cuda::WorkTile
  std::int32_t kv_loop;     // tiles of the GQA-packed tile's KV loop, or kNoMoreWork
  std::int32_t begin, end;  // this head work tile attends to tiles [begin, end) of the KV loop
  std::int32_t valid_row_begin, valid_row_end;
  std::int32_t query_head;
  std::int32_t run_begin, runs;  // as in cuda::WorkTile
  // `origin` is the head work tile's first key tile, counted in the sequence. Keys count from the first key of that
  // tile: tile row 0 sees keys [from, to), tile row s sees [from + s, to + s), and the sequence ends before key
  // `length`.
  std::int32_t origin;
  std::int32_t from, to, length;
  // Most tiles are plain: all rows see all of their keys, and no KV split begins or ends there. The others are
  // identified by how many of the head work tile's tiles are left, the current one included. A tile may have masked
  // keys if more than `head` or at most `tail` are left. A KV split begins where `split_begin`, `split_begin` −
  // kTilesPerKvSplit, … are left.
  std::int32_t head, tail, split_begin;
  std::int32_t padding[12];
};
static_assert(sizeof(HeadWorkTileInfo) == 128);
inline constexpr int kNoEdge = 1 << 30;  // farther than any key of the KV loop, in either direction

// Accessors of a HeadWorkTileInfo in shared memory. Consumers load a field each time, since they have no registers to
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
    // all rows of the tile are valid
  }
  __device__ int query_head() const { return load(offsetof(HeadWorkTileInfo, query_head)); }
  __device__ int origin() const { return load(offsetof(HeadWorkTileInfo, origin)); }
  __device__ int from() const { return load(offsetof(HeadWorkTileInfo, from)); }
  __device__ int to() const { return load(offsetof(HeadWorkTileInfo, to)); }
  __device__ int length() const { return load(offsetof(HeadWorkTileInfo, length)); }
  // The key tile, counted in its sequence, that starts when `left` tiles are left.
  __device__ int number(const cuda::AttentionParams& p, int left) const {
    const int nth = end() - begin() - left;
    const int runs = load(offsetof(HeadWorkTileInfo, runs));
    if (runs == 1) return origin() + nth;
    const std::int64_t in_runs = load_wide(offsetof(HeadWorkTileInfo, first)) + nth;
    const cuda::RunEntry& run =
        cuda::find_run(p.tables.runs + load(offsetof(HeadWorkTileInfo, run_begin)), runs, in_runs);
    return static_cast<int>(run.first_tile + in_runs - run.first);
  }
  // Whether the tile that starts when `left` tiles are left may have keys that some row does not see.
  __device__ bool masked(int left) const {
    return left > load(offsetof(HeadWorkTileInfo, head)) || left <= load(offsetof(HeadWorkTileInfo, tail));
  }
  // Whether a KV split begins where `left` tiles are left.
  __device__ bool begins_split(int left) const {
    return ((left - load(offsetof(HeadWorkTileInfo, split_begin))) & (kTilesPerKvSplit - 1)) == 0;
  }
  // How many tiles are left when the next tile starts that is not plain. `left` are left now.
  __device__ int stop(int left) const {
    if (left > load(offsetof(HeadWorkTileInfo, head))) return left;
    const int tail = load(offsetof(HeadWorkTileInfo, tail));
    const int split_begin = load(offsetof(HeadWorkTileInfo, split_begin));
    const int begins = left - ((left - split_begin) & (kTilesPerKvSplit - 1));
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

// The GQA-packed tile of a Q stage: its KV loop, and how many of its head work tiles this CTA computes.
struct GqaPackedTileInfo {
  std::int64_t first, first_tile, table;  // as in cuda::GqaPackedTile
  std::int64_t key_length;                // keys of the sequence
  std::int32_t tiles;                     // tiles of the KV loop, or kNoMoreWork
  std::int32_t run_begin, runs;           // as in cuda::GqaPackedTile
  std::int32_t kv_head;
  std::int32_t head_tiles;
  std::int32_t padding;
};

template <class C>
struct SharedMap {
  // Barriers that exist once. Those of Q stages and K/V stages come before them.
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

  // Start of the map in the shared window: after the bytes that the device reserves (config.hpp). A constant costs no
  // register. In a cluster an address also names the CTA, because copies and arrivals reach the peer CTA too.
  static __device__ std::uint32_t base() {
    if constexpr (C::kClusterCtas > 1) return map_to_cta(kReservedBytes, rank_in_cluster());
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
  // Q of a head work tile, derived from the address of its HeadWorkTileInfo, so that consumers keep one address instead
  // of two.
  __device__ std::uint32_t q(const HeadWorkTile& head_tile) const {
    static_assert(C::kQBytes % sizeof(HeadWorkTileInfo) == 0);
    return at(kQOffset, head_tile.address - (base() + kWorkTileOffset), C::kQBytes / sizeof(HeadWorkTileInfo));
  }
  // softmax_offset and sum of a row's merged splits, two floats.
  __device__ std::uint32_t merged(int warpgroup, int tile_row) const {
    return at(kMergedStatsOffset, static_cast<std::uint32_t>((warpgroup - 1) * kQueryTile + tile_row), 8);
  }
  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }

  // Barriers of a Q stage: work_full (the scheduler has written its work), q_full (Q has landed), and q_empty (all
  // readers have released both).
  __device__ std::uint32_t work_full(std::uint32_t q_stage) const { return at(kBarrierOffset, q_stage, kBarrierBytes); }
  __device__ std::uint32_t q_full(std::uint32_t q_stage) const { return work_full(C::kQStages + q_stage); }
  __device__ std::uint32_t q_empty(std::uint32_t q_stage) const { return work_full(2 * C::kQStages + q_stage); }
  // Barriers of a K/V stage: k_full, v_full, and k_empty, v_empty (released by every consumer). k_empty and v_empty are
  // one barrier unless K is released before V (C::kKeysAhead).
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return work_full(3 * C::kQStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return work_full(3 * C::kQStages + C::kStages + stage); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const {
    return work_full(3 * C::kQStages + 2 * C::kStages + stage);
  }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const {
    return C::kKeysAhead ? work_full(3 * C::kQStages + 3 * C::kStages + kSingles + stage) : k_empty(stage);
  }
  // For a V tile that extends past the end of its sequence: it has landed; its stage and number of keys have been
  // posted to the tail warp; the tail warp has finished it. In a CTA pair tail_done waits for both tail warps, since
  // each CTA loads half of the next such tile for both.
  __device__ std::uint32_t tail_landed() const { return single(kTailLanded); }
  __device__ std::uint32_t tail_requested() const { return single(kTailRequested); }
  __device__ std::uint32_t tail_done() const { return single(kTailDone); }
  __device__ std::uint32_t tail_stage() const { return base() + kNumberOffset; }
  __device__ std::uint32_t tail_keys() const { return base() + kNumberOffset + 4; }
  // The number of next tiles has been posted to the pace warp; it lets the producer load them.
  __device__ std::uint32_t pace_requested() const { return single(kPaceRequested); }
  __device__ std::uint32_t pace_free() const { return single(kPaceFree); }
  __device__ std::uint32_t pace_tiles() const { return base() + kNumberOffset + 8; }
  // A Q stage is near its end, so the scheduler may fetch the next work.
  __device__ std::uint32_t work_requested() const { return single(kWorkRequested); }
  // CTA pair: the first CTA has sent the index of the next work; the peer CTA has read it.
  __device__ std::uint32_t number_sent() const { return single(kNumberSent); }
  __device__ std::uint32_t number_read() const { return single(kNumberRead); }
  __device__ std::uint32_t number() const { return base() + kNumberOffset + 16; }

 private:
  __device__ std::uint32_t single(Single which) const { return work_full(3 * C::kQStages + 3 * C::kStages + which); }
};

// Generic addresses of the same memory, for plain C++ access.
template <class C>
__device__ __forceinline__ GqaPackedTileInfo* work_info_of(unsigned char* shared, std::uint32_t q_stage) {
  return reinterpret_cast<GqaPackedTileInfo*>(shared + SharedMap<C>::kWorkInfoOffset) + q_stage;
}
template <class C>
__device__ __forceinline__ HeadWorkTileInfo* head_tile_infos(unsigned char* shared, std::uint32_t q_stage) {
  return reinterpret_cast<HeadWorkTileInfo*>(shared + SharedMap<C>::kWorkTileOffset) + q_stage * C::kHeadTiles;
}

}  // namespace ringattn::sm90
