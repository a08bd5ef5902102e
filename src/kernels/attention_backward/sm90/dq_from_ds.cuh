// SPDX-License-Identifier: Apache-2.0
// dQ += dS K, from the dS that the dK/dV kernel has stored. It gives the same bits as dq.cuh with one GEMM instead of
// three. A CTA owns head tiles of one KV head, one per warpgroup, and loops over the keys that they see. dS is a
// register operand. It is stored as dSᵀ, so each 8 × 8 matrix is transposed when it is loaded. Warp 0 is the producer.
#pragma once

#include "kernels/attention_backward/sm90/work.cuh"

namespace ringattn::sm90 {

template <class Element_, BackwardConfig kConfig>
struct DqFromDsTraits {
  using Element = Element_;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kStages = kConfig.ds_stages;
  static constexpr int kKBytes = kBackwardTile * cuda::padded_row_bytes(kDim);
  // Shared memory, in this order. A stage has kBackwardTile keys: half of a key tile.
  static constexpr int kDs = kStages * kKBytes;
  static constexpr int kBarriers = kDs + kStages * kDsConsumers * cuda::kDsTileBytes;
  static constexpr int kBarrierCount = 3 + 2 * kStages;
  static constexpr int kStageInfo = kBarriers + (kBarrierCount * kBarrierBytes + 15) / 16 * 16;
  static constexpr int kWork = kStageInfo + (kStages * 2 * static_cast<int>(sizeof(std::int32_t)) + 15) / 16 * 16;
  static constexpr int kShared = kWork + kWorkSlots * static_cast<int>(sizeof(cuda::BackwardWork<kDsConsumers>));
};

// Addresses in shared memory.
template <class C>
struct DqFromDsMap {
  std::uint32_t base;
  __device__ std::uint32_t k(std::uint32_t stage) const { return base + stage * C::kKBytes; }
  __device__ std::uint32_t ds(std::uint32_t stage, int consumer) const {
    return base + C::kDs + (stage * kDsConsumers + static_cast<std::uint32_t>(consumer)) * cuda::kDsTileBytes;
  }
  // Work has been published; the consumers are done with it.
  __device__ std::uint32_t work_full() const { return barrier(0); }
  __device__ std::uint32_t work_empty() const { return barrier(1); }
  // K of a partial tile has landed, and its absent rows can be zeroed.
  __device__ std::uint32_t partial_landed() const { return barrier(2); }
  __device__ std::uint32_t full(std::uint32_t stage) const { return barrier(3 + stage); }
  __device__ std::uint32_t empty(std::uint32_t stage) const { return barrier(3 + C::kStages + stage); }

 private:
  __device__ std::uint32_t barrier(std::uint32_t index) const { return base + C::kBarriers + index * kBarrierBytes; }
};

// Information that the producer passes to the consumers for a stage.
struct DsStage {
  std::int32_t keys;     // of the sequence
  std::int32_t present;  // bit mask of consumers that have dS; for the others it is 0
};

__device__ __forceinline__ cuda::DsOfKeys load_ds_of_keys(const cuda::DsOfKeys* from) {
  const int4 fields = *reinterpret_cast<const int4*>(from);
  return {fields.x, fields.y, fields.z, fields.w};
}

template <class C>
__device__ __forceinline__ void produce_dq_from_ds(const DqFromDsParams& p, const DqFromDsMap<C>& map, DsStage* stages,
                                                   cuda::BackwardWork<kDsConsumers>* slots) {
  const cuda::BackwardTables& tables = p.common.tables;
  const int lane = thread_of_cta() % kWarp;
  PackedPipelineState<C::kStages> ring;
  std::uint32_t partial_parity = 0;
  int index = static_cast<int>(blockIdx.x);
  for (std::uint32_t parity = 0;; parity ^= 1U) {
    cuda::BackwardWork<kDsConsumers>& work = slots[parity];
    barrier_wait(map.work_empty(), parity ^ 1U);
    const bool any = publish_work(tables, index, work);
    if (lane == 0) barrier_arrive(map.work_full());
    if (!any) return;
    // Lane c looks up dS of consumer c, and lane 0 loads it.
    const int consumer = lane < work.pair.count ? lane : 0;
    const RowTile& rows = work.row_tiles[consumer];
    const int rows_begin = rows.begin_tile;
    const int rows_end = lane < work.pair.count ? rows.end_tile : rows.begin_tile;
    const int query_tile = rows.offset / kBackwardTile;
    int first_ds[kDsConsumers];
#pragma unroll
    for (int c = 0; c < kDsConsumers; ++c) {
      first_ds[c] = work.kv_head * p.common.spill.tiles_of_head +
                    __shfl_sync(0xFFFFFFFFU, query_tile, c) * tables.group + (work.pair.head + c) % tables.group;
    }
    for (int i = work.pair.run_begin; i < work.pair.run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval range = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      for (int tile = range.begin; tile < range.end; tile += kWarp / cuda::kDsTilesOfKeyTile) {
        // Each lane reads the tables of one stage: reading them for one stage at a time would take as long as the
        // stage's GEMMs.
        const int left = cuda::kDsTilesOfKeyTile * (range.end - tile);
        const int stages_of_warp = left < kWarp ? left : kWarp;
        const int entry = cuda::kDsTilesOfKeyTile * (run.table - run.first_tile + tile) + min(lane, stages_of_warp - 1);
        const cuda::DsOfKeys mine = load_ds_of_keys(tables.ds + entry);
        const cuda::OtherTile& from = tables.tiles[entry / cuda::kDsTilesOfKeyTile];
        const int my_row = static_cast<int>(from.row) + entry % cuda::kDsTilesOfKeyTile * kBackwardTile;
        const int my_source = from.source;
#pragma unroll 1
        for (int n = 0; n < stages_of_warp; ++n, ring.advance()) {
          const auto of_stage = [n](int value) { return __shfl_sync(0xFFFFFFFFU, value, n); };
          const cuda::DsOfKeys ds{of_stage(mine.first), of_stage(mine.begin), of_stage(mine.end), of_stage(mine.keys)};
          const int row = of_stage(my_row), source = of_stage(my_source);
          const int key_tile = tile + n / cuda::kDsTilesOfKeyTile;
          const std::uint32_t stage = ring.stage();
          const std::uint32_t full = map.full(stage);
          const bool has_ds =
              key_tile >= rows_begin && key_tile < rows_end && query_tile >= ds.begin && query_tile < ds.end;
          const unsigned present = __ballot_sync(0xFFFFFFFFU, has_ds);
          const bool whole = ds.keys == kBackwardTile;
          const int ds_bytes = __popc(present) * cuda::kDsTileBytes;
          barrier_wait(map.empty(stage), ring.parity() ^ 1U);
          if (lane == 0) {
            stages[stage] = {ds.keys, static_cast<std::int32_t>(present)};
            const std::uint32_t landed = whole ? full : map.partial_landed();
            barrier_arrive_expect(landed, C::kKBytes + (whole ? ds_bytes : 0));
            load_rows<C::kDim>(map.k(stage), cuda::panel_bytes(kBackwardTile), p.k[source], landed, work.kv_head, row);
          }
          if (!whole) {
            barrier_wait(map.partial_landed(), partial_parity);
            partial_parity ^= 1U;
            zero_rows<kBackwardTile, C::kDim>(map.k(stage), 0, ds.keys);
            proxy_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive_expect(full, ds_bytes);
          }
          if (lane == 0) {
#pragma unroll
            for (int c = 0; c < kDsConsumers; ++c) {
              if ((present >> c & 1U) == 0) continue;
              tma_load_bytes(map.ds(stage, c),
                             p.common.spill.tiles + std::int64_t{first_ds[c] + ds.first} * cuda::kDsTileBytes,
                             cuda::kDsTileBytes, full);
            }
          }
          __syncwarp();
        }
      }
    }
    index = take_work(tables);
  }
}

__device__ __forceinline__ std::uint32_t transposed(std::uint32_t matrix) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

template <class C>
class DqFromDsConsumer {
 public:
  __device__ __forceinline__ DqFromDsConsumer(const DqFromDsParams& p, const DqFromDsMap<C>& map, const DsStage* stages,
                                              int consumer)
      : p_(p), map_(map), stages_(stages), consumer_(consumer) {}

  __device__ __forceinline__ void run(const cuda::BackwardWork<kDsConsumers>* slots) {
    for (std::uint32_t parity = 0;; parity ^= 1U) {
      barrier_wait(map_.work_full(), parity);
      const cuda::BackwardWork<kDsConsumers>& work = slots[parity];
      if (uniform(work.kv_head) == kNoWorkLeft) break;
      compute(work);
    }
  }

 private:
  using Packed = std::uint32_t[kBackwardTile / kGemmStep][4];

  static __device__ __forceinline__ int uniform(int number) {
    return static_cast<int>(warp_uniform(static_cast<std::uint32_t>(number)));
  }

  __device__ __forceinline__ SumRows closed_sum(const cuda::BackwardWork<kDsConsumers>& work) const {
    return sum_rows(p_.common.sums, work.row_tiles[consumer_], std::int64_t{blockIdx.x} * kDsConsumers + consumer_,
                    tile_row_of_thread(), p_.common.heads, head_of(p_.common.tables, work, consumer_), C::kDim, 0,
                    false);
  }

  // Tasks end where KV splits end, so no sum is open before or after.
  __device__ __forceinline__ void compute(const cuda::BackwardWork<kDsConsumers>& work) {
    const cuda::BackwardTables& tables = p_.common.tables;
    const RowTile& tile = work.row_tiles[consumer_];
    const bool active = uniform(consumer_ < work.pair.count ? 1 : 0) != 0;
    const int begin = uniform(tile.begin_tile);
    const int end = active ? uniform(tile.end_tile) : begin;
    const int phase = uniform(work.pair.split_phase);
    // Its slot is written again when all warps have begun the work after it.
    release_stage(map_.work_empty());
    bool any_closed = active && (uniform(tile.flags) & RowTile::kHasClosedSum) != 0;
    bool any_open = false;
    const int run_end = uniform(work.pair.run_end);
    for (int i = uniform(work.pair.run_begin); i < run_end; ++i) {
      const TileRun run = tables.runs[i];
      const TileInterval of_pair = common_tiles(run, work.pair.begin_tile, work.pair.end_tile);
      const int run_from = uniform(of_pair.begin);
      const int run_to = uniform(of_pair.end);
      int from = run_from > begin ? run_from : begin;
      const int to = run_to < end ? run_to : end;
      if (from >= to) {
        skip(run_to - run_from);
        continue;
      }
      skip(from - run_from);
      while (from < to) {
        const int split_end = ((from + phase) / tables.tiles_per_split + 1) * tables.tiles_per_split - phase;
        const int stop = to < split_end ? to : split_end;
        add_tiles(stop - from);
        any_open = true;
        if (stop == split_end && stop != end) {
          add_sum(closed_sum(work), dq_, !any_closed);
          any_closed = true;
          any_open = false;
        }
        from = stop;
      }
      skip(run_to - to);
    }
    if (active) end_rows(work, {any_open, any_closed, false, p_.common.sums.save});
  }

  __device__ __forceinline__ void end_rows(const cuda::BackwardWork<kDsConsumers>& work, const SumEnd& end) const {
    if (p_.common.sums.finish) {
      finish_sum<typename C::Element>(closed_sum(work), end, p_.dq, work.row_tiles[consumer_], tile_row_of_thread(),
                                      head_of(p_.common.tables, work, consumer_), dq_, p_.common.softmax.scale);
    } else if (end.any_open) {
      add_sum(closed_sum(work), dq_, !end.any_closed);
    }
  }

  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
    for (int i = tiles * cuda::kDsTilesOfKeyTile; i > 0; --i) {
      barrier_wait(map_.full(ring_.stage()), ring_.parity());
      release_stage(map_.empty(ring_.stage()));
      ring_.advance();
    }
  }

  // Sets dQ to the sum over key tiles of one split.
  __device__ __forceinline__ void add_tiles(int tiles) {
    bool first = true;
#pragma unroll 1
    for (int i = tiles * cuda::kDsTilesOfKeyTile; i > 0; --i) {
      const std::uint32_t stage = ring_.stage();
      barrier_wait(map_.full(stage), ring_.parity());
      Packed ds;
      load_ds(stage, ds);
      keep_packed(ds);
      multiply_add<typename C::Element, C::kDim, kBackwardTile / kGemmStep, kBackwardTile>(dq_, ds, map_.k(stage),
                                                                                           first);
      first = false;
      wgmma_wait<0>();
      pin(dq_);
      pin_packed(ds);
      release_stage(map_.empty(stage));
      ring_.advance();
    }
  }

  // The warp's 16 positions are a row of 16-byte pieces (DsSpill). dS is 0 if none was stored, and for absent keys.
  __device__ __forceinline__ void load_ds(std::uint32_t stage, Packed& ds) const {
    constexpr int kPieceBytes = 16;
    const DsStage info = stages_[stage];
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int keys = (info.present >> consumer_ & 1) != 0 ? info.keys : 0;
    const std::uint32_t from =
        map_.ds(stage, consumer_) + static_cast<std::uint32_t>((warp * kWarpgroup + lane) * kPieceBytes);
#pragma unroll
    for (int step = 0; step < kBackwardTile / kGemmStep; ++step) {
      std::uint32_t t[4];  // rows are keys lane / 4 and 8 later, columns are positions
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(t[0]), "=r"(t[1]), "=r"(t[2]), "=r"(t[3])
                   : "r"(from + static_cast<std::uint32_t>(step * kWarp * kPieceBytes))
                   : "memory");
      const int key = step * kGemmStep + lane / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (key + i % 2 * 8 >= keys) t[i] = 0;
      }
      ds[step][0] = transposed(t[0]);
      ds[step][1] = transposed(t[2]);
      ds[step][2] = transposed(t[1]);
      ds[step][3] = transposed(t[3]);
    }
  }

  const DqFromDsParams& p_;
  const DqFromDsMap<C>& map_;
  const DsStage* stages_;
  int consumer_;
  PackedPipelineState<C::kStages> ring_;
  float dq_[C::kDim / 8][4];
};

template <class C>
__global__ void __launch_bounds__(kDsThreads, 1) dq_from_ds_kernel(const __grid_constant__ DqFromDsParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* const memory = cuda::aligned_shared<kSharedAlignment>(shared);
  const DqFromDsMap<C> map{cuda::shared_address(memory)};
  auto* stages = reinterpret_cast<DsStage*>(memory + C::kStageInfo);
  auto* slots = reinterpret_cast<cuda::BackwardWork<kDsConsumers>*>(memory + C::kWork);
  if (threadIdx.x == 0) {
    barrier_init(map.work_full(), 1);
    barrier_init(map.work_empty(), kDsConsumers * kWarpsOfWarpgroup);
    barrier_init(map.partial_landed(), 1);
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(map.full(stage), 1);
      barrier_init(map.empty(stage), kDsConsumers * kWarpsOfWarpgroup);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    reg_dealloc<kDsProducerRegisters>();
    if (threadIdx.x < kWarp) produce_dq_from_ds<C>(p, map, stages, slots);
  } else {
    reg_alloc<kDsConsumerRegisters>();
    DqFromDsConsumer<C>(p, map, stages, warpgroup - 1).run(slots);
  }
}

}  // namespace ringattn::sm90
