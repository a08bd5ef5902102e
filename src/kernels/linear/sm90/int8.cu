// SPDX-License-Identifier: Apache-2.0
// int8 linear layers with wgmma. W is operand A and quantized x is operand B, so that few rows of x need few columns of
// an MMA. CTAs are persistent. The producer warp loads K in blocks of 128 bytes by TMA, and two warpgroups multiply 64
// rows of W each: of a gated layer, the gate's and up's. With few tiles, several CTAs share a tile's K and add their
// int32 sums in L2, where the last one finishes the tile. Tiles of 256 rows are computed by pairs of CTAs, which share
// the rows of x by multicast.
#include <algorithm>
#include <cmath>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma_int8.cuh"
#include "kernels/linear/cuda/quantized_finish.cuh"
#include "kernels/linear/sm90/int8.hpp"

namespace ringattn::sm90 {

namespace {

constexpr int kInt8Consumers = 2 * kWarpgroup;
constexpr int kInt8Threads = kInt8Consumers + kWarpgroup;
constexpr int kInt8ConsumerRegisters = 224;
constexpr int kInt8ProducerRegisters = 48;
static_assert(kInt8Consumers * kInt8ConsumerRegisters + kWarpgroup * kInt8ProducerRegisters <= 65536);
// An SM has 228 KiB, of which a CTA takes 1 KiB more than it requests.
constexpr int kInt8Shared = 227 * 1024;
constexpr int kInt8Barrier = 1;   // named barrier of the consumers
constexpr int kInt8RowGroup = 8;  // tiles of rows that share columns of W in L2

template <int kRows_>
struct Int8Config {
  static constexpr int kRows = kRows_;
  static constexpr int kCtas = kRows == kInt8MaxTileRows ? 2 : 1;  // of a cluster
  static constexpr int kWeightBytes = kInt8TileSums * kInt8BlockBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kInt8BlockBytes;
  static constexpr bool kMovesRegisters = kRows > 128;         // from the producer to the consumers
  static constexpr int kStagedRows = kRows < 64 ? kRows : 64;  // finished at a time
  static constexpr int kStagedBytes = kStagedRows * cuda::kStagedRow * 4;
  static constexpr int kStages = (kInt8Shared - 1024 - kStagedBytes) / (kStageBytes + 2 * kBarrierBytes);
  static constexpr int kSharedBytes =
      cuda::aligned_shared_bytes(kStages * (kStageBytes + 2 * kBarrierBytes) + kStagedBytes, 1024);
};

// Stages, then staged sums, then barriers.
template <class C>
struct Int8Shared {
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t weights(std::uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t x(std::uint32_t stage) const { return weights(stage) + C::kWeightBytes; }
  __device__ __forceinline__ std::uint32_t staged() const { return base + C::kStages * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t stage) const {
    return staged() + C::kStagedBytes + stage * kBarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t stage) const { return full(stage + C::kStages); }
};

// A CTA's work: some K blocks of a tile.
struct Int8Unit {
  int tile, row_tile, column_tile, begin, end;
};

// unit: the number of this CTA's tile, or of its pair's tiles. The CTAs of a pair have adjacent columns.
template <class C>
__device__ __forceinline__ Int8Unit int8_unit(const HopperInt8& p, int unit) {
  const int columns = (p.column_tiles + C::kCtas - 1) / C::kCtas;
  const int tiles = p.row_tiles * columns;
  const int split = unit / tiles;
  const int number = unit % tiles;
  const int group = number / (kInt8RowGroup * columns);
  const int rows = min(kInt8RowGroup, p.row_tiles - group * kInt8RowGroup);
  const int in_group = number % (kInt8RowGroup * columns);
  const int column = in_group / rows * C::kCtas + (C::kCtas == 2 ? static_cast<int>(rank_in_cluster()) : 0);
  return {number * C::kCtas + (C::kCtas == 2 ? static_cast<int>(rank_in_cluster()) : 0),
          group * kInt8RowGroup + in_group % rows, column, static_cast<int>(std::int64_t{p.blocks} * split / p.splits),
          static_cast<int>(std::int64_t{p.blocks} * (split + 1) / p.splits)};
}

template <class C>
__device__ __forceinline__ int int8_units(const HopperInt8& p) {
  return p.row_tiles * ((p.column_tiles + C::kCtas - 1) / C::kCtas) * p.splits;
}

template <class C>
__device__ __forceinline__ void load_int8_weights(const HopperInt8& p, const Int8Shared<C>& shared,
                                                  const Int8Unit& unit, int block, std::uint32_t stage) {
  const bool gated = p.gemm.out.matrices == 2;
  const int column = unit.column_tile * p.gemm.out.columns_of_tile(kInt8TileSums);
  // A tensor map counts pairs of bytes.
  const int k = block * (kInt8BlockBytes / 2);
  tma_load_box(shared.weights(stage), &p.weights[0], shared.full(stage), k, 0, column);
  tma_load_box(shared.weights(stage) + C::kWeightBytes / 2, &p.weights[gated ? 1 : 0], shared.full(stage), k, 0,
               gated ? column : column + 64);
}

template <class C>
__device__ __forceinline__ void load_int8_x(const HopperInt8& p, const Int8Shared<C>& shared, const Int8Unit& unit,
                                            int block, std::uint32_t stage) {
  const int k = block * (kInt8BlockBytes / 2);
  const int row = unit.row_tile * C::kRows;
  if constexpr (C::kCtas == 1) {
    tma_load_box(shared.x(stage), &p.x, shared.full(stage), k, 0, row);
  } else {
    const int half = static_cast<int>(rank_in_cluster()) * (C::kRows / 2);
    tma_multicast_box(3, shared.x(stage) + static_cast<std::uint32_t>(half * kInt8BlockBytes), &p.x, shared.full(stage),
                      k, 0, row + half);
  }
}

template <class C>
__device__ __forceinline__ void produce_int8(const HopperInt8& p, const Int8Shared<C>& shared, int first, int step) {
  PackedPipelineState<C::kStages> ring;
  const int units = int8_units<C>(p);
  int early = 0;  // number of blocks of the first unit whose weights are in flight
  if (first < units) {
    const Int8Unit unit = int8_unit<C>(p, first);
    early = min(C::kStages, unit.end - unit.begin);
    // The previous kernel makes x, not W.
    for (int i = 0; i < early; ++i) {
      const auto stage = static_cast<std::uint32_t>(i);
      barrier_arrive_expect(shared.full(stage), C::kStageBytes);
      load_int8_weights(p, shared, unit, unit.begin + i, stage);
    }
    cuda::pdl_wait();
    for (int i = 0; i < early; ++i, ring.advance()) load_int8_x(p, shared, unit, unit.begin + i, ring.stage());
  }
  for (int u = first; u < units; u += step) {
    const Int8Unit unit = int8_unit<C>(p, u);
    for (int block = unit.begin + early; block < unit.end; ++block, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      barrier_wait(shared.empty(stage), ring.parity() ^ 1U);
      barrier_arrive_expect(shared.full(stage), C::kStageBytes);
      load_int8_weights(p, shared, unit, block, stage);
      load_int8_x(p, shared, unit, block, stage);
    }
    early = 0;
  }
}

// Adds the sums of a part of K to those of other CTAs. Returns whether this CTA was the last.
template <class C>
__device__ __forceinline__ bool add_to_tile(const HopperInt8& p, const Int8Unit& unit,
                                            const int (&sums)[C::kRows / 8][4], int rows, std::uint32_t flag) {
  const int lane = thread_of_cta() % 32;
  std::int32_t* const tile = p.gemm.tile_sums + std::int64_t{unit.tile} * C::kRows * kInt8TileSums +
                             thread_of_cta() / kWarpgroup * 64 + tile_row_of_thread();
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * j + lane % 4 * 2 + i % 2;
      if (row < rows) atomicAdd(tile + row * kInt8TileSums + i / 2 * 8, sums[j][i]);
    }
  }
  named_sync(kInt8Barrier, kInt8Consumers);
  if (thread_of_cta() == 0) {
    const bool is_last = cuda::count_arrival(p.gemm.counters + unit.tile) == static_cast<std::uint32_t>(p.splits) - 1;
    if (is_last) p.gemm.counters[unit.tile] = 0;
    cuda::store_shared(flag, static_cast<std::uint32_t>(is_last));
  }
  named_sync(kInt8Barrier, kInt8Consumers);
  return cuda::load_shared_number(flag) != 0;
}

template <class C>
__device__ __forceinline__ void finish_int8(const HopperInt8& p, const Int8Shared<C>& shared, const Int8Unit& unit,
                                            const int (&sums)[C::kRows / 8][4], float row_scale) {
  const cuda::QuantizedOutput& out = p.gemm.out;
  const int columns = out.columns_of_tile(kInt8TileSums);
  const int first_row = unit.row_tile * C::kRows;
  const int rows = min(C::kRows, out.rows - first_row);
  if (p.splits > 1) {
    if (!add_to_tile<C>(p, unit, sums, rows, shared.staged())) return;
    std::int32_t* const tile = p.gemm.tile_sums + std::int64_t{unit.tile} * C::kRows * kInt8TileSums;
    cuda::finish_tile<std::int32_t, kInt8Consumers>(
        out, first_row, rows, unit.column_tile * columns, columns, thread_of_cta(),
        [&](int row, int column) { return __ldcg(reinterpret_cast<const int4*>(tile + row * kInt8TileSums + column)); },
        [&](int row) { return out.row_scales[first_row + row]; });
    named_sync(kInt8Barrier, kInt8Consumers);
    for (int i = thread_of_cta(); i < rows * (kInt8TileSums / 4); i += kInt8Consumers) {
      __stcg(reinterpret_cast<int4*>(tile) + i, int4{});
    }
    return;
  }
  const int lane = thread_of_cta() % 32;
  const std::uint32_t mine =
      shared.staged() + static_cast<std::uint32_t>(4 * (thread_of_cta() / kWarpgroup * 64 + tile_row_of_thread() +
                                                        lane % 4 * 2 * cuda::kStagedRow));
  // The scale of a row is stored after its 128 sums.
  const auto scale_of = [&](int row) {
    return shared.staged() + static_cast<std::uint32_t>(4 * (row * cuda::kStagedRow + kInt8TileSums));
  };
#pragma unroll 1
  for (int staged = 0; staged < rows; staged += C::kStagedRows) {
    if (staged > 0) named_sync(kInt8Barrier, kInt8Consumers);
    if (thread_of_cta() / C::kStagedRows == staged / C::kStagedRows) {
      cuda::store_shared(scale_of(thread_of_cta() % C::kStagedRows), __float_as_uint(row_scale));
    }
#pragma unroll
    for (int part = 0; part < C::kRows; part += C::kStagedRows) {
      if (part != staged) continue;  // registers have no index
#pragma unroll
      for (int j = 0; j < C::kStagedRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          cuda::store_shared(mine + static_cast<std::uint32_t>(4 * ((8 * j + i % 2) * cuda::kStagedRow + i / 2 * 8)),
                             static_cast<std::uint32_t>(sums[part / 8 + j][i]));
        }
      }
    }
    named_sync(kInt8Barrier, kInt8Consumers);
    cuda::finish_tile<std::int32_t, kInt8Consumers>(
        out, first_row + staged, min(C::kStagedRows, rows - staged), unit.column_tile * columns, columns,
        thread_of_cta(),
        [&](int row, int column) {
          const uint4 four =
              cuda::load_shared_16(shared.staged() + static_cast<std::uint32_t>(4 * (row * cuda::kStagedRow + column)));
          return int4{static_cast<int>(four.x), static_cast<int>(four.y), static_cast<int>(four.z),
                      static_cast<int>(four.w)};
        },
        [&](int row) { return __int_as_float(cuda::load_shared_number(scale_of(row))); });
  }
  named_sync(kInt8Barrier, kInt8Consumers);
}

template <class C>
__device__ __forceinline__ void consume_int8(const HopperInt8& p, const Int8Shared<C>& shared, int first, int step) {
  const auto warpgroup = static_cast<std::uint32_t>(thread_of_cta() / kWarpgroup);
  const int lane = thread_of_cta() % 32;
  // Lane i releases stages of the cluster's i-th CTA.
  const std::uint32_t empty =
      C::kCtas == 2 ? map_to_cta(shared.empty(0), static_cast<std::uint32_t>(lane & 1)) : shared.empty(0);
  const auto release_stage = [&](std::uint32_t stage) {
    __syncwarp();
    if (lane < C::kCtas) barrier_arrive_at(empty + stage * kBarrierBytes);
  };
  PackedPipelineState<C::kStages> ring;
  cuda::pdl_wait();
  int sums[C::kRows / 8][4];
  for (int u = first; u < int8_units<C>(p); u += step) {
    const Int8Unit unit = int8_unit<C>(p, u);
    // The scale of a row for finish_int8(), loaded before it is needed.
    const int row = unit.row_tile * C::kRows + thread_of_cta();
    float row_scale = 1.0F;
    if (p.gemm.out.y != nullptr && thread_of_cta() < C::kRows && row < p.gemm.out.rows) {
      row_scale = p.gemm.out.row_scales[row];
    }
    std::uint32_t previous = 0;
    for (int block = unit.begin; block < unit.end; ++block, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      barrier_wait(shared.full(stage), ring.parity());
      const std::uint32_t a = warp_uniform(descriptor_low(shared.weights(stage) + warpgroup * (C::kWeightBytes / 2)));
      const std::uint32_t b = warp_uniform(descriptor_low(shared.x(stage)));
      pin(sums);
      wgmma_fence();
#pragma unroll
      for (std::uint32_t i = 0; i < kInt8BlockBytes / 32; ++i) {
        Int8Wgmma<C::kRows>::multiply(sums, descriptor(a + 2 * i), descriptor(b + 2 * i), block > unit.begin || i > 0);
      }
      wgmma_commit();
      if (block > unit.begin) {
        wgmma_wait<1>();
        release_stage(previous);
      }
      previous = stage;
    }
    wgmma_wait<0>();
    pin(sums);
    release_stage(previous);
    finish_int8<C>(p, shared, unit, sums, row_scale);
  }
}

template <class C>
__global__ void __launch_bounds__(kInt8Threads, 1) int8_wgmma_kernel(const __grid_constant__ HopperInt8 params) {
  extern __shared__ unsigned char int8_dynamic[];
  const Int8Shared<C> shared{cuda::aligned_shared_address<1024>(int8_dynamic)};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < C::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), C::kCtas * kInt8Consumers / 32);
    }
    barrier_init_fence();
  }
  if constexpr (C::kCtas == 2) cluster_sync();
  __syncthreads();
  cuda::pdl_launch_dependents();
  const int first = static_cast<int>(blockIdx.x) / C::kCtas;
  const int step = static_cast<int>(gridDim.x) / C::kCtas;
  if (static_cast<int>(threadIdx.x) < kInt8Consumers) {
    if constexpr (C::kMovesRegisters) reg_alloc<kInt8ConsumerRegisters>();
    consume_int8<C>(params, shared, first, step);
  } else {
    if constexpr (C::kMovesRegisters) reg_dealloc<kInt8ProducerRegisters>();
    if (threadIdx.x / 32 == kInt8Consumers / 32 && elect_one()) produce_int8<C>(params, shared, first, step);
    __syncwarp();
  }
  if constexpr (C::kCtas == 2) cluster_sync();  // the peer may still arrive at barriers of this CTA
}

MappedTensor mapped_bytes(const void* data, std::int64_t rows, std::int64_t bytes, std::int64_t stride) {
  const std::int64_t of_row = rows == 1 ? (bytes + 15) / 16 * 16 : stride;  // has no meaning, but must be valid
  return {data, rows, 1, bytes / 2, of_row / 2, of_row / 2};
}

template <int kRows>
void launch_int8_form(const cuda::Int8Gemm& gemm, Int8Form form, Stream stream) {
  using C = Int8Config<kRows>;
  HopperInt8 p{gemm, {}, {}, 0, 0, 0, form.splits};
  const std::int64_t x_bytes = cuda::int8_row_bytes(gemm.features);
  p.row_tiles = (gemm.out.rows + kRows - 1) / kRows;
  const int columns = gemm.out.columns_of_tile(kInt8TileSums);
  p.column_tiles = (gemm.out.columns + columns - 1) / columns;
  p.blocks = static_cast<std::int32_t>((x_bytes + kInt8BlockBytes - 1) / kInt8BlockBytes);
  p.x = map_tensor(mapped_bytes(gemm.x, gemm.out.rows, x_bytes, x_bytes), Dtype::kBf16, kRows / C::kCtas, 64);
  for (int m = 0; m < gemm.out.matrices; ++m) {
    p.weights[m] =
        map_tensor(mapped_bytes(gemm.weights[m].data, gemm.out.columns, gemm.features, gemm.weights[m].stride),
                   Dtype::kBf16, 64, 64);
  }
  const int units = p.row_tiles * ((p.column_tiles + C::kCtas - 1) / C::kCtas) * p.splits;
  const int clusters = std::min(units, gemm.multiprocessors / C::kCtas);
  cuda::PdlLaunch launch(clusters * C::kCtas, kInt8Threads, C::kSharedBytes, stream);
  if (C::kCtas > 1) launch.set_cluster_size(C::kCtas);
  check_cuda(cudaLaunchKernelEx(&launch.config, int8_wgmma_kernel<C>, p), "int8_wgmma");
}

template <int kRows>
void prepare_int8_form() {
  check_cuda(cudaFuncSetAttribute(int8_wgmma_kernel<Int8Config<kRows>>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Int8Config<kRows>::kSharedBytes),
             "cudaFuncSetAttribute");
}

constexpr int kMaxInt8Splits = 16;
constexpr int kMinSplitBlocks = 4;

}  // namespace

Int8Form choose_int8_form(int rows, int columns, int matrices, int features, int multiprocessors) {
  const int columns_of_tile = kInt8TileSums / matrices;
  const std::int64_t column_tiles = (columns + columns_of_tile - 1) / columns_of_tile;
  const int blocks = (features + kInt8BlockBytes - 1) / kInt8BlockBytes;
  constexpr double kMemoryBytes = 2500.0;  // a clock, of the whole device
  const double weight_bytes = static_cast<double>(columns) * matrices * features;
  Int8Form best;
  double best_cost = 0.0;
  for (int tile_rows = 8; tile_rows <= kInt8MaxTileRows; tile_rows *= 2) {
    if (tile_rows > 8 && tile_rows / 2 >= rows) break;  // int8_tile_sums() has memory for tiles up to this size
    // Less than all rows only in tiles that are not much smaller.
    if (tile_rows < kInt8MaxTileRows && tile_rows < rows && (tile_rows < 32 || rows > 4 * tile_rows)) continue;
    const int ctas = tile_rows == kInt8MaxTileRows ? 2 : 1;
    const std::int64_t tiles = (std::int64_t{rows} + tile_rows - 1) / tile_rows * ((column_tiles + ctas - 1) / ctas);
    const int places = multiprocessors / ctas;
    const double block_bytes = (kInt8TileSums + tile_rows / ctas) * double{kInt8BlockBytes};
    for (int splits = 1; splits <= kMaxInt8Splits; ++splits) {
      if (splits > 1 && (tiles * ctas > multiprocessors || blocks / splits < kMinSplitBlocks)) break;
      const auto units = static_cast<double>(tiles * splits);
      const double rounds = std::ceil(units / places);
      // Measured clocks per block: those of its MMAs, or of loading its bytes from L2, whose bandwidth per SM is lower
      // if all SMs load.
      const double block = std::max(4.0 * tile_rows, block_bytes / (units * ctas > multiprocessors / 2 ? 48.0 : 60.0));
      const double fixed = 3000.0 + 12.0 * tile_rows;
      // Few CTAs don't load at the full rate.
      const double memory = weight_bytes / (kMemoryBytes * std::max(0.5, 1.0 - 5.0 / units));
      const double product = std::max(rounds * (static_cast<double>((blocks + splits - 1) / splits) * block), memory);
      const double cost = product + rounds * fixed + (splits > 1 ? 2000.0 + 190.0 * std::min(rows, tile_rows) : 0.0);
      if (best.tile_rows == 0 || cost < best_cost) {
        best = {tile_rows, splits};
        best_cost = cost;
      }
    }
  }
  return best;
}

std::int64_t int8_tile_sums(std::int64_t rows, int multiprocessors) {
  std::int64_t tile_rows = 8;
  while (tile_rows < rows && tile_rows < kInt8MaxTileRows) tile_rows *= 2;
  return (multiprocessors + 1) * tile_rows * kInt8TileSums;
}

std::int64_t int8_counters(int multiprocessors) { return multiprocessors + 1; }

bool can_map_int8(const cuda::Int8Gemm& params) {
  for (int m = 0; m < params.out.matrices; ++m) {
    const cuda::QuantizedRows& rows = params.weights[m];
    if (!rows.aligned || params.features % 2 != 0) return false;
    if (!can_map(mapped_bytes(rows.data, params.out.columns, params.features, rows.stride))) return false;
  }
  return true;
}

void prepare_int8_wgmma() {
  prepare_int8_form<8>();
  prepare_int8_form<16>();
  prepare_int8_form<32>();
  prepare_int8_form<64>();
  prepare_int8_form<128>();
  prepare_int8_form<256>();
}

void launch_int8_wgmma(const cuda::Int8Gemm& params, Int8Form form, Stream stream) {
  switch (form.tile_rows) {
    case 8:
      return launch_int8_form<8>(params, form, stream);
    case 16:
      return launch_int8_form<16>(params, form, stream);
    case 32:
      return launch_int8_form<32>(params, form, stream);
    case 64:
      return launch_int8_form<64>(params, form, stream);
    case 128:
      return launch_int8_form<128>(params, form, stream);
    default:
      return launch_int8_form<256>(params, form, stream);
  }
}

}  // namespace ringattn::sm90
