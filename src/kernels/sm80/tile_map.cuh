// SPDX-License-Identifier: Apache-2.0
// The slots and the key tiles of a work item: where its rows stand, and where its keys and values lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/device/tile_lookup.cuh"
#include "kernels/cuda/fold_params.hpp"
#include "kernels/fold.hpp"

namespace ringattn::sm80 {

// Where one head of a piece of a key tile lies, in shared memory: 48 bytes.
struct Place {
  cuda::RowsOf k;
  cuda::RowsOf v;
  std::int64_t first_key;  // of the tile, in its sequence; where C::kPositions, the address of its keys' positions
  std::int32_t keys;       // that the sequence has of the piece
  std::int32_t masked;     // whether some row of the query tile doesn't see some key of the tile
};
inline constexpr int kPlaces = 32;  // of the tile map that are held resolved: two halves, one in use, one ahead
inline constexpr int kPlaceBytes = 48;
static_assert(sizeof(Place) == kPlaceBytes && kPlaces <= 32);

// Loads by explicit instructions: what the compiler loads for itself here it makes uniform, and everyone waits.
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

// The slots of a work item: consecutive queries.
struct ItemRows {
  const cuda::WorkItem& item;

  __device__ __forceinline__ auto positions(int slot, std::int64_t first_key) const {
    return [first = item.position - first_key + slot](int behind) { return first + behind; };
  }
  __device__ std::int64_t key_length() const { return item.key_length; }
};

// The addresses of one work item's tiles.
template <class C>
struct TileMap {
  const cuda::FoldParams& p;
  const cuda::WorkItem& item;
  Place* places;
  int kv_head;

  // Pieces of a tile as a power of two: kLeastPieceKeys and the tile are, and so is what lies between.
  static_assert((C::kKeyTile & (C::kKeyTile - 1)) == 0 && C::kKeyTile / kLeastPieceKeys <= kPlaces / 4);
  __device__ int pieces_log() const { return __ffs(p.tables.pieces) - 1; }
  __device__ int piece_log() const { return __ffs(C::kKeyTile) - 1 - pieces_log(); }
  __device__ int piece_keys() const { return 1 << piece_log(); }

  // Resolves entries [first, first + count) of the item, count ≤ 32; for the first warp.
  __device__ void resolve(int first, int count) const {
    const int i = first + static_cast<int>(threadIdx.x);
    const int nth = i >> pieces_log();  // tile
    if (static_cast<int>(threadIdx.x) >= count || nth >= item.tiles) return;
    const auto [tile, pieces] = cuda::tile_of_walk(p.tables, item, nth);
    const int piece = i & (p.tables.pieces - 1);
    const cuda::SourceEntry& source = cuda::source_of(p.tables, pieces->source);
    Place place;
    place.first_key = tile * C::kKeyTile;
    const std::int64_t left = item.key_length - place.first_key - piece * piece_keys();
    const std::int64_t row = pieces[left > 0 ? piece : 0].row;  // without keys: any row, which is not read
    place.k = {static_cast<const char*>(source.k) + 2 * cuda::k_offset(source, row, kv_head),
               2 * source.k_token_stride};
    place.v = {static_cast<const char*>(source.v) + 2 * cuda::v_offset(source, row, kv_head),
               2 * source.v_token_stride};
    place.keys = left <= 0 ? 0 : left < piece_keys() ? static_cast<std::int32_t>(left) : piece_keys();
    if constexpr (C::kPositions) {
      const std::int64_t of_map = (pieces - p.tables.tiles) >> pieces_log();
      place.first_key = reinterpret_cast<std::int64_t>(
          p.tables.positions + (of_map * p.tables.position_lists + item.position_list) * C::kKeyTile);
      place.masked = nth < item.plain_begin || nth >= item.plain_end;
    } else {
      const std::int64_t last_position = item.position + C::kQueryTile - 1;
      place.masked =
          Visibility(p.mask, item.key_length).coverage(item.position, last_position, place.first_key, C::kKeyTile) !=
          Coverage::kWhole;
    }
    places[i % kPlaces] = place;
  }

  // Called with tile numbers in order; resolves the next half where the one before it is free.
  __device__ void resolve_ahead(int next_tile) const {
    const int next = next_tile << pieces_log();
    if (next % (kPlaces / 2) == kPlaces / 4 && next > kPlaces / 2) {
      resolve(next / (kPlaces / 2) * (kPlaces / 2) + kPlaces / 2, kPlaces / 2);
    }
  }

  __device__ std::uint32_t place(int tile) const {
    return cuda::shared_address(places) + static_cast<std::uint32_t>((tile << pieces_log()) % kPlaces * kPlaceBytes);
  }
  __device__ __forceinline__ void copy_k(int tile, std::uint32_t target) const {
    copy<C::kDim>(place(tile), 0, target);
  }
  __device__ __forceinline__ void copy_v(int tile, std::uint32_t target) const {
    copy<C::kDimV>(place(tile), offsetof(Place, v), target);
  }
  __device__ bool masked(int tile) const { return cuda::load_shared_number(place(tile) + 44) != 0; }

 private:
  // K or V of the tile whose first piece's place is `at`, `offset` bytes into each.
  template <int kDim>
  __device__ __forceinline__ void copy(std::uint32_t at, std::uint32_t offset, std::uint32_t target) const {
    if (p.tables.pieces == 1) {
      cuda::copy_tile<C::kKeyTile, kDim, C::kThreads>(target, load_rows(at + offset, at + offset + 8), 0,
                                                      cuda::load_shared_number(at + 40));
      return;
    }
    cuda::copy_pieces<C::kKeyTile, kDim, C::kThreads>(target, piece_log(), [&](int piece) {
      const std::uint32_t place = at + static_cast<std::uint32_t>(piece * kPlaceBytes);
      return cuda::PieceRows{load_rows(place + offset, place + offset + 8), cuda::load_shared_number(place + 40)};
    });
  }
};

}  // namespace ringattn::sm80
