// SPDX-License-Identifier: Apache-2.0
// Values of a compressed cache for the warps with outputs: codes come from shared memory transposed, as fragments of a
// product, and become elements in registers, with the bits of kernels/row_codes.hpp.
//
// The least that is transposed is 16 bits: of 8 bits the codes of two neighbouring columns, of 4 bits those of four. So
// a lane has these of two keys, and a block of 8 columns of a product is every second or fourth column of 16 or 32.
#pragma once

#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/compressed_values.cuh"
#include "kernels/sm90/decode/sliced_outputs.cuh"

namespace ringattn::sm90 {

template <class C>
class PackedValues {
 public:
  // Of the products of 16 keys: codes of keys 2t, 2t + 1 and those 8 behind, where t is lane % 4, and their numbers.
  struct Fragment {
    std::uint32_t codes[2];
    std::uint32_t numbers[4];
  };
  struct Elements {
    std::uint32_t v[kOutBlocks<C>][2];
  };
  // How codes become elements. kByRow: rows have numbers, else there is one scale. kUsual: no pair rounds twice.
  template <RowCoding kCoding, bool kByRow = true, bool kUsual = true>
  struct Way {
    static constexpr bool kFour = kCoding == RowCoding::kInt4Token;
    static constexpr int kRowBytes = kFour ? C::kSliceColumns / 2 : C::kSliceColumns;
  };

  __device__ __forceinline__ PackedValues(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : p_(p), map_(map), lane_(thread_of_cta() % 32) {
    const bool four = p.v.four_bits();
    const int warp = thread_of_cta() / 32 - C::kScoreWarps;
    const int first = warp * 8 * kBlocks;  // columns of the slice
    chunk_ = first / (four ? 32 : 16);
    const int nth = first % (four ? 32 : 16) / 8;  // of the columns that a lane has side by side
    v_at_ = swizzled_chunk(p.v.row_bytes, lane_ % 16, chunk_);
    first_column_ = chunk_ * (four ? 32 : 16) + nth;
    every_ = four ? 4 : 2;
    shift_ = nth * 4;
    bytes_of_column_ = nth == 0 ? 0x4420U : 0x4431U;
    pair_at_ = four ? (static_cast<int>(rank) * C::kSliceColumns + first) / p.v.group * 4 : 0;
    stages_ = map.packed(p, true, 0);
  }

  __device__ __forceinline__ void begin(const UnitNote& note) {
    const int head = note.get(UnitNote::kKvHead);
    number_at_ = C::kKeyTile * p_.v.row_bytes + p_.v.number_offset(head) + pair_at_;
    if (p_.v.number_bytes == 0) scale_ = table_scale(p_.v, head);
  }

  // As those of TileValues.
  __device__ __forceinline__ bool here() const {
    return barrier_ended(map_.packed_full(true, lap_.place), lap_.parity);
  }
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.packed_full(true, lap_.place), lap_.parity);
    if (keys < C::kKeyTile) clear_tail(next_stage(), keys);
  }
  template <RowCoding kCoding, bool kByRow, bool kUsual>
  __device__ __forceinline__ void take(Way<kCoding, kByRow, kUsual> way, bool is_next) {
    if (!is_next) return;
    const std::uint32_t packed = next_stage();
    codes_ = packed + v_at_;
    numbers_ = number_of(packed, lane_ % 4 * 2);
    if constexpr (way.kFour) look_at_pairs(packed);
    lap_.advance(p_.v.stages);
  }
  template <RowCoding kCoding, bool kByRow, bool kUsual>
  __device__ __forceinline__ void fetch(Way<kCoding, kByRow, kUsual> way, Fragment& to, int step) const {
    cuda::load_matrix_pair_transposed(to.codes, codes_ + static_cast<std::uint32_t>(step * 16 * way.kRowBytes));
    if constexpr (kByRow) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to.numbers[i] =
            load_word(numbers_ + static_cast<std::uint32_t>((step * 16 + i / 2 * 8 + i % 2) * kNumberPitch));
      }
    }
  }
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.packed_empty(true, released_.place);
    released_.advance(p_.v.stages);
    return barrier;
  }

  template <class With>
  __device__ __forceinline__ void choose_way(const With& with) const {
    switch (p_.v.coding) {
      case RowCoding::kFp8:
        if (p_.v.number_bytes > 0) {
          with(Way<RowCoding::kFp8>());
        } else {
          with(Way<RowCoding::kFp8, false>());
        }
        break;
      case RowCoding::kInt8:
        with(Way<RowCoding::kInt8>());
        break;
      default:
        with(Way<RowCoding::kInt4Token>());
        break;
    }
  }
  template <class WayOfAll, class With>
  __device__ __forceinline__ void choose_way_of_tile(WayOfAll way, const With& with) const {
    if constexpr (way.kFour) {
      if (!usual_) {
        with(Way<RowCoding::kInt4Token, true, false>());
        return;
      }
    }
    with(way);
  }

  template <RowCoding kCoding, bool kByRow, bool kUsual>
  __device__ __forceinline__ Elements elements(Way<kCoding, kByRow, kUsual>, const Fragment& of) const {
    Elements made;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCoding == RowCoding::kInt4Token) {
        const std::uint32_t scales = __byte_perm(of.numbers[2 * half], of.numbers[2 * half + 1], 0x5410);
        const std::uint32_t zeros = __byte_perm(of.numbers[2 * half], of.numbers[2 * half + 1], 0x7632);
        const std::uint32_t codes = of.codes[half] >> shift_;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          made.v[n][half] = two_of_four_bits<Element>(codes >> 4 * n, scales, zeros, kUsual);
        }
      } else {
        const float scales[2] = {kByRow ? __uint_as_float(of.numbers[2 * half]) : scale_,
                                 kByRow ? __uint_as_float(of.numbers[2 * half + 1]) : scale_};
        const auto join = [&](float x, float y) {
          return cuda::Products<Element>::pack(__fmul_rn(x, scales[0]), __fmul_rn(y, scales[1]));
        };
        constexpr bool kFp8 = kCoding == RowCoding::kFp8;
        if constexpr (kBlocks == 2) {
          float x[4];
          widen_codes<kFp8>(of.codes[half], x);
          made.v[0][half] = join(x[0], x[2]);
          made.v[1][half] = join(x[1], x[3]);
        } else {
          float x[2];
          widen_codes<kFp8>(__byte_perm(of.codes[half], 0, bytes_of_column_), x);
          made.v[0][half] = join(x[0], x[1]);
        }
      }
    }
    return made;
  }

  // As TileValues::for_columns(); one by one where this warp has no neighbours.
  template <class With>
  __device__ __forceinline__ void for_columns(const float (&o)[kOutBlocks<C>][4], int half, const With& with) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = first_column_ + (lane_ % 4 * 2 + i) * every_;
      if constexpr (kBlocks == 2) {
        with(column, o[0][2 * half + i], o[1][2 * half + i]);
      } else {
        with(column, o[0][2 * half + i]);
      }
    }
  }

 private:
  using Element = typename C::Element;
  static constexpr int kBlocks = kOutBlocks<C>;
  static_assert(kBlocks == 1 || kBlocks == 2);

  __device__ __forceinline__ std::uint32_t number_of(std::uint32_t packed, int row) const {
    return packed + static_cast<std::uint32_t>(number_at_ + row * kNumberPitch);
  }

  // Codes and numbers of the rows behind `keys` become zeros, and so do their elements.
  __device__ __forceinline__ void clear_tail(std::uint32_t packed, int keys) const {
#pragma unroll 1
    for (int row = keys + lane_; row < C::kKeyTile; row += 32) {
      cuda::store_shared(packed + swizzled_chunk(p_.v.row_bytes, row, chunk_), uint4{0, 0, 0, 0});
      if (p_.v.number_bytes > 0) cuda::store_shared(number_of(packed, row), 0U);
    }
    proxy_fence();  // the copy engine writes there next
    __syncwarp();
  }
  // A lane looks at those of four rows.
  __device__ __forceinline__ void look_at_pairs(std::uint32_t packed) {
    constexpr int kRows = C::kKeyTile / 32;
    std::uint32_t pairs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) pairs[i] = load_word(number_of(packed, 32 * i + lane_));
    bool twice = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) twice |= rounds_twice<Element>(pairs[i]);
    usual_ = !__any_sync(0xffffffffU, twice);
  }
  __device__ __forceinline__ std::uint32_t next_stage() const {
    return stages_ + lap_.place * static_cast<std::uint32_t>(p_.v.stage_bytes);
  }

  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const int lane_;
  int chunk_;         // 16 bytes of each row that this warp's codes are in
  int first_column_;  // of the slice: this warp's, of which it has each `every_`-th one, or two side by side
  int every_;
  int shift_;                      // bits in front of the lane's columns in 16 bits
  std::uint32_t bytes_of_column_;  // of a word that has two columns of two keys: those of the warp's
  int pair_at_, number_at_ = 0;    // bytes, in a row's numbers and in a stage
  std::uint32_t v_at_;             // where this lane's share begins
  std::uint32_t stages_;           // where the first one lies
  float scale_ = 0.0F;
  bool usual_ = true;
  std::uint32_t codes_ = 0, numbers_ = 0;  // of the tile taken last
  PackedLap lap_, released_;
};

}  // namespace ringattn::sm90
