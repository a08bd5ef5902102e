// SPDX-License-Identifier: Apache-2.0
// Values of a compressed cache for the warps with outputs: codes come from shared memory transposed, as fragments of a
// product, and become elements in registers, with the bits of kernels/row_codes.hpp.
//
// The least that is transposed is 16 bits: of 8 bits the codes of two neighbouring columns, of 4 bits those of four. So
// a lane has these of two keys, and neighbouring columns are 8 rows of a product apart, or in the next block of 16.
#pragma once

#include "kernels/sm90/decode/column_outputs.cuh"
#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/compressed_values.cuh"

namespace ringattn::sm90 {

// As TileColumns.
template <class C>
class PackedColumns {
 private:
  static constexpr int kWarpColumns = C::kSliceColumns / C::kOutWarps;
  // Half of a block's rows stay empty. And nobody looks at scales of 8 bits, as a lane has so few codes.
  static constexpr bool kNarrow = kWarpColumns == 8;

 public:
  static constexpr int kSharing = 1;
  static constexpr int kColumnWarps = C::kOutWarps;
  static constexpr int kBlocks = kWarpColumns > 16 ? kWarpColumns / 16 : 1;
  static constexpr int kAhead = 2;
  static constexpr bool kScoresAhead = false;
  static_assert(kNarrow || kWarpColumns == 16 || kWarpColumns == 32);

  // Of the products of 16 keys: codes of keys 2t, 2t + 1 and those 8 behind, where t is lane % 4, of 8 bits for each
  // block; and these keys' numbers, as they lie in the tile or two in a word, as they have been laid out.
  struct Fragment {
    std::uint32_t codes[2 * kBlocks];
    std::uint32_t numbers[4];
  };
  struct Elements {
    std::uint32_t v[kBlocks][4];
  };
  // How codes become elements. kUsual: of 8 bits, all of the tile's scales are elements; of 4 bits, no pair of its
  // rounds twice. kByRow: rows have numbers, else there is one scale.
  template <RowCoding kCoding, bool kUsual = true, bool kByRow = true>
  struct Way {
    static constexpr bool kFour = kCoding == RowCoding::kInt4Token;
    static constexpr int kRowBytes = kFour ? C::kSliceColumns / 2 : C::kSliceColumns;
    static constexpr bool kLaysOut = kFour || (!kNarrow && kByRow);  // numbers of tiles, for those who ask for them so
    static constexpr bool kLaidOut = kFour || kUsual;
  };

  __device__ __forceinline__ PackedColumns(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        four_(p.v.four_bits()),
        warp_(thread_of_cta() / 32 - C::kScoreWarps) {
    const int first = warp_ * kWarpColumns;  // columns of the slice
    chunk_ = first / (four_ ? 32 : 16);
    const int nth = first % (four_ ? 32 : 16) / 8;  // of the columns that a lane has side by side
    first_column_ = chunk_ * (four_ ? 32 : 16) + nth;
    shift_ = nth * 4;
    bytes_of_column_ = nth == 0 ? 0x4420U : 0x4431U;
    v_at_ = swizzled_chunk(p.v.row_bytes, lane_ % 16, chunk_ + (kBlocks == 2 && !four_ ? lane_ / 16 : 0));
    const int key = lane_ % 16;
    laid_out_ = map.numbers(warp_);
    lay_at_ = laid_out_ + static_cast<std::uint32_t>(lane_ / 16 * 32 + key % 8 / 2 * 8 + key / 8 * 4 + key % 2 * 2);
    laid_out_ += static_cast<std::uint32_t>(lane_ % 4 * 8);
    pair_at_ = four_ ? (static_cast<int>(rank) * C::kSliceColumns + first) / p.v.group * 4 : 0;
    stages_ = map.packed(p, true, 0);
  }

  __device__ __forceinline__ void begin(const UnitNote& note) {
    const int head = note.get(UnitNote::kKvHead);
    number_at_ = C::kKeyTile * p_.v.row_bytes + p_.v.number_offset(head) + pair_at_;
    if (p_.v.number_bytes == 0) scale_ = table_scale(p_.v, head);
  }

  __device__ __forceinline__ bool here() const {
    return barrier_ended(map_.packed_full(true, lap_.place), lap_.parity);
  }
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.packed_full(true, lap_.place), lap_.parity);
    if (keys < C::kKeyTile) clear_tail(next_stage(), keys);
  }
  template <RowCoding kCoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ void take(Way<kCoding, kUsual, kByRow> way) {
    const std::uint32_t packed = next_stage();
    codes_ = packed + v_at_;
    numbers_ = number_of(packed, lane_ % 4 * 2);
    if constexpr (way.kLaysOut) {
#pragma unroll
      for (int i = 0; i < kLooks; ++i) looked_at_[i] = load_word(number_of(packed, 32 * i + lane_));
      lay_out<kCoding>();
    }
    lap_.advance(p_.v.stages);
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
          with(Way<RowCoding::kFp8, !kNarrow>());
        } else {  // codes may be NaN, which a product of elements doesn't see
          with(Way<RowCoding::kFp8, false, false>());
        }
        break;
      case RowCoding::kInt8:
        with(Way<RowCoding::kInt8, !kNarrow>());
        break;
      default:
        with(Way<RowCoding::kInt4Token>());
        break;
    }
  }
  template <RowCoding kCoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ bool is_usual(Way<kCoding, kUsual, kByRow> way) const {
    if constexpr (way.kFour) {
      bool twice = false;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) twice |= rounds_twice<Element>(looked_at_[i]);
      return !__any_sync(0xffffffffU, twice);
    } else if constexpr (!kUsual) {
      return true;
    } else {
      std::uint32_t deviations = 0;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) deviations |= scale_deviation<Element>(looked_at_[i]);
      return __all_sync(0xffffffffU, are_element_scales<Element>(deviations));
    }
  }
  template <RowCoding kCoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ static constexpr Way<kCoding, false, kByRow> unusual(Way<kCoding, kUsual, kByRow>) {
    return {};
  }
  template <RowCoding kCoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ void fetch(Way<kCoding, kUsual, kByRow> way, Fragment& to, int step) const {
    const std::uint32_t at = codes_ + static_cast<std::uint32_t>(step * 16 * way.kRowBytes);
    if constexpr (kBlocks == 2 && !way.kFour) {
      cuda::load_matrix_transposed(to.codes, at);
    } else {
      std::uint32_t codes[2];
      cuda::load_matrix_pair_transposed(codes, at);
      to.codes[0] = codes[0];
      to.codes[1] = codes[1];
    }
    if constexpr (way.kLaidOut) {
      const auto from = laid_out_ + static_cast<std::uint32_t>(step * 32);
      const uint2 scales = load_words(from);
      to.numbers[0] = scales.x;
      to.numbers[1] = scales.y;
      if constexpr (way.kFour) {
        const uint2 zeros = load_words(from + kZeros);
        to.numbers[2] = zeros.x;
        to.numbers[3] = zeros.y;
      }
    } else if constexpr (kByRow) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to.numbers[i] =
            load_word(numbers_ + static_cast<std::uint32_t>((step * 16 + i / 2 * 8 + i % 2) * kNumberPitch));
      }
    }
  }

  template <RowCoding kCoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ Elements elements(Way<kCoding, kUsual, kByRow>, const Fragment& of) const {
    Elements made;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCoding == RowCoding::kInt4Token) {
        const std::uint32_t scales = of.numbers[half], zeros = of.numbers[2 + half];
        const std::uint32_t codes = kWarpColumns < 32 ? of.codes[half] >> shift_ : of.codes[half];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          made.v[n][2 * half] = two_of_four_bits<Element>(codes >> 8 * n, scales, zeros, kUsual);
          made.v[n][2 * half + 1] =
              kNarrow ? 0U : two_of_four_bits<Element>(codes >> (8 * n + 4), scales, zeros, kUsual);
        }
      } else {
        constexpr bool kFp8 = kCoding == RowCoding::kFp8;
        const auto pairs = [&]<class Scales>(const Scales& scales) {
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            const std::uint32_t codes = of.codes[2 * n + half];
            if constexpr (kNarrow) {
              made.v[n][2 * half] = two_of_eight_bits<Element, kFp8>(__byte_perm(codes, 0, bytes_of_column_), scales);
              made.v[n][2 * half + 1] = 0;
            } else {
              const CodePairs two = code_pairs<Element, kFp8>(codes, scales);
              made.v[n][2 * half] = two.even;
              made.v[n][2 * half + 1] = two.odd;
            }
          }
        };
        if constexpr (kUsual) {
          pairs(ElementScales{of.numbers[half]});
        } else if constexpr (kByRow) {
          pairs(WideScales{__uint_as_float(of.numbers[2 * half]), __uint_as_float(of.numbers[2 * half + 1])});
        } else {
          pairs(WideScales{scale_, scale_});
        }
      }
    }
    return made;
  }

  __device__ __forceinline__ bool has_first() const { return warp_ == 0; }
  __device__ __forceinline__ void leave(float* outputs, int n, const float4& columns) const {
    const auto store = [&](int column, auto... x) { store_columns(outputs + cuda::fragment_place(column), x...); };
    finish(store, n, columns);
  }
  template <class Write>
  __device__ __forceinline__ void finish(const Write& write, int n, const float4& columns) const {
    const int every = four_ ? 4 : 2;
    const int column = first_column_ + lane_ / 8 * 2 * every + n * (four_ ? 2 : 16);
    if constexpr (kNarrow) {
      write(column, columns.x);
      write(column + every, columns.y);
    } else {
      write(column, columns.x, columns.z);
      write(column + every, columns.y, columns.w);
    }
  }

 private:
  using Element = typename C::Element;
  static constexpr int kLooks = C::kKeyTile / 32;
  static constexpr std::uint32_t kZeros = 2 * C::kKeyTile;  // behind the scales

  __device__ __forceinline__ static void store_columns(float* to, float x) { __stcg(to, x); }
  __device__ __forceinline__ static void store_columns(float* to, float x, float y) {
    __stcg(reinterpret_cast<float2*>(to), float2{x, y});
  }

  __device__ __forceinline__ std::uint32_t number_of(std::uint32_t packed, int row) const {
    return packed + static_cast<std::uint32_t>(number_at_ + row * kNumberPitch);
  }

  // The numbers of the tile as products ask for them: those of the four keys of a lane and step side by side.
  template <RowCoding kCoding>
  __device__ __forceinline__ void lay_out() const {
    __syncwarp();  // nobody reads those of the tile before any more
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const std::uint32_t at = lay_at_ + static_cast<std::uint32_t>(64 * i);
      const std::uint32_t number = looked_at_[i];
      if constexpr (kCoding == RowCoding::kInt4Token) {
        cuda::store_shared_half(at, number);
        cuda::store_shared_half(at + kZeros, number >> 16);
      } else {
        cuda::store_shared_half(at, element_scales<Element>(number, number, kCoding == RowCoding::kFp8));
      }
    }
    __syncwarp();
  }

  // Codes of the rows behind `keys` become zeros, and so do their elements.
  __device__ __forceinline__ void clear_tail(std::uint32_t packed, int keys) const {
#pragma unroll 1
    for (int row = keys + lane_; row < C::kKeyTile; row += 32) {
      cuda::store_shared(packed + swizzled_chunk(p_.v.row_bytes, row, chunk_), uint4{0, 0, 0, 0});
      if (kBlocks == 2 && !four_) {
        cuda::store_shared(packed + swizzled_chunk(p_.v.row_bytes, row, chunk_ + 1), uint4{0, 0, 0, 0});
      }
      if (p_.v.number_bytes > 0) cuda::store_shared(number_of(packed, row), four_ ? 0U : __float_as_uint(1.0F));
    }
    proxy_fence();  // the copy engine writes there next
    __syncwarp();
  }
  __device__ __forceinline__ std::uint32_t next_stage() const {
    return stages_ + lap_.place * static_cast<std::uint32_t>(p_.v.stage_bytes);
  }

  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const int lane_;
  const bool four_;
  const int warp_;
  int chunk_;                              // 16 bytes of each row that this warp's codes begin in
  int first_column_;                       // of the slice: this warp's
  int shift_;                              // bits in front of the lane's columns in 16 bits
  std::uint32_t bytes_of_column_;          // of a word that has two columns of two keys: those of the warp's
  int pair_at_, number_at_ = 0;            // bytes, in a row's numbers and in a stage
  std::uint32_t v_at_;                     // where this lane's share begins
  std::uint32_t stages_;                   // where the first one lies
  float scale_ = 0.0F;                     // of all rows, where they have none of their own
  std::uint32_t codes_ = 0, numbers_ = 0;  // of the tile taken last
  std::uint32_t laid_out_, lay_at_;        // where the lane's share of laid-out numbers begins, and what it lays out
  std::uint32_t looked_at_[kLooks]{};      // of its rows' numbers, a lane's share
  PackedLap lap_, released_;
};

}  // namespace ringattn::sm90
