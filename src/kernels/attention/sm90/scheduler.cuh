// SPDX-License-Identifier: Apache-2.0
// Shared memory, work tiles and pace of sm90_attention: where stages and barriers lie, which tile a CTA computes next,
// and how CTAs that share K and V stay together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/tile_lookup.cuh"
#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/attention/visibility.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"

namespace ringattn::sm90 {

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

// The tile scheduler: one warp of each CTA, which decides what the CTA computes next and tells the other warps through
// the Q stage in shared memory.
//
// CTAs are persistent and scheduling is dynamic: all CTAs fetch work from one atomic counter in global memory. Each
// fetches as late as it can, because fetched work can't go to another CTA that is free sooner. In a CTA pair the first
// CTA fetches, and sends the index to its peer.

// The next work is fetched when the producer loads the tile that has kTilesAhead tiles after it in this Q stage. That
// is early enough for the next Q stage's tables and Q to arrive in time. After a Q stage with no more tiles than that,
// the scheduler fetches the next work at once, without waiting for the producer.
inline constexpr int kTilesAhead = 4;

// Index of the tile at which the producer asks the scheduler for the next work, in a Q stage of `tiles` tiles.
// kNeverRequested if it doesn't ask: the Q stage is short, or the peer CTA fetches.
inline constexpr int kNeverRequested = -1;
template <class C>
__device__ __forceinline__ int requested_at(int tiles) {
  const bool fetches = C::kClusterCtas == 1 || rank_in_cluster() == 0;
  return fetches && tiles > kTilesAhead ? tiles - kTilesAhead - 1 : kNeverRequested;
}

// Writes which keys the rows see, which tiles may be masked, and where KV splits begin. Tiles are in ascending order,
// so the masked tiles are the first and the last ones. If the tiles are in several runs, the host has counted the
// masked ones.
template <class C>
__device__ __forceinline__ void set_edges(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile,
                                          HeadWorkTileInfo& head_tile) {
  const int tiles = work_tile.tiles;
  const std::int64_t first = work_tile.first_tile;
  const std::int64_t origin = first * C::kKeyTile;
  // A key relative to the first tile's first key, limited to ±kNoEdge.
  const auto edge = [&](std::int64_t key) {
    const std::int64_t from_origin = key - origin;
    return static_cast<int>(from_origin < -kNoEdge ? -kNoEdge : from_origin > kNoEdge ? kNoEdge : from_origin);
  };
  const Visibility visibility(p.mask, work_tile.key_length);
  const KeyRange visible = visibility.mask_range(work_tile.position);
  head_tile.origin = static_cast<int>(first);
  head_tile.from = edge(visible.begin);
  head_tile.to = edge(visible.end);
  head_tile.length = edge(work_tile.key_length);

  const auto tiles_before = [](int key) { return key < 0 ? 0 : key / C::kKeyTile; };
  const KeyRange common = visibility.common_keys(work_tile.position, work_tile.position + kQueryTile - 1);
  const bool one_run = work_tile.runs == 1;
  const int unmasked_begin = one_run ? tiles_before(edge(common.begin) + C::kKeyTile - 1) : work_tile.unmasked_begin;
  const int unmasked_end = one_run ? tiles_before(edge(common.end)) : work_tile.unmasked_end;
  head_tile.head = tiles - (unmasked_begin < tiles ? unmasked_begin : tiles);
  head_tile.tail = tiles - (unmasked_end < tiles ? unmasked_end : tiles);
  head_tile.split_begin = (work_tile.split_position + tiles) % kTilesPerKvSplit;
  if (p.state.save && head_tile.split_begin == 0 && head_tile.tail == 0)
    head_tile.tail = 1;  // in the last tile, the consumer then checks whether the split is complete
}

// Fetches work indices from the counter. Work index n stands for the scheduler entry and KV head that
// cuda::work_index(…, n) returns. Whole warps call its functions.
template <class C>
class Counter {
 public:
  __device__ __forceinline__ Counter(const cuda::AttentionParams& p, const SharedMap<C>& map)
      : p_(p), map_(map), rank_(C::kClusterCtas > 1 ? rank_in_cluster() : 0) {}

  __device__ __forceinline__ std::uint32_t rank() const { return rank_; }
  // Number of work indices.
  __device__ __forceinline__ int work() const { return p_.tables.gqa_tile_count * p_.schedule.entry_heads; }

  // A CTA's first work index. next() continues after those of all CTAs.
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x) / C::kClusterCtas; }
  // The next work index. There is no more work if it is work() or more.
  __device__ __forceinline__ int next() {
    const bool leads = threadIdx.x % 32 == 0;
    int number = 0;
    if (leads) number = rank_ > 0 ? receive() : fetch_and_send();
    number = __shfl_sync(0xffffffffU, number, 0);
    // The first CTA may overwrite the index as soon as it counts as read. An arrival may overtake a load that has only
    // been issued. So the lane that has loaded the index arrives, after using it, and with release semantics at cluster
    // scope.
    if (rank_ > 0 && leads) barrier_release_at(map_to_cta(map_.number_read(), 0));
    return number;
  }

 private:
  // One lane calls each of these.
  __device__ __forceinline__ int fetch_and_send() {
    int number = atomicAdd(p_.schedule.taken, 1);
    // A CTA's first work is not fetched from the counter, but each CTA fetches once more at the end, when there is no
    // work left. So there are as many fetches as work indices, and the CTA with the last one resets the counter for the
    // next task with these tables.
    if (number == work() - 1) atomicExch(p_.schedule.taken, 0);
    number += static_cast<int>(gridDim.x) / C::kClusterCtas;
    if constexpr (C::kClusterCtas > 1) send(number);
    return number;
  }
  __device__ __forceinline__ void send(int number) {
    barrier_acquire(map_.number_read(), parity_ ^ 1U);
    parity_ ^= 1U;
    dsmem_store_async(map_to_cta(map_.number(), 1), map_to_cta(map_.number_sent(), 1), number);
  }
  __device__ __forceinline__ int receive() {
    barrier_arrive_expect(map_.number_sent(), sizeof(int));
    barrier_acquire(map_.number_sent(), parity_);
    parity_ ^= 1U;
    return load_number(map_.number());
  }

  const cuda::AttentionParams& p_;
  const SharedMap<C>& map_;
  std::uint32_t rank_;
  std::uint32_t parity_ = 0;
};

// Main loop of the scheduler warp: writes the KV loop and the head work tiles of each Q stage until there is no more
// work.
template <class C>
__device__ __forceinline__ void schedule(const cuda::AttentionParams& p, const SharedMap<C>& map,
                                         unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int heads_per_gqa_tile = p.schedule.heads_per_gqa_tile;
  Counter<C> counter(p, map);
  const int first_head_tile = static_cast<int>(counter.rank()) * C::kHeadTiles;
  PackedPipelineState<C::kQStages> cursor;
  int tiles = 0;                     // tiles of the previous Q stage
  std::uint32_t request_parity = 0;  // parity of work_requested()
  for (int q_stage = 0;; ++q_stage, cursor.advance()) {
    if (requested_at<C>(tiles) != kNeverRequested) {
      barrier_wait(map.work_requested(), request_parity);
      request_parity ^= 1U;
    }
    const int index = q_stage == 0 ? counter.first() : counter.next();
    // The tables are read before the wait for an empty Q stage, because in short Q stages nothing else hides their
    // latency.
    const bool any = index < counter.work();
    HeadWorkTileInfo head_tile{};
    GqaPackedTileInfo work{};
    head_tile.kv_loop = work.tiles = kNoMoreWork;
    if (any) {
      const cuda::WorkIndex work_index =
          cuda::work_index(p.schedule.early_entries, p.schedule.entry_heads, p.schedule.swizzle_heads, index);
      const cuda::GqaPackedTile& gqa_tile = p.tables.gqa_tiles[work_index.entry];
      const int query_head = p.tables.work_tiles[gqa_tile.work_tile].head + work_index.head * heads_per_gqa_tile;
      tiles = gqa_tile.tiles;
      head_tile.kv_loop = gqa_tile.tiles;
      if (lane < C::kHeadTiles && first_head_tile + lane < gqa_tile.head_tiles) {
        const int nth = gqa_tile.head + first_head_tile + lane;
        const cuda::WorkTile& work_tile = p.tables.work_tiles[gqa_tile.work_tile + nth / heads_per_gqa_tile];
        head_tile.row = work_tile.row;
        head_tile.first = work_tile.first;
        head_tile.run_begin = work_tile.run_begin;
        head_tile.runs = work_tile.runs;
        head_tile.valid_row_begin = work_tile.valid_row_begin;
        head_tile.valid_row_end = work_tile.valid_row_end;
        head_tile.query_head = query_head + nth % heads_per_gqa_tile;
        if (work_tile.tiles > 0) {
          head_tile.begin = static_cast<int>(work_tile.first - gqa_tile.first);
          head_tile.end = head_tile.begin + work_tile.tiles;
          set_edges<C>(p, work_tile, head_tile);
        }
      }
      work.first = gqa_tile.first;
      work.first_tile = gqa_tile.first_tile;
      work.table = gqa_tile.table;
      work.key_length = p.tables.work_tiles[gqa_tile.work_tile].key_length;
      work.run_begin = gqa_tile.run_begin;
      work.runs = gqa_tile.runs;
      work.kv_head = query_head / (p.heads / p.kv_heads);
      const int own = gqa_tile.head_tiles - first_head_tile;
      work.head_tiles = own < 0 ? 0 : own < C::kHeadTiles ? own : C::kHeadTiles;
      work.tiles = gqa_tile.tiles;
    }
    if (q_stage >= C::kQStages) barrier_wait(map.q_empty(cursor.stage()), cursor.parity() ^ 1U);
    if (lane < C::kHeadTiles) head_tile_infos<C>(shared, cursor.stage())[lane] = head_tile;
    if (lane == 0) *work_info_of<C>(shared, cursor.stage()) = work;
    barrier_arrive(map.work_full(cursor.stage()));
    if (!any) return;
  }
}

// The pace warp keeps CTAs close together in their KV loops. CTAs that attend to the same KV head read the same keys.
// While they do so at about the same time, a tile is read from HBM once and hits in L2 for the others. Without pacing
// the CTAs drift apart in a long KV loop, and the extra HBM reads take power that the tensor cores could use
// (bench/notes/attention-experiments.md). Pacing changes no result: a CTA that has waited kPaceTries times for another
// stops pacing.

inline constexpr int kPaceTiles = 256;                   // how many tiles a CTA may be ahead of the slowest
inline constexpr int kPaceReads = (kMaxCtas + 31) / 32;  // CTAs that each lane polls
inline constexpr int kPaceTries = 2000;                  // polls of the slowest CTA
inline constexpr unsigned kPaceNanoseconds = 1000;       // between polls

// Progress of this CTA and of the others, in tiles. Whole warps call it.
class Pace {
 public:
  __device__ __forceinline__ explicit Pace(const cuda::AttentionParams& p) : progress_(p.schedule.tiles_done) {
    poll();
    const int min_done = min_of_all();
    done_ = min_done == kRetired ? 1 : min_done;
    publish(done_);
  }
  // Returns when the CTA may load its next `tiles` tiles.
  __device__ __forceinline__ void wait_for_slowest(int tiles) {
    if (!keeps_pace_) return;
    done_ += tiles;
    publish(done_);
    for (int i = 0; done_ - min_of_all() > kPaceTiles; ++i) {
      if (i == kPaceTries) {
        retire();
        keeps_pace_ = false;
        return;
      }
      __nanosleep(kPaceNanoseconds);
      poll();
    }
    poll();  // these loads return while the tiles are being fetched; the next call uses them
  }
  // Other CTAs no longer wait for this one.
  __device__ __forceinline__ void retire() {
    if (keeps_pace_) publish(kRetired);
  }

 private:
  static constexpr int kRetired = 0x7FFFFFFF;  // progress of a CTA that no longer takes part

  __device__ __forceinline__ void publish(int done) const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(progress_ + blockIdx.x), "r"(done) : "memory");
    }
  }
  __device__ __forceinline__ void poll() {
#pragma unroll
    for (unsigned i = 0; i < kPaceReads; ++i) {
      const unsigned cta = threadIdx.x % 32 + 32 * i;
      seen_[i] = 0;
      if (cta < gridDim.x) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen_[i]) : "l"(progress_ + cta) : "memory");
      }
    }
  }
  // Progress of the slowest CTA that has started and still takes part; kRetired if there is none.
  __device__ __forceinline__ int min_of_all() const {
    int min_done = kRetired;
#pragma unroll
    for (int i = 0; i < kPaceReads; ++i) min_done = seen_[i] > 0 && seen_[i] < min_done ? seen_[i] : min_done;
    return __reduce_min_sync(0xffffffffU, min_done);
  }

  std::int32_t* progress_;  // [CTAs]: tiles that each CTA has started, at least 1 from its start on; 0: not started
  bool keeps_pace_ = true;
  int done_ = 0;
  int seen_[kPaceReads] = {};
};

// Main loop of the pace warp: the producer posts how many tiles it will load and waits until it may.
template <class C>
__device__ __forceinline__ void keep_pace(const cuda::AttentionParams& p, const SharedMap<C>& map) {
  Pace pace(p);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    barrier_wait(map.pace_requested(), parity);
    const int tiles = load_number(map.pace_tiles());
    if (tiles == kNoMoreWork) break;
    pace.wait_for_slowest(tiles);
    barrier_arrive(map.pace_free());
  }
  pace.retire();
}

}  // namespace ringattn::sm90
