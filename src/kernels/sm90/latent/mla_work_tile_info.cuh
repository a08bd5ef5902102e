// SPDX-License-Identifier: Apache-2.0
// What the fetching warp of a CTA that shares work_tiles with others has found out about a work_tile, for the CTA's
// other warps, and how these go from work_tile to work_tile.
#pragma once

#include "kernels/sm90/decode/work_tiles.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// Which of two copies the n-th of something uses, and the parity of its turn.
struct MlaPipelineState {
  std::uint32_t index, parity;

  static __device__ __forceinline__ MlaPipelineState of(std::uint32_t n) { return {n & 1U, n >> 1 & 1U}; }
};

// Numbers of 4 bytes.
struct MlaWorkTileInfo {
  // A info of which `begin` is kNoMore says that there are no more work_tiles.
  static constexpr int kNoMore = -1;
  static constexpr int kBytes = 48;

  std::uint32_t address;

  __device__ __forceinline__ void write(const DecodeWorkTile& work_tile) const {
    put(0, work_tile.begin);
    put(1, work_tile.end);
    put(2, work_tile.of.length);
    put(3, work_tile.of.position);
    put(4, work_tile.of.splits);
    put(5, work_tile.sequence);
    put(6, work_tile.kv_head);
    put(7, work_tile.block);
    put(8, work_tile.cache_split);
    put(9, work_tile.lag);
  }
  __device__ __forceinline__ void write_end() const { put(0, kNoMore); }
  // All that those need who attention, fetch or dequantize it.
  __device__ __forceinline__ DecodeWorkTile read() const {
    DecodeWorkTile work_tile{};
    work_tile.begin = get(0);
    work_tile.end = get(1);
    work_tile.of.length = get(2);
    work_tile.of.position = get(3);
    work_tile.of.splits = get(4);
    work_tile.sequence = get(5);
    work_tile.kv_head = get(6);
    work_tile.block = get(7);
    work_tile.cache_split = get(8);
    work_tile.lag = get(9);
    return work_tile;
  }

 private:
  __device__ __forceinline__ void put(int field, int number) const {
    store_number(address + static_cast<std::uint32_t>(4 * field), number);
  }
  __device__ __forceinline__ int get(int field) const {
    return load_number(address + static_cast<std::uint32_t>(4 * field));
  }
};

// By a warp: goes through the work_tiles that the fetching warp tells of.
template <class Map, class Worker>
__device__ __forceinline__ void for_each_work_tile(const Map& map, Worker& worker) {
#pragma unroll 1
  for (std::uint32_t n = 0;; ++n) {
    const MlaPipelineState turn = MlaPipelineState::of(n);
    barrier_wait(map.info_full(turn.index), turn.parity);
    const DecodeWorkTile work_tile = map.info(turn.index).read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(turn.index));
    if (work_tile.begin == MlaWorkTileInfo::kNoMore) break;
    worker.take(work_tile);
  }
}

// The fetching warp's side.
template <class Map>
class WorkTileInfoWriter {
 public:
  __device__ __forceinline__ explicit WorkTileInfoWriter(const Map& map) : map_(map) {}

  // Whether none has been written.
  __device__ __forceinline__ bool none() const { return infos_ == 0; }
  // Until the next one has a index.
  __device__ __forceinline__ void await() const {
    const MlaPipelineState turn = MlaPipelineState::of(infos_);
    barrier_wait(map_.info_empty(turn.index), turn.parity ^ 1U);
  }
  __device__ __forceinline__ void send(const DecodeWorkTile& work_tile) {
    if (thread_of_cta() % 32 == 0) info().write(work_tile);
    send();
  }
  __device__ __forceinline__ void send_end() {
    await();
    if (thread_of_cta() % 32 == 0) info().write_end();
    send();
  }

 private:
  __device__ __forceinline__ MlaWorkTileInfo info() const { return map_.info(MlaPipelineState::of(infos_).index); }
  __device__ __forceinline__ void send() {
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.info_full(MlaPipelineState::of(infos_).index));
    ++infos_;
  }

  const Map& map_;
  std::uint32_t infos_ = 0;
};

}  // namespace ringattn::sm90
