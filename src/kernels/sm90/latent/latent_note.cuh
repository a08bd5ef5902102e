// SPDX-License-Identifier: Apache-2.0
// What the fetching warp of a CTA that shares units with others has found out about a unit, for the CTA's other warps,
// and how these go from unit to unit.
#pragma once

#include "kernels/sm90/decode/units.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// Which of two copies the n-th of something uses, and the parity of its turn.
struct LatentTurn {
  std::uint32_t place, parity;

  static __device__ __forceinline__ LatentTurn of(std::uint32_t n) { return {n & 1U, n >> 1 & 1U}; }
};

// Numbers of 4 bytes.
struct LatentNote {
  // A note of which `begin` is kNoMore says that there are no more units.
  static constexpr int kNoMore = -1;
  static constexpr int kBytes = 48;

  std::uint32_t address;

  __device__ __forceinline__ void write(const DecodeUnit& unit) const {
    put(0, unit.begin);
    put(1, unit.end);
    put(2, unit.of.length);
    put(3, unit.of.position);
    put(4, unit.of.groups);
    put(5, unit.sequence);
    put(6, unit.kv_head);
    put(7, unit.block);
    put(8, unit.cache_group);
    put(9, unit.lag);
  }
  __device__ __forceinline__ void write_end() const { put(0, kNoMore); }
  // All that those need who fold, fetch or expand it.
  __device__ __forceinline__ DecodeUnit read() const {
    DecodeUnit unit{};
    unit.begin = get(0);
    unit.end = get(1);
    unit.of.length = get(2);
    unit.of.position = get(3);
    unit.of.groups = get(4);
    unit.sequence = get(5);
    unit.kv_head = get(6);
    unit.block = get(7);
    unit.cache_group = get(8);
    unit.lag = get(9);
    return unit;
  }

 private:
  __device__ __forceinline__ void put(int field, int number) const {
    store_number(address + static_cast<std::uint32_t>(4 * field), number);
  }
  __device__ __forceinline__ int get(int field) const {
    return load_number(address + static_cast<std::uint32_t>(4 * field));
  }
};

// By a warp: goes through the units that the fetching warp tells of.
template <class Map, class Worker>
__device__ __forceinline__ void for_each_note(const Map& map, Worker& worker) {
#pragma unroll 1
  for (std::uint32_t n = 0;; ++n) {
    const LatentTurn turn = LatentTurn::of(n);
    barrier_wait(map.note_full(turn.place), turn.parity);
    const DecodeUnit unit = map.note(turn.place).read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(map.note_empty(turn.place));
    if (unit.begin == LatentNote::kNoMore) break;
    worker.take(unit);
  }
}

// The fetching warp's side.
template <class Map>
class NoteWriter {
 public:
  __device__ __forceinline__ explicit NoteWriter(const Map& map) : map_(map) {}

  // Whether none has been written.
  __device__ __forceinline__ bool none() const { return notes_ == 0; }
  // Until the next one has a place.
  __device__ __forceinline__ void await() const {
    const LatentTurn turn = LatentTurn::of(notes_);
    barrier_wait(map_.note_empty(turn.place), turn.parity ^ 1U);
  }
  __device__ __forceinline__ void tell(const DecodeUnit& unit) {
    if (thread_of_cta() % 32 == 0) note().write(unit);
    tell();
  }
  __device__ __forceinline__ void tell_end() {
    await();
    if (thread_of_cta() % 32 == 0) note().write_end();
    tell();
  }

 private:
  __device__ __forceinline__ LatentNote note() const { return map_.note(LatentTurn::of(notes_).place); }
  __device__ __forceinline__ void tell() {
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(map_.note_full(LatentTurn::of(notes_).place));
    ++notes_;
  }

  const Map& map_;
  std::uint32_t notes_ = 0;
};

}  // namespace ringattn::sm90
