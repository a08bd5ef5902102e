// SPDX-License-Identifier: Apache-2.0
// Keys of a compressed cache for the warps that score: codes come from shared memory as fragments of a product, and
// become elements in registers, with the bits of kernels/row_codes.hpp.
//
// A fragment has 4 neighbouring columns of each 16 where a product's has two pairs, 8 columns apart. So the query rows
// lie likewise: a product adds its 16 terms at once, whichever lane has them.
#pragma once

#include <type_traits>

#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/compressed_values.cuh"
#include "kernels/sm90/decode/scorer.cuh"

namespace ringattn::sm90 {

template <class C>
class PackedKeys {
 public:
  __device__ __forceinline__ PackedKeys(const CompressedParams& p, const CompressedMap<C>& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), first_row_(first_score_block<C>() * 16) {
    const int t = lane_ % 4;
    first_column_ = p.k.four_bits() ? t % 2 * 8 + t / 2 * 4 : t * 4;
  }

  __device__ __forceinline__ void begin(const UnitNote& note) {
    sequence_ = note.get(UnitNote::kSequence);
    length_ = note.get(UnitNote::kLength);
    head_ = note.get(UnitNote::kKvHead);
    number_offset_ = p_.k.number_offset(head_);
    if (p_.k.number_bytes == 0) scale_ = table_scale(p_.k, head_);
  }

  __device__ __forceinline__ void load_queries(QueryFragments<C>& q) const {
    const bool alternate = p_.k.four_bits();  // see alternate_columns()
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = map_.q(lane_ / 4 + 8 * half, 2 * step + first_column_ / 8) +
                                 static_cast<std::uint32_t>(first_column_ % 8 * 2);
        const uint2 columns = alternate ? alternate_columns(load_words(at)) : load_words(at);
        q[step][half][0] = columns.x;
        q[step][half][1] = columns.y;
      }
    }
  }

  // As TileKeys::add_products(), of tile `tile` of the unit's sequence.
  __device__ __forceinline__ void add_products(ScoreFragments<C>& s, const QueryFragments<C>& q, int tile, bool more) {
    barrier_wait(map_.packed_full(false, lap_.place), lap_.parity);
    const std::uint32_t packed = map_.packed(p_, false, lap_.place);
    const auto add = [&]<bool kMore>(std::bool_constant<kMore>) {
      switch (p_.k.coding) {
        case RowCoding::kFp8:
          add_of_eight_bits<true, kMore>(s, q, packed);
          break;
        case RowCoding::kInt8:
          add_of_eight_bits<false, kMore>(s, q, packed);
          break;
        default:
          add_of_four_bits<true, kMore>(s, q, packed, 0);
          break;
      }
    };
    if (p_.k.four_bits() && !is_usual(packed, tile * C::kKeyTile)) {
      add_of_four_bits<false, true>(s, q, packed, tile * C::kKeyTile);  // rows that aren't there are zeros
    } else if (more) {
      add(std::true_type());
    } else {
      add(std::false_type());
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.packed_empty(false, lap_.place));
    lap_.advance(p_.k.stages);
  }

 private:
  using Element = typename C::Element;
  using Products = cuda::Products<Element>;
  static constexpr int kMine = C::kScoreBlocks;
  static constexpr int kSteps = C::kDim / 16;

  // Four columns of two words, every second one in front.
  __device__ __forceinline__ static uint2 alternate_columns(uint2 words) {
    return {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.x, words.y, 0x7632)};
  }

  // Where this lane's row of four matrices lies: rows 0 … 7 and 8 … 15 of a block, of the first 16 bytes and the next.
  template <int kRowBytes>
  __device__ __forceinline__ std::uint32_t matrices(std::uint32_t packed, int mine) const {
    return packed + swizzled_chunk(kRowBytes, first_row_ + mine * 16 + lane_ % 16, lane_ / 16);
  }
  __device__ __forceinline__ std::uint32_t numbers_of(std::uint32_t packed, int row) const {
    return packed + static_cast<std::uint32_t>(C::kKeyTile * p_.k.row_bytes + row * kNumberPitch + number_offset_);
  }

  // kMore: as `more`.
  template <bool kMore>
  __device__ __forceinline__ static void multiply(ScoreFragments<C>& s, const QueryFragments<C>& q, int step, int mine,
                                                  uint2 row, uint2 row_8_behind) {
    const std::uint32_t keys[4] = {row.x, row_8_behind.x, row.y, row_8_behind.y};
    Products::mma(s[2 * mine], keys, q[step][0][0], q[step][0][1], s[2 * mine]);
    if constexpr (kMore) Products::mma(s[2 * mine + 1], keys, q[step][1][0], q[step][1][1], s[2 * mine + 1]);
  }

  template <bool kFp8, bool kMore>
  __device__ __forceinline__ void add_of_eight_bits(ScoreFragments<C>& s, const QueryFragments<C>& q,
                                                    std::uint32_t packed) const {
    float scales[kMine][2];
    std::uint32_t at[kMine];
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      at[mine] = matrices<C::kDim>(packed, mine);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[mine][half] = scale_;
        if (p_.k.number_bytes > 0) {
          scales[mine][half] = load_float(numbers_of(packed, first_row_ + mine * 16 + half * 8 + lane_ / 4));
        }
      }
    }
    // Two steps at a time, the next two of which are on their way.
    std::uint32_t codes[2][kMine][4];
    const auto fetch = [&](int pair) {
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        cuda::load_matrix(codes[pair % 2][mine], at[mine] ^ static_cast<std::uint32_t>(pair << 5));
      }
    };
    fetch(0);
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      if (pair + 1 < kSteps / 2) fetch(pair + 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
          const auto& of = codes[pair % 2][mine];
          multiply<kMore>(s, q, 2 * pair + i, mine, eight_bits<Element, kFp8>(of[2 * i], scales[mine][0]),
                          eight_bits<Element, kFp8>(of[2 * i + 1], scales[mine][1]));
        }
      }
    }
  }

  // The pair of a channel; the warp's rows are a group, or half of one.
  __device__ __forceinline__ std::uint32_t pair_of(std::uint32_t packed, int channel) const {
    const int pairs_log = p_.k.pairs_log;  // of a row, side by side
    const int row = first_row_ / p_.k.group * p_.k.group + (channel >> pairs_log);
    return load_word(numbers_of(packed, row) + static_cast<std::uint32_t>((channel & ((1 << pairs_log) - 1)) * 4));
  }

  // Whether all of the warp's rows of the tile that begins at key `key` have codes, and no pair rounds twice.
  __device__ __forceinline__ bool is_usual(std::uint32_t packed, int key) const {
    bool twice = false;  // a lane looks at four channels
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      twice = twice || rounds_twice<Element>(pair_of(packed, lane_ / 4 % kSteps * 16 + first_column_ + i));
    }
    const int closed = length_ - length_ % p_.k.group;
    return !__any_sync(0xffffffffU, twice) && key + first_row_ + 16 * kMine <= closed;
  }

  // A row's four columns of a step, of which the lower byte of each half of `codes` has two.
  template <bool kUsual>
  __device__ __forceinline__ static uint2 columns_of(std::uint32_t codes, const std::uint32_t (&scales)[2],
                                                     const std::uint32_t (&zeros)[2]) {
    return {two_of_four_bits<Element>(codes, scales[0], zeros[0], kUsual),
            two_of_four_bits<Element>(codes >> 4, scales[1], zeros[1], kUsual)};
  }
  // The same of a row of the tile that begins at key `key`, where it is one behind the last full group.
  __device__ __forceinline__ void take_of_tail(uint2& columns, int key, int row, int step) const {
    const int group = p_.k.group;
    if (key + row < length_ - length_ % group) return;
    const std::int64_t place =
        (static_cast<std::int64_t>(sequence_) * group + (key + row) % group) * p_.step.fold.kv_heads + head_;
    const std::byte* const from = p_.k.table + (place * C::kDim + step * 16 + first_column_) * 2;
    columns = alternate_columns(__ldcg(reinterpret_cast<const uint2*>(from)));
  }

  // A word has 8 columns, the codes of four lanes 32. Each of the two steps takes 16, so lanes 2 apart exchange halves.
  template <bool kUsual, bool kMore>
  __device__ __forceinline__ void add_of_four_bits(ScoreFragments<C>& s, const QueryFragments<C>& q,
                                                   std::uint32_t packed, int key) const {
    const bool front = lane_ % 4 < 2;
    const unsigned picks[2] = {front ? 0x1100U : 0x7766U, front ? 0x5544U : 0x3322U};
    std::uint32_t later[kMine][2];  // codes of the next two steps
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      std::uint32_t scales[2][2], zeros[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t of[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) of[n] = pair_of(packed, (2 * pair + i) * 16 + first_column_ + n);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          scales[i][n] = __byte_perm(of[n], of[n + 2], 0x5410);
          zeros[i][n] = __byte_perm(of[n], of[n + 2], 0x7632);
        }
      }
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
        std::uint32_t codes[4];
        const std::uint32_t at = matrices<C::kDim / 2>(packed, mine) ^ static_cast<std::uint32_t>(pair / 2 << 5);
        if (pair % 2 == 0) {
          cuda::load_matrix(codes, at);
          later[mine][0] = codes[2];
          later[mine][1] = codes[3];
        } else {
          codes[0] = later[mine][0];
          codes[1] = later[mine][1];
        }
        const std::uint32_t others[2] = {__shfl_xor_sync(0xffffffffU, codes[0], 2),
                                         __shfl_xor_sync(0xffffffffU, codes[1], 2)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint2 rows[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            rows[half] = columns_of<kUsual>(__byte_perm(codes[half], others[half], picks[i]), scales[i], zeros[i]);
            if constexpr (!kUsual) {
              take_of_tail(rows[half], key, first_row_ + mine * 16 + half * 8 + lane_ / 4, 2 * pair + i);
            }
          }
          multiply<kMore>(s, q, 2 * pair + i, mine, rows[0], rows[1]);
        }
      }
    }
  }

  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const int lane_;
  const int first_row_;                                           // of the warp's
  int first_column_;                                              // of this lane's in each 16
  int sequence_ = 0, length_ = 0, head_ = 0, number_offset_ = 0;  // of the unit
  float scale_ = 0.0F;
  PackedLap lap_;
};

}  // namespace ringattn::sm90
