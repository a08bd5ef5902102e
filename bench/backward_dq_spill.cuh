// SPDX-License-Identifier: Apache-2.0
// dQ += dS K from the dSᵀ that the dK/dV kernel wrote: one GEMM instead of three. Work tiles are those of
// backward_dq.cuh, with key tiles of 64.
#pragma once

#include "bench/backward_dq.cuh"

namespace ringattn::spike {

template <int kConsumers_, int kStages_>
struct DqSpillConfig {
  static constexpr int kKeys = 64, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kTileBytes = kKeys * kRowBytes, kStageBytes = kTileBytes + kConsumers * kSpillTile;
  static constexpr int kBarriers = kStages * kStageBytes, kWorkSlot = kBarriers + (2 + 2 * kStages) * 8;
  static constexpr int kShared = kWorkSlot + 16;
};

template <class C>
struct DqSpillMap {
  std::uint32_t base;
  __device__ std::uint32_t k(std::uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ std::uint32_t ds(std::uint32_t stage, int consumer) const {
    return k(stage) + C::kTileBytes + consumer * kSpillTile;
  }
  __device__ std::uint32_t work_full() const { return base + C::kBarriers; }
  __device__ std::uint32_t work_empty() const { return base + C::kBarriers + 8; }
  __device__ std::uint32_t full(std::uint32_t s) const { return base + C::kBarriers + 16 + s * 8; }
  __device__ std::uint32_t empty(std::uint32_t s) const { return full(C::kStages + s); }
};

template <class C>
__device__ __forceinline__ void load_dq_spill(const Problem& p, const DqSpillMap<C>& map, int* work_slot) {
  sm90::PackedPipelineState<C::kStages> ring;
  int index = static_cast<int>(blockIdx.x);
  for (std::uint32_t parity = 0;; parity ^= 1) {
    sm90::barrier_wait(map.work_empty(), parity ^ 1);
    const bool any = index < DqWorkTile<C>::count(p);
    *work_slot = any ? index : kNoMoreWork;
    sm90::barrier_arrive(map.work_full());
    if (!any) return;
    // Divisions stay out of the loop: one thread issues all loads, and its time a tile is on the critical path.
    const DqWorkTile<C> work(p, index);
    int tiles[C::kConsumers];
    std::uint32_t first[C::kConsumers];
#pragma unroll
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      tiles[consumer] = work.tiles(p, consumer);
      first[consumer] = spill_tile(p, work.head(consumer), work.sequence, work.position(consumer) / kQueryTile, 0);
    }
    const int end = work.tiles(p);
    for (int i = 0; i < end; ++i, ring.advance()) {
      const std::uint32_t stage = ring.stage(), full = map.full(stage);
      int consumers = 0;
#pragma unroll
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) consumers += i < tiles[consumer] ? 1 : 0;
      sm90::barrier_wait(map.empty(stage), ring.parity() ^ 1);
      sm90::barrier_arrive_expect(full, C::kTileBytes + consumers * kSpillTile);
      sm90::tma_load_box(map.k(stage), &p.k, full, 0, work.kv, work.sequence * p.seq + i * C::kKeys);
#pragma unroll
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
        if (i < tiles[consumer]) {
          sm90::tma_load_bytes(map.ds(stage, consumer),
                               spill_address(p, first[consumer] + static_cast<std::uint32_t>(i)), kSpillTile, full);
        }
      }
    }
    index = static_cast<int>(gridDim.x) + atomicAdd(p.taken, 1);
  }
}

__device__ __forceinline__ std::uint32_t transposed(std::uint32_t matrix) {
  std::uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(matrix));
  return r;
}

template <class C>
__device__ __forceinline__ void compute_dq_spill(const Problem& p, const DqSpillMap<C>& map, int consumer,
                                                 const int* work_slot) {
  sm90::PackedPipelineState<C::kStages> ring;
  float dq[kDim / 8][4];
  float* merged =
      scratch_of_thread(p.scratch + (std::int64_t{blockIdx.x} * C::kConsumers + consumer) * kQueryTile * kDim);
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(map.empty(ring.stage()));
    ring.advance();
  };
  const std::uint32_t piece = threadIdx.x % sm90::kWarpgroup / 32 * 2048 + threadIdx.x % 32 * 16;
  for (std::uint32_t parity = 0;; parity ^= 1) {
    sm90::barrier_wait(map.work_full(), parity);
    const int index = static_cast<int>(sm90::of_warp(*reinterpret_cast<const volatile int*>(work_slot)));
    if (index == kNoMoreWork) return;
    sm90::barrier_arrive(map.work_empty());
    const DqWorkTile<C> work(p, index);
    const int tiles = work.tiles(p, consumer);
    bool any_merged = false;
    for (int i = 0; i < tiles;) {
      const int end = i + kKvSplit / C::kKeys < tiles ? i + kKvSplit / C::kKeys : tiles;
      bool first = true;
#pragma unroll 1
      for (; i < end; ++i) {
        sm90::barrier_wait(map.full(ring.stage()), ring.parity());
        std::uint32_t ds[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 keys and this warp's 16 queries
          std::uint32_t t[4];
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(t[0]), "=r"(t[1]), "=r"(t[2]), "=r"(t[3])
                       : "r"(map.ds(ring.stage(), consumer) + piece + j * 512)
                       : "memory");
          ds[j][0] = transposed(t[0]);
          ds[j][1] = transposed(t[2]);
          ds[j][2] = transposed(t[1]);
          ds[j][3] = transposed(t[3]);
        }
        add_product<4, C::kKeys>(dq, ds, map.k(ring.stage()), first);
        first = false;
        sm90::wgmma_wait<0>();
        sm90::pin(dq);
        release();
      }
      if (end == tiles) break;
      merge_split(merged, dq, !any_merged);
      any_merged = true;
    }
    for (int left = work.tiles(p) - tiles; left > 0; --left) {
      sm90::barrier_wait(map.full(ring.stage()), ring.parity());
      release();
    }
    if (tiles == 0) continue;
    if (any_merged) add_merged(merged, dq);
    const std::int64_t row = std::int64_t{work.sequence} * p.seq + work.position(consumer);
    write_rows(p.dq + (row * p.heads + work.head(consumer)) * kDim, std::int64_t{p.heads} * kDim, dq, p.scale);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) dq_spill_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DqSpillMap<C> map{static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))};
  int* work_slot = reinterpret_cast<int*>(shared + C::kWorkSlot);
  if (threadIdx.x == 0) {
    sm90::barrier_init(map.work_full(), 1);
    sm90::barrier_init(map.work_empty(), C::kConsumers * sm90::kWarpgroup);
    for (std::uint32_t s = 0; s < C::kStages; ++s) {
      sm90::barrier_init(map.full(s), 1);
      sm90::barrier_init(map.empty(s), C::kConsumers * 4);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / sm90::kWarpgroup;
  if (warpgroup == 0) {
    if (threadIdx.x == 0) load_dq_spill<C>(p, map, work_slot);
  } else {
    compute_dq_spill<C>(p, map, warpgroup - 1, work_slot);
  }
}

}  // namespace ringattn::spike
