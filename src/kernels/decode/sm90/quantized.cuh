// SPDX-License-Identifier: Apache-2.0
// Quantized keys and values of a decode step, dequantized in registers.
#pragma once

#include <type_traits>

#include "kernels/decode/sm90/column_outputs.cuh"
#include "kernels/decode/sm90/compressed_fetch.cuh"
#include "kernels/decode/sm90/dequantize.cuh"
#include "kernels/decode/sm90/sliced.cuh"

namespace ringattn::sm90 {

// K of a quantized cache for the scoring warps: values are loaded from shared memory as mma fragments and dequantized
// in registers, bitwise as in kernels/quant/row_quantization.hpp.
//
// The loops over columns are not unrolled: there are several warp roles, and their code must stay in the instruction
// cache.
//
// A fragment has 4 adjacent columns of each 16, even ones first, while an mma fragment has two pairs that are 8 columns
// apart. So the query rows are permuted in the same way. This does not change bits, because an mma adds its 16 terms at
// once, in whatever lanes they are.

template <class C>
class QuantizedKeys {
 public:
  static constexpr bool kByRows = true;
  static constexpr bool kHasUsual = true;
  template <RowEncoding kEncoding>
  struct Path {};

  __device__ __forceinline__ QuantizedKeys(const CompressedParams& p, const CompressedMap<C>& map)
      : p_(p), map_(map), lane_(thread_of_cta() % 32), first_row_(first_score_block<C>() * 16) {
    const int t = lane_ % 4;
    first_column_ = p.k.four_bits() ? t % 2 * 8 + t / 2 * 4 : t * 4;
    if (p.k.four_bits()) {
      group_row_ = first_row_ - first_row_ % p.k.group;
      pair_stride_ = p.k.pairs_log == 0 ? kQparamPitch : 4;
      two_pairs_stride_ = p.k.pairs_log == 2 ? 8 : p.k.pairs_log == 1 ? kQparamPitch : 2 * kQparamPitch;
    }
  }

  __device__ __forceinline__ void begin(const WorkTileInfo& info) {
    sequence_ = info.get(WorkTileInfo::kSequence);
    length_ = info.get(WorkTileInfo::kLength);
    head_ = info.get(WorkTileInfo::kKvHead);
    qparam_offset_ = p_.k.qparam_offset(head_);
    if (p_.k.qparam_bytes == 0) scale_ = table_scale(p_.k, head_);
    if (!p_.k.has_tail()) return;
    tail_begin_ = length_ - length_ % p_.k.group;
    if (first_row_ == 0 && info.get(WorkTileInfo::kEnd) * C::kKeyTile >= length_) prefetch_tail();
  }

  // Permutes each four columns, even ones first.
  __device__ __forceinline__ static uint4 permuted(const uint4& columns) {
    const uint2 first = alternate_columns({columns.x, columns.y});
    const uint2 second = alternate_columns({columns.z, columns.w});
    return {first.x, first.y, second.x, second.y};
  }
  __device__ __forceinline__ void load_queries() const {}  // they stay in shared memory

  __device__ __forceinline__ void skip() { pipeline_state_.advance(p_.k.stages); }

  // As TileKeys::add_qk(), for tile `tile` of the work tile's sequence, whatever its qparams are.
  template <bool kMore>
  __device__ __forceinline__ void add_qk(ScoreFragments<C>& s, int tile, std::bool_constant<kMore>) {
    await();
    switch (p_.k.encoding) {
      case RowEncoding::kFp8:
        load_scales();
        add_by_fp32_scales<true, kMore>(s);
        break;
      case RowEncoding::kInt8:
        load_scales();
        add_by_fp32_scales<false, kMore>(s);
        break;
      default:
        if (is_of_tail(tile)) {
          add_of_tail<kMore>(s, tile);
        } else if (rounds_once()) {
          add_of_four_bits<true, kMore>(s);
        } else {
          add_of_four_bits<false, kMore>(s);
        }
        break;
    }
    release();
  }

  // Returns with(path), where path says how usual tiles are dequantized. Returns true if no tile can be usual.
  template <class With>
  __device__ __forceinline__ bool choose_path(const With& with) const {
    // values may be NaN, which a product in the element type would not propagate
    if (p_.k.qparam_bytes == 0) return true;
    switch (p_.k.encoding) {
      case RowEncoding::kFp8:
        return with(Path<RowEncoding::kFp8>());
      case RowEncoding::kInt8:
        return with(Path<RowEncoding::kInt8>());
      default:
        return with(Path<RowEncoding::kInt4Channel>());
    }
  }
  // Waits for the next tile, and returns whether it is usual, so that add_qk_fast() may be called.
  template <RowEncoding kEncoding>
  __device__ __forceinline__ bool is_usual(Path<kEncoding>, int tile) {
    await();
    if constexpr (kEncoding == RowEncoding::kInt4Channel) {
      return !is_of_tail(tile) && rounds_once();
    } else {
      load_scales();
      std::uint32_t deviations = 0;
#pragma unroll
      for (int i = 0; i < 2 * kMine; ++i) deviations |= scale_deviation<Element>(scales_[i / 2][i % 2]);
      return __all_sync(0xffffffffU, are_element_scales<Element>(deviations));
    }
  }
  template <RowEncoding kEncoding, bool kMore>
  __device__ __forceinline__ void add_qk_fast(Path<kEncoding>, ScoreFragments<C>& s, std::bool_constant<kMore>) {
    if constexpr (kEncoding == RowEncoding::kInt4Channel) {
      add_of_four_bits<true, kMore>(s);
    } else {
      constexpr bool kFp8 = kEncoding == RowEncoding::kFp8;
      ElementScales scales[kMine][2];
#pragma unroll
      for (int i = 0; i < 2 * kMine; ++i) {
        const std::uint32_t scale = scales_[i / 2][i % 2];
        scales[i / 2][i % 2] = {element_scales<Element>(scale, scale, kFp8)};
      }
      add_eight_by<kFp8, kMore>(s, scales);
    }
    release();
  }

 private:
  using Element = typename C::Element;
  using Mma = cuda::MmaTraits<Element>;
  static constexpr int kMine = C::kScoreBlocks;
  static constexpr int kSteps = C::kDim / 16;

  // Four columns of two words, even ones first.
  __device__ __forceinline__ static uint2 alternate_columns(uint2 words) {
    return {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.x, words.y, 0x7632)};
  }

  // Address of this lane's row of four matrices: rows 0 … 7 and 8 … 15 of a block, of the first 16 bytes and of the
  // next.
  template <int kRowBytes>
  __device__ __forceinline__ std::uint32_t matrices(std::uint32_t quantized_stage, int mine) const {
    return quantized_stage + swizzled_chunk(kRowBytes, first_row_ + mine * 16 + lane_ % 16, lane_ / 16);
  }
  __device__ __forceinline__ std::uint32_t qparams_of(std::uint32_t quantized_stage, int row) const {
    return quantized_stage +
           static_cast<std::uint32_t>(C::kKeyTile * p_.k.row_bytes + row * kQparamPitch + qparam_offset_);
  }

  // This lane's columns of a k16 step of query row lane / 4 and, if kMore (as `more`), of row lane / 4 + 8.
  template <bool kMore>
  struct Queries {
    uint2 rows[kMore ? 2 : 1];
  };
  template <bool kMore>
  __device__ __forceinline__ Queries<kMore> queries_of(int step) const {
    Queries<kMore> queries;
#pragma unroll
    for (int half = 0; half < (kMore ? 2 : 1); ++half) {
      const std::uint32_t at = map_.q(lane_ / 4 + 8 * half, 2 * step + first_column_ / 8);
      queries.rows[half] = load_words(at + static_cast<std::uint32_t>(first_column_ % 8 * 2));
    }
    return queries;
  }

  template <bool kMore>
  __device__ __forceinline__ static void multiply(ScoreFragments<C>& s, const Queries<kMore>& q, int mine, uint2 row,
                                                  uint2 row_plus_8) {
    const std::uint32_t keys[4] = {row.x, row_plus_8.x, row.y, row_plus_8.y};
#pragma unroll
    for (int half = 0; half < (kMore ? 2 : 1); ++half) {
      Mma::mma(s[2 * mine + half], keys, q.rows[half].x, q.rows[half].y, s[2 * mine + half]);
    }
  }

  __device__ __forceinline__ void await() {
    barrier_wait(map_.quantized_full(false, pipeline_state_.index), pipeline_state_.parity);
    quantized_stage_ = map_.quantized_stage(p_, false, pipeline_state_.index);
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.quantized_empty(false, pipeline_state_.index));
    pipeline_state_.advance(p_.k.stages);
  }

  __device__ __forceinline__ void load_scales() {
#pragma unroll
    for (int i = 0; i < 2 * kMine; ++i) {
      scales_[i / 2][i % 2] = p_.k.qparam_bytes > 0
                                  ? load_word(qparams_of(quantized_stage_, first_row_ + i * 8 + lane_ / 4))
                                  : __float_as_uint(scale_);
    }
  }
  template <bool kFp8, bool kMore>
  __device__ __forceinline__ void add_by_fp32_scales(ScoreFragments<C>& s) const {
    Fp32Scales scales[kMine][2];
#pragma unroll
    for (int i = 0; i < 2 * kMine; ++i) {
      const float scale = __uint_as_float(scales_[i / 2][i % 2]);
      scales[i / 2][i % 2] = {scale, scale};
    }
    add_eight_by<kFp8, kMore>(s, scales);
  }
  // `scales`: of rows lane / 4 and lane / 4 + 8 of each of the warp's blocks.
  template <bool kFp8, bool kMore, class Scales>
  __device__ __forceinline__ void add_eight_by(ScoreFragments<C>& s, const Scales (&scales)[kMine][2]) const {
    std::uint32_t at[kMine], quantized[kMine][4];
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      at[mine] = matrices<C::kDim>(quantized_stage_, mine);
      cuda::load_matrix(quantized[mine], at[mine]);
    }
    // Two k16 steps at a time, with the next two in flight. After the last ones the first are loaded once more, unused.
#pragma unroll 1
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      const auto next = static_cast<std::uint32_t>((pair + 1) % (kSteps / 2));
      std::uint32_t ahead[kMine][4];
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) cuda::load_matrix(ahead[mine], at[mine] ^ next << 5);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Queries<kMore> q = queries_of<kMore>(2 * pair + i);
#pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
          const ElementPairs row = element_pairs<Element, kFp8>(quantized[mine][2 * i], scales[mine][0]);
          const ElementPairs row_plus_8 = element_pairs<Element, kFp8>(quantized[mine][2 * i + 1], scales[mine][1]);
          multiply<kMore>(s, q, mine, {row.even, row.odd}, {row_plus_8.even, row_plus_8.odd});
        }
      }
#pragma unroll
      for (int mine = 0; mine < kMine; ++mine) {
#pragma unroll
        for (int i = 0; i < 4; ++i) quantized[mine][i] = ahead[mine][i];
      }
    }
  }

  // Address of the (scale, zero point) pairs of four consecutive channels, the first a multiple of 4. The warp's rows
  // are a quantization group, or half of one. A row holds 4, 2 or 1 of the group's pairs.
  __device__ __forceinline__ std::uint32_t pairs_of(std::uint32_t quantized_stage, int channel) const {
    return qparams_of(quantized_stage, group_row_ + (channel >> p_.k.pairs_log));
  }
  __device__ __forceinline__ void load_pairs(std::uint32_t (&pairs)[4], std::uint32_t at) const {
    if constexpr (C::kDim >= 128) {  // groups have at most 64 tokens, so two pairs are adjacent
      const uint2 first = load_words(at), second = load_words(at + two_pairs_stride_);
      pairs[0] = first.x;
      pairs[1] = first.y;
      pairs[2] = second.x;
      pairs[3] = second.y;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = load_word(at + (i < 2 ? 0U : two_pairs_stride_) + (i % 2 == 0 ? 0U : pair_stride_));
      }
    }
  }

  // Whether no pair of the warp's rows rounds twice.
  __device__ __forceinline__ bool rounds_once() const {
    std::uint32_t pairs[4];  // each lane checks four channels
    load_pairs(pairs, pairs_of(quantized_stage_, lane_ / 4 % kSteps * 16 + first_column_));
    bool twice = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) twice |= rounds_twice<Element>(pairs[i]);
    return !__any_sync(0xffffffffU, twice);
  }

  // A row's four columns of a k16 step, from two values in the lower byte of each half of `quantized`.
  template <bool kUsual>
  __device__ __forceinline__ static uint2 columns_of(std::uint32_t quantized, const std::uint32_t (&scales)[2],
                                                     const std::uint32_t (&zeros)[2]) {
    return {two_of_four_bits<Element>(quantized, scales[0], zeros[0], kUsual),
            two_of_four_bits<Element>(quantized >> 4, scales[1], zeros[1], kUsual)};
  }

  // Keys after the last full quantization group are stored as 16-bit elements (the tail). Either all of a warp's rows
  // of a tile are, or none.
  static_assert(16 * kMine == 32);  // a quantization group has 32 or 64 keys
  __device__ __forceinline__ bool is_of_tail(int tile) const { return tile * C::kKeyTile + first_row_ >= tail_begin_; }
  // Address of the nth key of the tail.
  __device__ __forceinline__ const std::byte* tail(int nth) const {
    const std::int64_t row_index = (std::int64_t{sequence_} * p_.k.group + nth) * p_.attention.kv_heads + head_;
    return p_.k.table + row_index * C::kDim * 2;
  }
  // One warp calls it: prefetches the tail into L2.
  __device__ __forceinline__ void prefetch_tail() const {
#pragma unroll 1
    for (int nth = lane_; nth < length_ - tail_begin_; nth += 32) {
#pragma unroll
      for (int at = 0; at < C::kDim * 2; at += 128) cuda::prefetch_to_l2(tail(nth) + at);
    }
  }
  // Two k16 steps of rows lane / 4 and lane / 4 + 8 of each of the warp's blocks.
  struct Tails {
    uint2 columns[2][kMine][2];
  };
  __device__ __forceinline__ void fetch(Tails& to, const std::byte* const (&rows)[kMine][2], int pair) const {
#pragma unroll
    for (int i = 0; i < 4 * kMine; ++i) {
      const std::byte* const from = rows[i / 4][i / 2 % 2] + pair * 64 + i % 2 * 32;
      to.columns[i % 2][i / 4][i / 2 % 2] = __ldcg(reinterpret_cast<const uint2*>(from));
    }
  }
  template <bool kMore>
  __device__ __forceinline__ void add_of_tail(ScoreFragments<C>& s, int tile) const {
    if (tile * C::kKeyTile + first_row_ >= length_) return;  // no row sees these keys
    const std::byte* rows[kMine][2];
#pragma unroll
    for (int i = 0; i < 2 * kMine; ++i) {
      const int key = tile * C::kKeyTile + first_row_ + i * 8 + lane_ / 4;
      rows[i / 2][i % 2] = tail(key % p_.k.group) + first_column_ * 2;
    }
    Tails now;
    fetch(now, rows, 0);
#pragma unroll 1
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      Tails ahead;
      fetch(ahead, rows, (pair + 1) % (kSteps / 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Queries<kMore> q = queries_of<kMore>(2 * pair + i);
#pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
          const auto& [row, row_plus_8] = now.columns[i][mine];
          multiply<kMore>(s, q, mine, alternate_columns(row), alternate_columns(row_plus_8));
        }
      }
      now = ahead;
    }
  }

  // 4-bit values: 32 columns of rows lane / 4 and lane / 4 + 8 of each of the warp's blocks, 8 of them in a word. Each
  // of two k16 steps needs 16 columns, which two lanes have, so lanes 2 apart exchange halves.
  struct FourBits {
    std::uint32_t quantized[kMine][2], others[kMine][2];
  };
  // at: address of this lane's row.
  __device__ __forceinline__ static void fetch(FourBits& to, const std::uint32_t (&at)[kMine], int pair) {
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      cuda::load_matrix_pair(to.quantized[mine], at[mine] ^ static_cast<std::uint32_t>(pair) << 4);
    }
  }
  __device__ __forceinline__ static void exchange(FourBits& of) {
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of.others[mine][half] = __shfl_xor_sync(0xffffffffU, of.quantized[mine][half], 2);
    }
  }

  // As add_eight_by().
  template <bool kUsual, bool kMore>
  __device__ __forceinline__ void add_of_four_bits(ScoreFragments<C>& s) const {
    const bool front = lane_ % 4 < 2;
    const unsigned picks[2] = {front ? 0x1100U : 0x7766U, front ? 0x5544U : 0x3322U};
    std::uint32_t at[kMine];
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      at[mine] = quantized_stage_ + swizzled_chunk(C::kDim / 2, first_row_ + mine * 16 + lane_ % 16, 0);
    }
    std::uint32_t pairs_at = pairs_of(quantized_stage_, first_column_);
    const auto pairs_step = static_cast<std::uint32_t>((16 >> p_.k.pairs_log) * kQparamPitch);
    FourBits now;
    fetch(now, at, 0);
    exchange(now);
#pragma unroll 1
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      FourBits ahead;
      fetch(ahead, at, (pair + 1) % (kSteps / 2));
      std::uint32_t of[2][4];
      Queries<kMore> q[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_pairs(of[i], pairs_at);
        pairs_at += pairs_step;
        q[i] = queries_of<kMore>(2 * pair + i);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t scales[2], zeros[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          scales[n] = __byte_perm(of[i][n], of[i][n + 2], 0x5410);
          zeros[n] = __byte_perm(of[i][n], of[i][n + 2], 0x7632);
        }
#pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
          uint2 rows[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            rows[half] = columns_of<kUsual>(__byte_perm(now.quantized[mine][half], now.others[mine][half], picks[i]),
                                            scales, zeros);
          }
          multiply<kMore>(s, q[i], mine, rows[0], rows[1]);
        }
        if (i == 0) exchange(ahead);
      }
      now = ahead;
    }
  }

  const CompressedParams& p_;
  const CompressedMap<C>& map_;
  const int lane_;
  const int first_row_;  // first tile row of the warp's blocks
  int first_column_;     // first column of this lane in each 16
  // For 4-bit values: the first row of the quantization group with the warp's rows, and the bytes from a channel's pair
  // to those of the next channel and of the next but one.
  int group_row_ = 0;
  std::uint32_t pair_stride_ = 0, two_pairs_stride_ = 0;
  int sequence_ = 0, length_ = 0, head_ = 0, qparam_offset_ = 0;  // fields of the current work tile
  int tail_begin_ = 0;                                            // first key of the tail
  float scale_ = 0.0F;
  std::uint32_t quantized_stage_ = 0;  // address of the current tile's stage
  std::uint32_t scales_[kMine][2]{};   // its scales, of rows lane / 4 and lane / 4 + 8 of each of the warp's blocks
  RuntimePipelineState pipeline_state_;
};

// V of a quantized cache for the output warps: values are loaded from shared memory transposed, as mma fragments, and
// dequantized in registers, bitwise as in kernels/quant/row_quantization.hpp.
//
// ldmatrix transposes units of 16 bits: two adjacent columns of 8-bit values, or four of 4-bit values. So a lane has
// these of two keys, and adjacent columns become mma rows that are 8 apart, or rows of the next block of 16.

// See TileColumns.
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
