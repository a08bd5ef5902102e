// SPDX-License-Identifier: Apache-2.0
// The warps of the sliced kernel that make elements of codes: four take the tiles of K in the order in which they are
// fetched, four those of V, each 32 rows of a tile. What they write is what the copy engine brings of a plain cache.
#pragma once

#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/compressed_values.cuh"

namespace ringattn::sm90 {

// Where chunk `chunk` of 8 columns of a row lies in a tile whose panels have rows of kRowBytes.
template <int kKeyTile, int kRowBytes>
__device__ __forceinline__ std::uint32_t tile_chunk(int row, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const auto at = static_cast<std::uint32_t>(row * kRowBytes + chunk % kChunks * 16);
  return static_cast<std::uint32_t>(chunk / kChunks * kKeyTile * kRowBytes) +
         (at ^ ((at >> 7 & static_cast<std::uint32_t>(kChunks - 1)) << 4));
}

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_words(std::uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

// Tiles of kColumns columns. `first_column`: of the tensor's, the tile's first one.
template <class Element, int kKeyTile, int kDim, int kColumns, int kRowBytes>
class TileConverter {
 public:
  __device__ __forceinline__ TileConverter(const PackedTensor& tensor, int heads, int first_column)
      : t_(tensor),
        heads_(heads),
        first_column_(first_column),
        first_row_(thread_of_cta() / 32 % kConvertWarps * kRows),
        lane_(thread_of_cta() % 32) {}

  // Rows of the tile that begins at key `key` of a sequence of `length` keys.
  __device__ __forceinline__ void convert(std::uint32_t packed, std::uint32_t tile, int sequence, int length, int head,
                                          int key) const {
    const std::uint32_t numbers = packed + static_cast<std::uint32_t>(kKeyTile * t_.row_bytes);
    switch (t_.coding) {
      case RowCoding::kFp8:
        eight<true>(packed, numbers, tile, head);
        break;
      case RowCoding::kInt8:
        eight<false>(packed, numbers, tile, head);
        break;
      case RowCoding::kInt4Token:
        four_by_token(packed, numbers, tile);
        break;
      default:
        four_by_channel(packed, numbers, tile);
        __syncwarp();
        copy_tail(tile, sequence, length, head, key);
        break;
    }
  }

 private:
  static constexpr int kRows = 32;  // of a warp
  static_assert(kKeyTile == kRows * kConvertWarps);

  __device__ __forceinline__ static std::uint32_t chunk(int row, int chunk) {
    return tile_chunk<kKeyTile, kRowBytes>(row, chunk);
  }

  // A lane takes 16 columns of a row at a time.
  template <bool kFp8>
  __device__ __forceinline__ void eight(std::uint32_t packed, std::uint32_t numbers, std::uint32_t tile,
                                        int head) const {
    constexpr int kLanes = kColumns / 16;  // of a row
    constexpr int kStep = 32 / kLanes;     // rows at a time
    const int in_row = lane_ % kLanes;
    // Eight lanes store one of their two chunks each, into eight places of a line: those of the second panel, whose
    // rows are long, turn theirs round.
    const int swap = kColumns > 64 ? in_row / 4 : 0;
    float scale = 0.0F;
    if (t_.number_bytes == 0) {
      scale = __ldg(reinterpret_cast<const float*>(t_.table) + (t_.scales == ScaleGrain::kHead ? head : 0));
    }
    // Several rows are asked for before the first is stored: loads don't pass stores, which may be to the same place.
    constexpr int kAhead = kColumns > 64 ? 4 : 2;
#pragma unroll 1
    for (int begin = 0; begin < kRows / kStep; begin += kAhead) {
      const int first_row = first_row_ + begin * kStep + lane_ / kLanes;
      uint4 codes[kAhead];
      float of_row[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = first_row + i * kStep;
        codes[i] = cuda::load_shared_16(packed + static_cast<std::uint32_t>(row * kColumns + in_row * 16));
        of_row[i] = t_.number_bytes == 0 ? scale : load_float(numbers + static_cast<std::uint32_t>(row * 4));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = first_row + i * kStep;
        const uint2 a = eight_bits<Element, kFp8>(codes[i].x, of_row[i]);
        const uint2 b = eight_bits<Element, kFp8>(codes[i].y, of_row[i]);
        const uint2 c = eight_bits<Element, kFp8>(codes[i].z, of_row[i]);
        const uint2 d = eight_bits<Element, kFp8>(codes[i].w, of_row[i]);
        const uint4 first{a.x, a.y, b.x, b.y}, second{c.x, c.y, d.x, d.y};
        cuda::store_shared(tile + chunk(row, 2 * in_row + swap), swap == 0 ? first : second);
        cuda::store_shared(tile + chunk(row, 2 * in_row + 1 - swap), swap == 0 ? second : first);
      }
    }
  }

  // Of 4 bits a lane takes 8 columns of a row at a time, the same ones of all of its rows.
  static constexpr int kWords = kColumns / 8;  // of a row
  static constexpr int kStep = 32 / kWords;    // rows at a time
  static_assert(kWords <= 16);

  // number(row): what set(pairs, number) makes a row's pairs of. As above, four rows are asked for at a time.
  template <bool kExact, class Number, class Set>
  __device__ __forceinline__ void four_rows(std::uint32_t packed, std::uint32_t tile, EightPairs& pairs,
                                            const Number& number, const Set& set) const {
    constexpr int kAhead = 4;
    static_assert(kRows % (kAhead * kStep) == 0);
    const int word = lane_ % kWords;
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kAhead * kStep) {
      const int first_row = first_row_ + begin + lane_ / kWords;
      std::uint32_t codes[kAhead], numbers[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = first_row + i * kStep;
        codes[i] = load_word(packed + static_cast<std::uint32_t>(row * (kColumns / 2) + word * 4));
        numbers[i] = number(row);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        set(pairs, numbers[i]);
        cuda::store_shared(tile + chunk(first_row + i * kStep, word), four_bits<Element, kExact>(codes[i], pairs));
      }
    }
  }

  __device__ __forceinline__ void four_by_token(std::uint32_t packed, std::uint32_t numbers, std::uint32_t tile) const {
    // Of the pairs of 32 channels of this lane's columns.
    const std::uint32_t pair = numbers + static_cast<std::uint32_t>((first_column_ + lane_ % kWords * 8) / 32 * 4);
    // A lane looks at those of one row that this tile needs.
    bool twice = false;
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int at = (first_row_ + lane_) * t_.number_bytes + (first_column_ / 32 + i) * 4;
      twice = twice || rounds_twice<Element>(load_word(numbers + static_cast<std::uint32_t>(at)));
    }
    EightPairs pairs;
    const auto number = [&](int row) { return load_word(pair + static_cast<std::uint32_t>(row * t_.number_bytes)); };
    const auto set = [](EightPairs& to, std::uint32_t of_row) { to.set(of_row); };
    if (__any_sync(0xffffffffU, twice)) [[unlikely]] {
      four_rows<false>(packed, tile, pairs, number, set);
    } else {
      four_rows<true>(packed, tile, pairs, number, set);
    }
  }

  // The warp's rows are a group, or half of one.
  __device__ __forceinline__ void four_by_channel(std::uint32_t packed, std::uint32_t numbers,
                                                  std::uint32_t tile) const {
    const int group_row = first_row_ / t_.group * t_.group;
    const int column = first_column_ + lane_ % kWords * 8;
    const int pairs_log = t_.pairs_log;  // of a row, side by side
    const auto pair_of = [&](int i) {
      const int row = group_row + ((column + i) >> pairs_log);
      const int at = row * t_.number_bytes + ((column + i) & ((1 << pairs_log) - 1)) * 4;
      return load_word(numbers + static_cast<std::uint32_t>(at));
    };
    EightPairs pairs;
    bool twice = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t pair = pair_of(i), behind = pair_of(i + 4);
      twice = twice || rounds_twice<Element>(pair) || rounds_twice<Element>(behind);
      pairs.set(i, pair, behind);
    }
    const auto none = [](int) { return 0U; };
    const auto keep = [](EightPairs&, std::uint32_t) {};
    if (__any_sync(0xffffffffU, twice)) [[unlikely]] {
      four_rows<false>(packed, tile, pairs, none, keep);
    } else {
      four_rows<true>(packed, tile, pairs, none, keep);
    }
  }

  // Tokens behind the last full group are elements.
  __device__ __forceinline__ void copy_tail(std::uint32_t tile, int sequence, int length, int head, int key) const {
    const int closed = length - length % t_.group;
    if (key + first_row_ + kRows <= closed || key + first_row_ >= length) return;
    constexpr int kChunks = kColumns / 8;
    for (int i = lane_; i < kRows * kChunks; i += 32) {
      const int row = first_row_ + i / kChunks;
      if (key + row < closed || key + row >= length) continue;
      const std::int64_t place =
          (static_cast<std::int64_t>(sequence) * t_.group + (key + row) % t_.group) * heads_ + head;
      const std::byte* const from = t_.table + (place * kDim + first_column_ + i % kChunks * 8) * 2;
      cuda::store_shared(tile + chunk(row, i % kChunks), __ldcg(reinterpret_cast<const uint4*>(from)));
    }
  }

  const PackedTensor& t_;
  const int heads_;
  const int first_column_;
  const int first_row_;
  const int lane_;
};

// K of the tiles that this CTA scores.
template <class C>
class KeyConverter {
 public:
  __device__ __forceinline__ KeyConverter(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : p_(p), map_(map), rank_(rank), tile_(p.k, p.step.fold.kv_heads, 0) {}

  __device__ __forceinline__ void take(const UnitNote& note) {
    const int unit_begin = note.get(UnitNote::kBegin);
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(note.get(UnitNote::kEnd) - unit_begin);
    if (begin == tiles_) return;
    const int sequence = note.get(UnitNote::kSequence), head = note.get(UnitNote::kKvHead);
    const int length = note.get(UnitNote::kLength);
    // As they are fetched: the reference tile, and then those of this CTA.
    std::uint32_t number = begin + static_cast<std::uint32_t>(note.get(UnitNote::kReference) - unit_begin);
    const std::uint32_t reference = number;
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));
#pragma unroll 1
    for (;;) {
      const int key = (unit_begin + static_cast<int>(number - begin)) * C::kKeyTile;
      barrier_wait(map_.packed_full(false, packed_.place), packed_.parity);
      barrier_wait(map_.k_empty(stage_.place), stage_.parity ^ 1U);
      tile_.convert(map_.packed(p_, false, packed_.place), map_.k(stage_.place), sequence, length, head, key);
      __syncwarp();
      if (thread_of_cta() % 32 == 0) {
        barrier_arrive(map_.k_full(stage_.place));
        barrier_arrive(map_.packed_empty(false, packed_.place));
      }
      stage_.advance(C::kKStages);
      packed_.advance(p_.k.stages);
      if (own == reference) own += C::kSlices;
      if (own >= tiles_) return;
      number = own;
      own += C::kSlices;
    }
  }

 private:
  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const std::uint32_t rank_;
  TileConverter<typename C::Element, C::kKeyTile, C::kDim, C::kDim, kPanelRowBytes> tile_;
  std::uint32_t tiles_ = 0;  // of all units so far
  PackedLap stage_;
  PackedLap packed_;
};

// This CTA's columns of every V.
template <class C>
class ValueConverter {
 public:
  __device__ __forceinline__ ValueConverter(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : p_(p), map_(map), tile_(p.v, p.step.fold.kv_heads, static_cast<int>(rank) * C::kSliceColumns) {}

  __device__ __forceinline__ void take(const UnitNote& note) {
    const int end = note.get(UnitNote::kEnd);
    const int sequence = note.get(UnitNote::kSequence), head = note.get(UnitNote::kKvHead);
    const int length = note.get(UnitNote::kLength);
#pragma unroll 1
    for (int tile = note.get(UnitNote::kBegin); tile < end; ++tile) {
      barrier_wait(map_.packed_full(true, packed_.place), packed_.parity);
      barrier_wait(map_.v_empty(stage_.place), stage_.parity ^ 1U);
      tile_.convert(map_.packed(p_, true, packed_.place), map_.v(stage_.place), sequence, length, head,
                    tile * C::kKeyTile);
      __syncwarp();
      if (thread_of_cta() % 32 == 0) {
        barrier_arrive(map_.v_full(stage_.place));
        barrier_arrive(map_.packed_empty(true, packed_.place));
      }
      stage_.advance(C::kVStages);
      packed_.advance(p_.v.stages);
    }
  }

 private:
  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  TileConverter<typename C::Element, C::kKeyTile, C::kDimV, C::kSliceColumns, C::kVRowBytes> tile_;
  PackedLap stage_;
  PackedLap packed_;
};

}  // namespace ringattn::sm90
