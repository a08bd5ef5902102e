// SPDX-License-Identifier: Apache-2.0
// Work descriptors in shared memory. In CTA pairs and CTA groups, the producer warp finds the work tiles and passes
// each one to the other warps of its CTA through a double-buffered MlaWorkTileInfo.
#pragma once

#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/decode/sm90/work_tiles.cuh"

namespace ringattn::sm90 {

// Stage and parity of the n-th use of a pipeline with two stages.
struct MlaPipelineState {
  std::uint32_t index, parity;

  static __device__ __forceinline__ MlaPipelineState of(std::uint32_t n) { return {n & 1U, n >> 1 & 1U}; }
};

// Ten int32 fields at `address` in shared memory.
struct MlaWorkTileInfo {
  // Value of `begin` that marks the end of the work tiles.
  static constexpr int kNoMore = -1;
  static constexpr int kBytes = 48;

  std::uint32_t address;

  __device__ __forceinline__ void write(const DecodeWorkTile& work_tile) const {
    set(0, work_tile.begin);
    set(1, work_tile.end);
    set(2, work_tile.seq_info.length);
    set(3, work_tile.seq_info.position);
    set(4, work_tile.seq_info.splits);
    set(5, work_tile.sequence);
    set(6, work_tile.kv_head);
    set(7, work_tile.block);
    set(8, work_tile.cache_split);
    set(9, work_tile.lag);
  }
  __device__ __forceinline__ void write_end() const { set(0, kNoMore); }
  // The fields that computing, loading and dequantizing warps need.
  __device__ __forceinline__ DecodeWorkTile read() const {
    DecodeWorkTile work_tile{};
    work_tile.begin = get(0);
    work_tile.end = get(1);
    work_tile.seq_info.length = get(2);
    work_tile.seq_info.position = get(3);
    work_tile.seq_info.splits = get(4);
    work_tile.sequence = get(5);
    work_tile.kv_head = get(6);
    work_tile.block = get(7);
    work_tile.cache_split = get(8);
    work_tile.lag = get(9);
    return work_tile;
  }

 private:
  __device__ __forceinline__ void set(int field, int number) const {
    store_number(address + static_cast<std::uint32_t>(4 * field), number);
  }
  __device__ __forceinline__ int get(int field) const {
    return load_number(address + static_cast<std::uint32_t>(4 * field));
  }
};

// Consumer side, by one warp: calls worker.process() for each work tile that the producer warp writes.
template <class Map, class Worker>
__device__ __forceinline__ void for_each_work_tile(const Map& map, Worker& worker) {
#pragma unroll 1
  for (std::uint32_t n = 0;; ++n) {
    const MlaPipelineState state = MlaPipelineState::of(n);
    barrier_wait(map.info_full(state.index), state.parity);
    const DecodeWorkTile work_tile = map.info(state.index).read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.info_empty(state.index));
    if (work_tile.begin == MlaWorkTileInfo::kNoMore) break;
    worker.process(work_tile);
  }
}

// Producer side, by one warp.
template <class Map>
class WorkTileInfoWriter {
 public:
  __device__ __forceinline__ explicit WorkTileInfoWriter(const Map& map) : map_(map) {}

  // True if no work tile has been written.
  __device__ __forceinline__ bool none() const { return infos_ == 0; }
  // Waits until the next stage is empty.
  __device__ __forceinline__ void await() const {
    const MlaPipelineState state = MlaPipelineState::of(infos_);
    barrier_wait(map_.info_empty(state.index), state.parity ^ 1U);
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
