// SPDX-License-Identifier: Apache-2.0
// Values of a compressed cache for the warps with outputs: quantized come from shared memory transposed, as fragments
// of a product, and become elements in registers, with the bits of kernels/row_quantization.hpp.
//
// The least that is transposed is 16 bits: of 8 bits the quantized of two neighbouring columns, of 4 bits those of
// four. So a lane has these of two keys, and neighbouring columns are 8 rows of a product apart, or in the next block
// of 16.
#pragma once

#include "kernels/sm90/decode/column_outputs.cuh"
#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/dequantize.cuh"

namespace ringattn::sm90 {

// As TileColumns.
template <class C>
class QuantizedColumns {
 private:
  static constexpr int kWarpColumns = C::kSliceColumns / C::kOutWarps;
  // Half of a block's rows stay empty. And nobody looks at scales of 8 bits, as a lane has so few quantized.
  static constexpr bool kNarrow = kWarpColumns == 8;

 public:
  static constexpr int kSharing = 1;
  static constexpr int kColumnWarps = C::kOutWarps;
  static constexpr int kBlocks = kWarpColumns > 16 ? kWarpColumns / 16 : 1;
  static constexpr int kAhead = 2;
  static constexpr bool kScoresAhead = false;
  static_assert(kNarrow || kWarpColumns == 16 || kWarpColumns == 32);

  // Of the products of 16 keys: quantized of keys 2t, 2t + 1 and those 8 behind, where t is lane % 4, of 8 bits for
  // each block; and these keys' qparams, as they lie in the tile or two in a word, as they have been laid out.
  struct Fragment {
    std::uint32_t quantized[2 * kBlocks];
    std::uint32_t qparams[4];
  };
  struct Elements {
    std::uint32_t v[kBlocks][4];
  };
  // How quantized become elements. kUsual: of 8 bits, all of the tile's scales are elements; of 4 bits, no pair of its
  // q_stages twice. kByRow: rows have qparams, else there is one scale.
  template <RowEncoding kEncoding, bool kUsual = true, bool kByRow = true>
  struct Path {
    static constexpr bool kFour = kEncoding == RowEncoding::kInt4Token;
    static constexpr int kRowBytes = kFour ? C::kSliceColumns / 2 : C::kSliceColumns;
    static constexpr bool kLaysOut = kFour || (!kNarrow && kByRow);  // qparams of tiles, for those who ask for them so
    static constexpr bool kLaidOut = kFour || kUsual;
  };

  __device__ __forceinline__ QuantizedColumns(const CompressedParams& p, const CompressedMap<C>& map,
                                              std::uint32_t rank)
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

  __device__ __forceinline__ bool here() const {
    return barrier_ended(map_.quantized_full(true, pipeline_state_.index), pipeline_state_.parity);
  }
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.quantized_full(true, pipeline_state_.index), pipeline_state_.parity);
    if (keys < C::kKeyTile) clear_tail(next_stage(), keys);
  }
  template <RowEncoding kEncoding, bool kUsual, bool kByRow>
  __device__ __forceinline__ void take(Path<kEncoding, kUsual, kByRow> path) {
    const std::uint32_t quantized_stage = next_stage();
    quantized_ = quantized_stage + v_at_;
    qparams_ = qparam_of(quantized_stage, lane_ % 4 * 2);
    if constexpr (path.kLaysOut) {
#pragma unroll
      for (int i = 0; i < kLooks; ++i) looked_at_[i] = load_word(qparam_of(quantized_stage, 32 * i + lane_));
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
        } else {  // quantized may be NaN, which a product of elements doesn't see
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
  __device__ __forceinline__ void leave(float* outputs, int n, const float4& columns) const {
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
  static constexpr int kLooks = C::kKeyTile / 32;
  static constexpr std::uint32_t kZeros = 2 * C::kKeyTile;  // behind the scales

  __device__ __forceinline__ static void store_columns(float* to, float x) { __stcg(to, x); }
  __device__ __forceinline__ static void store_columns(float* to, float x, float y) {
    __stcg(reinterpret_cast<float2*>(to), float2{x, y});
  }

  __device__ __forceinline__ std::uint32_t qparam_of(std::uint32_t quantized_stage, int row) const {
    return quantized_stage + static_cast<std::uint32_t>(qparam_at_ + row * kQparamPitch);
  }

  // The qparams of the tile as products ask for them: those of the four keys of a lane and step side by side.
  template <RowEncoding kEncoding>
  __device__ __forceinline__ void lay_out() const {
    __syncwarp();  // nobody reads those of the tile before any more
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const std::uint32_t at = lay_at_ + static_cast<std::uint32_t>(64 * i);
      const std::uint32_t number = looked_at_[i];
      if constexpr (kEncoding == RowEncoding::kInt4Token) {
        cuda::store_shared_half(at, number);
        cuda::store_shared_half(at + kZeros, number >> 16);
      } else {
        cuda::store_shared_half(at, element_scales<Element>(number, number, kEncoding == RowEncoding::kFp8));
      }
    }
    __syncwarp();
  }

  // Codes of the rows behind `keys` become zeros, and so do their elements.
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
    proxy_fence();  // the copy engine writes there next
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
  int chunk_;                                  // 16 bytes of each row that this warp's quantized begin in
  int first_column_;                           // of the slice: this warp's
  int shift_;                                  // bits in front of the lane's columns in 16 bits
  std::uint32_t bytes_of_column_;              // of a word that has two columns of two keys: those of the warp's
  int pair_at_, qparam_at_ = 0;                // bytes, in a row's qparams and in a stage
  std::uint32_t v_at_;                         // where this lane's share begins
  std::uint32_t stages_;                       // where the first one lies
  float scale_ = 0.0F;                         // of all rows, where they have none of their own
  std::uint32_t quantized_ = 0, qparams_ = 0;  // of the tile taken last
  std::uint32_t laid_out_, lay_at_;    // where the lane's share of laid-out qparams begins, and what it lays out
  std::uint32_t looked_at_[kLooks]{};  // of its rows' qparams, a lane's share
  RuntimePipelineState pipeline_state_, released_;
};

}  // namespace ringattn::sm90
