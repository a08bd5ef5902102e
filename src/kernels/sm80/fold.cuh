// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync, sm_80 and later. One CTA folds the key tiles of one query tile of one
// head, in ascending order. Every number is a function of the row, its keys, the job and the template parameters; the
// work item only says where things lie and where to stop.
//
// (m, l, O) as the loop holds it, and as a saved state holds it: m is the running maximum of the scores before
// FoldParams::Softmax::exponent is applied, l the four partial sums of the row's quad of threads, O is in the order of
// fragments.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/fold_params.hpp"
#include "kernels/cuda/work_order.hpp"
#include "kernels/sm80/config.hpp"
#include "kernels/sm80/tile_step.cuh"

namespace ringattn::sm80 {

// Where one head of a key tile lies, in shared memory: 48 bytes.
struct Place {
  cuda::RowsOf k;
  cuda::RowsOf v;
  std::int64_t first_key;  // position in its sequence
  std::int32_t keys;       // that the sequence has of the tile
  std::int32_t masked;     // whether some row of the query tile doesn't see some key of it
};
inline constexpr int kPlaces = 32;  // of the tile map that are held resolved: two halves, one in use, one ahead
inline constexpr int kPlaceBytes = 48;
static_assert(sizeof(Place) == kPlaceBytes && kPlaces <= 32);

template <class C>
struct SharedLayout {
  static constexpr int kQBytes = cuda::kTileBytes<C::kQueryTile, C::kDim>;
  static constexpr int kKBytes = cuda::kTileBytes<C::kKeyTile, C::kDim>;
  static constexpr int kVBytes = cuda::kTileBytes<C::kKeyTile, C::kDimV>;
  static constexpr int kPlaces = kQBytes + C::kStages * (kKBytes + kVBytes);
  static constexpr int kBytes = kPlaces + sm80::kPlaces * kPlaceBytes;
};

// Loads by explicit instructions: what the compiler loads for itself here it makes uniform, and everyone waits.
__device__ inline cuda::RowsOf load_rows(std::uint32_t data_at, std::uint32_t stride_at) {
  cuda::RowsOf rows;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.data) : "r"(data_at) : "memory");
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.stride) : "r"(stride_at) : "memory");
  return rows;
}
__device__ inline std::int32_t load_number(std::uint32_t address) {
  std::int32_t number;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(address) : "memory");
  return number;
}

// The addresses of one work item's tiles.
template <class C>
struct TileMap {
  const cuda::FoldParams& p;
  const cuda::WorkItem& item;
  Place* places;
  int kv_head;

  // Resolves entries [first, first + count) of the item, count ≤ 32; for the first warp.
  __device__ void resolve(int first, int count) const {
    const int i = first + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= count || i >= item.tiles) return;
    std::int64_t tile_number = item.first_tile + i;
    std::int64_t index = item.table + i;
    if (item.runs > 1) {
      const std::int64_t number = item.first + i;
      int run = item.run_begin;  // the last one that begins at `number` or before
      for (int runs = item.runs; runs > 1;) {
        const int half = runs / 2;
        const bool behind = p.tables.runs[run + half].first <= number;
        run += behind ? half : 0;
        runs = behind ? runs - half : half;
      }
      const cuda::RunEntry& entry = p.tables.runs[run];
      tile_number = entry.first_tile + number - entry.first;
      index = entry.table + number - entry.first;
    }
    const cuda::TileEntry tile = p.tables.tiles[index];
    const cuda::SourceEntry& source =
        p.tables.all_near ? p.tables.near_sources[tile.source] : p.tables.sources[tile.source];
    Place place;
    const std::int64_t k_offset = tile.row * source.k_token_stride + kv_head * source.k_head_stride;
    const std::int64_t v_offset = tile.row * source.v_token_stride + kv_head * source.v_head_stride;
    place.k = {static_cast<const char*>(source.k) + 2 * k_offset, 2 * source.k_token_stride};
    place.v = {static_cast<const char*>(source.v) + 2 * v_offset, 2 * source.v_token_stride};
    place.first_key = tile_number * C::kKeyTile;
    const std::int64_t left = item.key_length - place.first_key;
    place.keys = left < C::kKeyTile ? static_cast<std::int32_t>(left) : C::kKeyTile;
    // The last key is the first to hide from the first row, the first key from the last row.
    place.masked = place.keys < C::kKeyTile ||
                   (p.mask.right >= 0 && place.first_key + C::kKeyTile - 1 > item.position + p.mask.right) ||
                   (p.mask.left >= 0 && place.first_key < item.position + C::kQueryTile - 1 - p.mask.left);
    places[i % kPlaces] = place;
  }

  // Called with tile numbers in order; resolves the next half where the one before it is free.
  __device__ void resolve_ahead(int next) const {
    if (next % (kPlaces / 2) == kPlaces / 4 && next > kPlaces / 2) {
      resolve(next / (kPlaces / 2) * (kPlaces / 2) + kPlaces / 2, kPlaces / 2);
    }
  }

  __device__ std::uint32_t place(int tile) const {
    return cuda::shared_address(places) + static_cast<std::uint32_t>(tile % kPlaces * kPlaceBytes);
  }
  __device__ __forceinline__ void copy_k(int tile, std::uint32_t target) const {
    const std::uint32_t at = place(tile);
    cuda::copy_tile<C::kKeyTile, C::kDim, C::kThreads>(target, load_rows(at, at + 8), 0, load_number(at + 40));
  }
  __device__ __forceinline__ void copy_v(int tile, std::uint32_t target) const {
    const std::uint32_t at = place(tile);
    cuda::copy_tile<C::kKeyTile, C::kDimV, C::kThreads>(target, load_rows(at + 16, at + 24), 0, load_number(at + 40));
  }
  __device__ bool masked(int tile) const { return load_number(place(tile) + 44) != 0; }
};

// Calls visit(block, half, slot) for each row that this thread has a share of.
template <class C, class Visit>
__device__ __forceinline__ void for_each_row(Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) visit(block, half, (warp * C::kRowBlocks + block) * 16 + lane / 4 + 8 * half);
  }
}

// State in memory: O [heads, rows, head_dim_v], then for each (head, row) l0 l1 l2 l3 m and three floats of padding.
template <class C>
struct StateMemory {
  float* o;   // of this thread's share
  float* ml;  // of the row

  __device__ StateMemory(const cuda::FoldParams& p, std::int64_t row, int head) {
    const std::int64_t index = head * p.rows + row;
    o = p.state.memory + index * C::kDimV + threadIdx.x % 4 * 4;
    ml = p.state.memory + p.rows * p.heads * C::kDimV + index * 8;
  }
};

template <class C>
__device__ __forceinline__ void load_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           RowState<C>& state) {
  for_each_row<C>([&](int block, int half, int slot) {
    const bool read = p.state.resume && slot >= item.slot_begin && slot < item.slot_end;
    const StateMemory<C> memory(p, item.row + slot, head);
    state.m[block][half] = read ? memory.ml[4] : -INFINITY;
    state.l[block][half] = read ? memory.ml[threadIdx.x % 4] : 0.0F;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = read ? *reinterpret_cast<const float4*>(memory.o + n * 16) : float4{0.0F, 0.0F, 0.0F, 0.0F};
      state.o[block][2 * n][2 * half] = x.x;
      state.o[block][2 * n][2 * half + 1] = x.y;
      state.o[block][2 * n + 1][2 * half] = x.z;
      state.o[block][2 * n + 1][2 * half + 1] = x.w;
    }
  });
}

template <class C>
__device__ __forceinline__ void save_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           const RowState<C>& state) {
  for_each_row<C>([&](int block, int half, int slot) {
    if (slot < item.slot_begin || slot >= item.slot_end) return;
    const StateMemory<C> memory(p, item.row + slot, head);
    memory.ml[threadIdx.x % 4] = state.l[block][half];
    if (threadIdx.x % 4 == 0) memory.ml[4] = state.m[block][half];
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      *reinterpret_cast<float4*>(memory.o + n * 16) =
          float4{state.o[block][2 * n][2 * half], state.o[block][2 * n][2 * half + 1],
                 state.o[block][2 * n + 1][2 * half], state.o[block][2 * n + 1][2 * half + 1]};
    }
  });
}

// Divides, rounds and writes. Rows go through the warp's own rows of the Q tile, so that whole lines are written.
template <class C>
__device__ __forceinline__ void finish_rows(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            std::uint32_t q_tile, RowState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // Q has been read
  for_each_row<C>([&](int block, int half, int slot) {
    float l = state.l[block][half];
    l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 1));
    l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 2));
    const float m = __fmul_rn(state.m[block][half], p.softmax.exponent);
    float reference = m;
    float weight = 1.0F;
    if (p.sinks != nullptr) {
      // One more score, without a value.
      const float sink = p.sinks[head];
      reference = sink > m || sink != sink ? sink : m;
      const float finite = reference == -INFINITY ? 0.0F : reference;
      weight = expf(__fsub_rn(m, finite));
      l = __fmaf_rn(l, weight, expf(__fsub_rn(sink, finite)));
    }
    // Nothing was seen: O is 0, and log 0 is −∞.
    const float inverse = __fmul_rn(weight, __frcp_rn(l == 0.0F ? 1.0F : l));
    if (p.lse.data != nullptr && lane % 4 == 0 && slot >= item.slot_begin && slot < item.slot_end) {
      p.lse.data[(item.row + slot) * p.lse.token_stride + head * p.lse.head_stride] = __fadd_rn(reference, logf(l));
    }
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {
      const std::uint32_t to = q_tile + static_cast<std::uint32_t>(n / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                               cuda::swizzled(slot, n % 8) + static_cast<std::uint32_t>(lane % 4 * 4);
      cuda::store_shared(
          to, cuda::Products<typename C::Element>::pack(__fmul_rn(state.o[block][n][2 * half], inverse),
                                                        __fmul_rn(state.o[block][n][2 * half + 1], inverse)));
    }
  });
  __syncwarp();
  constexpr int kChunks = C::kDimV / 8;
  const int first_slot = static_cast<int>(threadIdx.x) / 32 * C::kRowBlocks * 16;
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out.token_stride | p.out.head_stride))) &
                        15U) == 0;
  for (int i = lane; i < C::kRowBlocks * 16 * kChunks; i += 32) {
    const int slot = first_slot + i / kChunks;
    const int chunk = i % kChunks;
    const uint4 elements =
        cuda::load_shared_16(q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                             cuda::swizzled(slot, chunk % 8));
    if (slot < item.slot_begin || slot >= item.slot_end) continue;
    std::uint16_t* to = out + (item.row + slot) * p.out.token_stride + head * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) fold_kernel(const __grid_constant__ cuda::FoldParams p) {
  using Layout = SharedLayout<C>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ cuda::WorkItem item;  // not in registers: most of it is wanted at both ends only

  const cuda::WorkPlace place =
      cuda::work_place(p.schedule.early_count, p.heads, p.schedule.section_heads, static_cast<int>(blockIdx.x));
  const int head = place.head;
  if (threadIdx.x == 0) item = p.tables.items[place.piece];
  __syncthreads();

  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  const TileMap<C> map{p, item, reinterpret_cast<Place*>(shared + Layout::kPlaces), head / (p.heads / p.kv_heads)};
  const int tiles = item.tiles;
  if (tiles > 0) {
    const char* q = static_cast<const char*>(p.q.data) + 2 * (item.row * p.q.token_stride + head * p.q.head_stride);
    cuda::copy_tile<C::kQueryTile, C::kDim, C::kThreads>(q_tile, {q, 2 * p.q.token_stride}, item.slot_begin,
                                                         item.slot_end);
  }
  map.resolve(0, kPlaces);
  __syncthreads();

  const auto k_stage = [&](int i) { return k_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kKBytes); };
  const auto v_stage = [&](int i) { return v_tiles + static_cast<std::uint32_t>(i % C::kStages * Layout::kVBytes); };
  if (tiles > 0) {
    map.copy_k(0, k_stage(0));
    if constexpr (C::kStages > 1) map.copy_v(0, v_stage(0));
  }
  cuda::copy_commit();

  RowState<C> state;
  load_state<C>(p, item, head, state);

  const TileStep<C> step(p, item, q_tile);
  for (int i = 0; i < tiles; ++i) {
    cuda::copy_wait<0>();
    __syncthreads();
    if constexpr (C::kStages > 1) {
      // Tile i is here, and everyone is past tile i − 1.
      if (i + 1 < tiles) {
        map.copy_k(i + 1, k_stage(i + 1));
        map.copy_v(i + 1, v_stage(i + 1));
      }
      cuda::copy_commit();
      map.resolve_ahead(i + 1);
      step.fold(state, k_stage(i), v_stage(i), map.masked(i), map.place(i) + 32, [] {});
    } else {
      // K of tile i is here, and everyone is past V of tile i − 1.
      map.copy_v(i, v_stage(i));
      cuda::copy_commit();
      map.resolve_ahead(i + 1);
      step.fold(state, k_stage(i), v_stage(i), map.masked(i), map.place(i) + 32, [&] {
        cuda::copy_wait<0>();
        __syncthreads();  // V is here, and everyone is past K
        if (i + 1 < tiles) map.copy_k(i + 1, k_stage(i + 1));
        cuda::copy_commit();
      });
    }
  }

  if (p.state.save) save_state<C>(p, item, head, state);
  if (p.finish) finish_rows<C>(p, item, head, q_tile, state);
}

}  // namespace ringattn::sm80
