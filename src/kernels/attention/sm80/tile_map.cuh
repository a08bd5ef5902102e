// SPDX-License-Identifier: Apache-2.0
// The rows of a work tile, and the resolved addresses of its K and V tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/tile_lookup.cuh"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// Address of one head of a page run of a KV tile, in shared memory: 48 bytes.
struct TileAddress {
  cuda::RowsOf k;
  cuda::RowsOf v;
  std::int64_t first_key;  // of the tile, in its sequence; if C::kPositions, the address of its keys' positions
  std::int32_t keys;       // number of keys of the sequence in the page run
  std::int32_t masked;     // whether some row of the query tile doesn't see some key of the tile
};
// Resolved entries of the page map: two halves, one in use and one prefetched.
inline constexpr int kTileAddresses = 32;
inline constexpr int kTileAddressBytes = 48;
static_assert(sizeof(TileAddress) == kTileAddressBytes && kTileAddresses <= 32);

// Explicit load instructions: the compiler's own loads here would be uniform loads, which stall all threads.
__device__ inline cuda::RowsOf load_rows(std::uint32_t data_at, std::uint32_t stride_at) {
  cuda::RowsOf rows;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.data) : "r"(data_at) : "memory");
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.stride) : "r"(stride_at) : "memory");
  return rows;
}

__device__ inline std::int64_t load_key(std::uint32_t address) {
  std::int64_t key;
  asm volatile("ld.shared.s64 %0, [%1];" : "=l"(key) : "r"(address) : "memory");
  return key;
}

// The rows of a work tile: consecutive queries.
struct WorkTileRows {
  const cuda::WorkTile& work_tile;

  __device__ __forceinline__ auto positions(int tile_row, std::int64_t first_key) const {
    return [first = work_tile.position - first_key + tile_row](int offset) { return first + offset; };
  }
  __device__ std::int64_t key_length() const { return work_tile.key_length; }
};

// The addresses of one work tile's KV tiles.
template <class C>
struct TileMap {
  const cuda::AttentionParams& p;
  const cuda::WorkTile& work_tile;
  TileAddress* tile_addresses;
  int kv_head;

  // log2 of the page runs per tile. kMinPageRunKeys and the tile size are powers of two, and so is their ratio.
  static_assert((C::kKeyTile & (C::kKeyTile - 1)) == 0 && C::kKeyTile / kMinPageRunKeys <= kTileAddresses / 4);
  __device__ int page_runs_log2() const { return __ffs(p.tables.page_runs) - 1; }
  __device__ int page_run_log2() const { return __ffs(C::kKeyTile) - 1 - page_runs_log2(); }
  __device__ int page_run_keys() const { return 1 << page_run_log2(); }

  // Resolves entries [first, first + count) of the work tile, count ≤ 32. Called by the first warp.
  __device__ void resolve(int first, int count) const {
    const int i = first + static_cast<int>(threadIdx.x);
    const int tile_number = i >> page_runs_log2();
    if (static_cast<int>(threadIdx.x) >= count || tile_number >= work_tile.tiles) return;
    const auto [tile, page_runs] = cuda::tile_of_kv_loop(p.tables, work_tile, tile_number);
    const int page_run = i & (p.tables.page_runs - 1);
    const cuda::SourceEntry& source = cuda::source_of(p.tables, page_runs->source);
    TileAddress tile_address;
    tile_address.first_key = tile * C::kKeyTile;
    const std::int64_t left = work_tile.key_length - tile_address.first_key - page_run * page_run_keys();
    // Without keys, any row: its address is not read.
    const std::int64_t row = page_runs[left > 0 ? page_run : 0].row;
    tile_address.k = {static_cast<const char*>(source.k) + 2 * cuda::k_offset(source, row, kv_head),
                      2 * source.k_token_stride};
    tile_address.v = {static_cast<const char*>(source.v) + 2 * cuda::v_offset(source, row, kv_head),
                      2 * source.v_token_stride};
    tile_address.keys = left <= 0 ? 0 : left < page_run_keys() ? static_cast<std::int32_t>(left) : page_run_keys();
    if constexpr (C::kPositions) {
      const std::int64_t map_entry = (page_runs - p.tables.tiles) >> page_runs_log2();
      tile_address.first_key = reinterpret_cast<std::int64_t>(
          p.tables.positions + (map_entry * p.tables.position_lists + work_tile.position_list) * C::kKeyTile);
      tile_address.masked = tile_number < work_tile.unmasked_begin || tile_number >= work_tile.unmasked_end;
    } else {
      const std::int64_t last_position = work_tile.position + C::kQueryTile - 1;
      tile_address.masked =
          Visibility(p.mask, work_tile.key_length)
              .coverage(work_tile.position, last_position, tile_address.first_key, C::kKeyTile) != Coverage::kWhole;
    }
    tile_addresses[i % kTileAddresses] = tile_address;
  }

  // Called with ascending tile numbers. Resolves the next half as soon as it is free.
  __device__ void resolve_ahead(int next_tile) const {
    const int next = next_tile << page_runs_log2();
    if (next % (kTileAddresses / 2) == kTileAddresses / 4 && next > kTileAddresses / 2) {
      resolve(next / (kTileAddresses / 2) * (kTileAddresses / 2) + kTileAddresses / 2, kTileAddresses / 2);
    }
  }

  __device__ std::uint32_t tile_address(int tile) const {
    return cuda::shared_address(tile_addresses) +
           static_cast<std::uint32_t>((tile << page_runs_log2()) % kTileAddresses * kTileAddressBytes);
  }
  __device__ __forceinline__ void copy_k(int tile, std::uint32_t target) const {
    copy<C::kDim>(tile_address(tile), 0, target);
  }
  __device__ __forceinline__ void copy_v(int tile, std::uint32_t target) const {
    copy<C::kDimV>(tile_address(tile), offsetof(TileAddress, v), target);
  }
  __device__ bool masked(int tile) const { return cuda::load_shared_number(tile_address(tile) + 44) != 0; }

 private:
  // Copies K or V of the tile whose first page run's TileAddress is at `at`. `offset`: of k or v in a TileAddress.
  template <int kDim>
  __device__ __forceinline__ void copy(std::uint32_t at, std::uint32_t offset, std::uint32_t target) const {
    if (p.tables.page_runs == 1) {
      cuda::copy_tile<C::kKeyTile, kDim, C::kThreads>(target, load_rows(at + offset, at + offset + 8), 0,
                                                      cuda::load_shared_number(at + 40));
      return;
    }
    cuda::copy_page_runs<C::kKeyTile, kDim, C::kThreads>(target, page_run_log2(), [&](int page_run) {
      const std::uint32_t tile_address = at + static_cast<std::uint32_t>(page_run * kTileAddressBytes);
      return cuda::PageRunRows{load_rows(tile_address + offset, tile_address + offset + 8),
                               cuda::load_shared_number(tile_address + 40)};
    });
  }
};

}  // namespace ringattn::sm80
