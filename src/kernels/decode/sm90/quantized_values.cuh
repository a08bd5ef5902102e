// SPDX-License-Identifier: Apache-2.0
// V of a quantized cache for the output warps: values are loaded from shared memory transposed, as mma fragments, and
// dequantized in registers, bitwise as in kernels/quant/row_quantization.hpp.
//
// ldmatrix transposes units of 16 bits: two adjacent columns of 8-bit values, or four of 4-bit values. So a lane has
// these of two keys, and adjacent columns become mma rows that are 8 apart, or rows of the next block of 16.
#pragma once

#include "kernels/decode/sm90/column_outputs.cuh"
#include "kernels/decode/sm90/compressed_map.cuh"
#include "kernels/decode/sm90/dequantize.cuh"

namespace ringattn::sm90 {

// As TileColumns.
template <class C>
class QuantizedColumns {
 private:
  static constexpr int kWarpColumns = C::kSliceColumns / C::kOutWarps;
  // Half of a block's M is unused. 8-bit scales are not tested, since a lane has too few values to gain from it.
  static constexpr bool kNarrow = kWarpColumns == 8;

 public:
  static constexpr int kSharing = 1;
  static constexpr int kColumnWarps = C::kOutWarps;
  static constexpr int kBlocks = kWarpColumns > 16 ? kWarpColumns / 16 : 1;
  static constexpr int kAhead = 2;
  static constexpr bool kScoresAhead = false;
  static_assert(kNarrow || kWarpColumns == 16 || kWarpColumns == 32);

  // For the mma of 16 keys: the values of keys 2t, 2t + 1, 2t + 8 and 2t + 9, where t is lane % 4, for 8 bits of each
  // block; and these keys' qparams, as in the tile, or two in a word if they have been reordered.
  struct Fragment {
    std::uint32_t quantized[2 * kBlocks];
    std::uint32_t qparams[4];
  };
  struct Elements {
    std::uint32_t v[kBlocks][4];
  };
  // How values are dequantized. kUsual: for 8 bits, all scales of the tile are elements; for 4 bits, no pair of it
  // rounds twice. kByRow: rows have qparams, else there is one scale.
  template <RowEncoding kEncoding, bool kUsual = true, bool kByRow = true>
  struct Path {
    static constexpr bool kFour = kEncoding == RowEncoding::kInt4Token;
    static constexpr int kRowBytes = kFour ? C::kSliceColumns / 2 : C::kSliceColumns;
    // reorders the qparams of tiles for paths that need it
    static constexpr bool kLaysOut = kFour || (!kNarrow && kByRow);
    static constexpr bool kLaidOut = kFour || kUsual;
  };

  __device__ __forceinline__ QuantizedColumns(const CompressedParams& p, const CompressedMap<C>& map,
                                              std::uint32_t rank)
      : p_(p),
        map_(map),
        lane_(thread_of_cta() % 32),
        four_(p.v.four_bits()),
        warp_(thread_of_cta() / 32 - C::kScoreWarps) {
    const int first = warp_ * kWarpColumns;  // this warp's first column in the slice
    chunk_ = first / (four_ ? 32 : 16);
    // index of this warp's column among the adjacent ones that a lane has
    const int nth = first % (four_ ? 32 : 16) / 8;
    first_column_ = chunk_ * (four_ ? 32 : 16) + nth;
    shift_ = nth * 4;
    bytes_of_column_ = nth == 0 ? 0x4420U : 0x4431U;
    v_at_ = swizzled_chunk(p.v.row_bytes, lane_ % 16, chunk_ + (kBlocks == 2 && !four_ ? lane_ / 16 : 0));
    const int key = lane_ % 16;
    laid_out_ = map.qparams(warp_);
    lay_at_ = laid_out_ + static_cast<std::uint32_t>(lane_ / 16 * 32 + key % 8 / 2 * 8 + key / 8 * 4 + key % 2 * 2);
    laid_out_ += static_cast<std::uint32_t>(lane_ % 4 * 8);
    pair_at_ = four_ ? (static_cast<int>(rank) * C::kSliceColumns + first) / p.v.group * 4 : 0;
    stages_ = map.quantized_stage(p, true, 0);
  }

  __device__ __forceinline__ void begin(const WorkTileInfo& info) {
    const int head = info.get(WorkTileInfo::kKvHead);
    qparam_at_ = C::kKeyTile * p_.v.row_bytes + p_.v.qparam_offset(head) + pair_at_;
    if (p_.v.qparam_bytes == 0) scale_ = table_scale(p_.v, head);
  }

  __device__ __forceinline__ bool landed() const {
    return barrier_ended(map_.quantized_full(true, pipeline_state_.index), pipeline_state_.parity);
  }
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.quantized_full(true, pipeline_state_.index), pipeline_state_.parity);
    if (keys < C::kKeyTile) clear_tail(next_stage(), keys);
  }
  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ void acquire(Path<kEncoding, kUsual, kByRow> path) {
    const std::uint32_t quantized_stage = next_stage();
    quantized_ = quantized_stage + v_at_;
    qparams_ = qparam_of(quantized_stage, lane_ % 4 * 2);
    if constexpr (path.kLaysOut) {
#pragma unroll
      for (int i = 0; i < kLaneQparams; ++i) lane_qparams_[i] = load_word(qparam_of(quantized_stage, 32 * i + lane_));
      lay_out<kEncoding>();
    }
    pipeline_state_.advance(p_.v.stages);
  }
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.quantized_empty(true, released_.index);
    released_.advance(p_.v.stages);
    return barrier;
  }

  template <class With>
  __device__ __forceinline__ void choose_path(const With& with) const {
    switch (p_.v.encoding) {
      case RowEncoding::kFp8:
        if (p_.v.qparam_bytes > 0) {
          with(Path<RowEncoding::kFp8, !kNarrow>());
        } else {  // values may be NaN, which a product in the element type would not propagate
          with(Path<RowEncoding::kFp8, false, false>());
        }
        break;
      case RowEncoding::kInt8:
        with(Path<RowEncoding::kInt8, !kNarrow>());
        break;
      default:
        with(Path<RowEncoding::kInt4Token>());
        break;
    }
  }
  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ bool is_usual(Path<kEncoding, kUsual, kByRow> path) const {
    if constexpr (path.kFour) {
      bool twice = false;
#pragma unroll
      for (int i = 0; i < kLaneQparams; ++i) twice |= rounds_twice<Element>(lane_qparams_[i]);
      return !__any_sync(0xffffffffU, twice);
    } else if constexpr (!kUsual) {
      return true;
    } else {
      std::uint32_t deviations = 0;
#pragma unroll
      for (int i = 0; i < kLaneQparams; ++i) deviations |= scale_deviation<Element>(lane_qparams_[i]);
      return __all_sync(0xffffffffU, are_element_scales<Element>(deviations));
    }
  }
  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ static constexpr Path<kEncoding, false, kByRow> unusual(Path<kEncoding, kUsual, kByRow>) {
    return {};
  }
  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ void fetch(Path<kEncoding, kUsual, kByRow> path, Fragment& to, int step) const {
    const std::uint32_t at = quantized_ + static_cast<std::uint32_t>(step * 16 * path.kRowBytes);
    if constexpr (kBlocks == 2 && !path.kFour) {
      cuda::load_matrix_transposed(to.quantized, at);
    } else {
      std::uint32_t quantized[2];
      cuda::load_matrix_pair_transposed(quantized, at);
      to.quantized[0] = quantized[0];
      to.quantized[1] = quantized[1];
    }
    if constexpr (path.kLaidOut) {
      const auto from = laid_out_ + static_cast<std::uint32_t>(step * 32);
      const uint2 scales = load_words(from);
      to.qparams[0] = scales.x;
      to.qparams[1] = scales.y;
      if constexpr (path.kFour) {
        const uint2 zeros = load_words(from + kZeros);
        to.qparams[2] = zeros.x;
        to.qparams[3] = zeros.y;
      }
    } else if constexpr (kByRow) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to.qparams[i] =
            load_word(qparams_ + static_cast<std::uint32_t>((step * 16 + i / 2 * 8 + i % 2) * kQparamPitch));
      }
    }
  }

  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ Elements elements(Path<kEncoding, kUsual, kByRow>, const Fragment& of) const {
    Elements made;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kEncoding == RowEncoding::kInt4Token) {
        const std::uint32_t scales = of.qparams[half], zeros = of.qparams[2 + half];
        const std::uint32_t quantized = kWarpColumns < 32 ? of.quantized[half] >> shift_ : of.quantized[half];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          made.v[n][2 * half] = two_of_four_bits<Element>(quantized >> 8 * n, scales, zeros, kUsual);
          made.v[n][2 * half + 1] =
              kNarrow ? 0U : two_of_four_bits<Element>(quantized >> (8 * n + 4), scales, zeros, kUsual);
        }
      } else {
        constexpr bool kFp8 = kEncoding == RowEncoding::kFp8;
        const auto pairs = [&]<class Scales>(const Scales& scales) {
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            const std::uint32_t quantized = of.quantized[2 * n + half];
            if constexpr (kNarrow) {
              made.v[n][2 * half] =
                  two_of_eight_bits<Element, kFp8>(__byte_perm(quantized, 0, bytes_of_column_), scales);
              made.v[n][2 * half + 1] = 0;
            } else {
              const ElementPairs two = element_pairs<Element, kFp8>(quantized, scales);
              made.v[n][2 * half] = two.even;
              made.v[n][2 * half + 1] = two.odd;
            }
          }
        };
        if constexpr (kUsual) {
          pairs(ElementScales{of.qparams[half]});
        } else if constexpr (kByRow) {
          pairs(Fp32Scales{__uint_as_float(of.qparams[2 * half]), __uint_as_float(of.qparams[2 * half + 1])});
        } else {
          pairs(Fp32Scales{scale_, scale_});
        }
      }
    }
    return made;
  }

  __device__ __forceinline__ bool has_first() const { return warp_ == 0; }
  __device__ __forceinline__ void store_partial(float* outputs, int n, const float4& columns) const {
    const auto store = [&](int column, auto... x) { store_columns(outputs + cuda::fragment_offset(column), x...); };
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
  static constexpr int kLaneQparams = C::kKeyTile / 32;
  static constexpr std::uint32_t kZeros = 2 * C::kKeyTile;  // bytes from scales to zero points

  __device__ __forceinline__ static void store_columns(float* to, float x) { __stcg(to, x); }
  __device__ __forceinline__ static void store_columns(float* to, float x, float y) {
    __stcg(reinterpret_cast<float2*>(to), float2{x, y});
  }

  __device__ __forceinline__ std::uint32_t qparam_of(std::uint32_t quantized_stage, int row) const {
    return quantized_stage + static_cast<std::uint32_t>(qparam_at_ + row * kQparamPitch);
  }

  // Reorders the qparams of the tile for the fragments: those of a lane's four keys of a k16 step become adjacent.
  template <RowEncoding kEncoding>
  __device__ __forceinline__ void lay_out() const {
    __syncwarp();  // no lane reads those of the previous tile any more
#pragma unroll
    for (int i = 0; i < kLaneQparams; ++i) {
      const std::uint32_t at = lay_at_ + static_cast<std::uint32_t>(64 * i);
      const std::uint32_t number = lane_qparams_[i];
      if constexpr (kEncoding == RowEncoding::kInt4Token) {
        cuda::store_shared_half(at, number);
        cuda::store_shared_half(at + kZeros, number >> 16);
      } else {
        cuda::store_shared_half(at, element_scales<Element>(number, number, kEncoding == RowEncoding::kFp8));
      }
    }
    __syncwarp();
  }

  // Zeroes the values of the rows after `keys`, so that their elements are 0.
  __device__ __forceinline__ void clear_tail(std::uint32_t quantized_stage, int keys) const {
#pragma unroll 1
    for (int row = keys + lane_; row < C::kKeyTile; row += 32) {
      cuda::store_shared(quantized_stage + swizzled_chunk(p_.v.row_bytes, row, chunk_), uint4{0, 0, 0, 0});
      if (kBlocks == 2 && !four_) {
        cuda::store_shared(quantized_stage + swizzled_chunk(p_.v.row_bytes, row, chunk_ + 1), uint4{0, 0, 0, 0});
      }
      if (p_.v.qparam_bytes > 0)
        cuda::store_shared(qparam_of(quantized_stage, row), four_ ? 0U : __float_as_uint(1.0F));
    }
    proxy_fence();  // orders the writes before a later TMA load
    __syncwarp();
  }
  __device__ __forceinline__ std::uint32_t next_stage() const {
    return stages_ + pipeline_state_.index * static_cast<std::uint32_t>(p_.v.stage_bytes);
  }

  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const int lane_;
  const bool four_;
  const int warp_;
  int chunk_;                                  // 16-byte chunk of each row in which this warp's values start
  int first_column_;                           // this warp's first column in the slice
  int shift_;                                  // bit offset of the lane's columns in 16 bits
  std::uint32_t bytes_of_column_;              // selects this warp's column from a word with two columns of two keys
  int pair_at_, qparam_at_ = 0;                // bytes, in a row's qparams and in a stage
  std::uint32_t v_at_;                         // offset of this lane's share
  std::uint32_t stages_;                       // address of the first stage
  float scale_ = 0.0F;                         // scale of all rows if they have none of their own
  std::uint32_t quantized_ = 0, qparams_ = 0;  // addresses in the current tile
  std::uint32_t laid_out_, lay_at_;  // addresses of this lane's share of reordered qparams to read, and to write
  std::uint32_t lane_qparams_[kLaneQparams]{};  // a lane's share of the qparams of its rows
  RuntimePipelineState pipeline_state_, released_;
};

}  // namespace ringattn::sm90
