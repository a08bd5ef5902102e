// SPDX-License-Identifier: Apache-2.0
// Online softmax step for one key tile by AMX tiles, for bf16. The formulas and the softmax offset are those of
// tile_step-inl.hpp. The arithmetic differs from that of other targets:
//   S = Q · Kᵀ    TDPBF16PS over head_dim, 32 dims at a time: two chains of 16 fused multiply-adds from zero, of even
//                 dims and of odd ones; their sum is added to S
//   p = 2^((S · softmax_scale − offset) · log₂ e), of degree 5; below 2^−126 p is 0, except in a tile with a value that
//                 is not finite, where p is at least 2^−100 (math-inl.hpp has the reason)
//   l             sums of p in fp32, in 16 lanes and then pairwise
//   O ← O + P · V TDPBF16PS over keys, 32 at a time, with p rounded to bf16 (to nearest even)
// Like the tile unit, the step treats subnormals as zero. A product with p = 0 adds +0, so a group of 32 masked keys
// may be multiplied or skipped: that could only affect the sign of a zero of O, and rows that see a part of a tile add
// +0 at its end.
//
// The tile unit can work in parallel with the vector units: while it computes S of one block of rows and P · V of the
// block two before that, the vector units compute P of the block between them. Their instructions alternate, 2 or 4
// tile products and then one or two rows, so that the core's window holds both. This saves about 8 % at head_dim 128
// (bench/notes/attention-portable.md).
#if defined(RINGATTN_KERNELS_CPU_AMX_STEP_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_AMX_STEP_INL_HPP_
#undef RINGATTN_KERNELS_CPU_AMX_STEP_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_AMX_STEP_INL_HPP_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attention/cpu/amx_pack-inl.hpp"
#include "kernels/attention/cpu/tile_step-inl.hpp"
#include "kernels/common/cpu/amx_tiles.hpp"
#include "kernels/common/cpu/math-inl.hpp"

#undef RINGATTN_HAVE_AMX_STEP
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3
#define RINGATTN_HAVE_AMX_STEP

// g++ 12 warns about undefined operands in its own intrinsics. Highway's headers disable the same warning.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline constexpr int kAmxRowBlock = 2 * kTileRows;
// Rows of S and P are padded, so that they are not all in the same sets of the cache.
inline constexpr int kScoreColumns = kKeyTile + 16;
inline constexpr std::size_t kScoreStride = kScoreColumns * sizeof(float);

struct alignas(64) AmxScratch {
  float scores[2][kAmxRowBlock][kScoreColumns];  // S of two blocks; P in bf16 overwrites the first half of a block
  float lanes[kAmxRowBlock][kTileColumns];       // per row: maxima, then sums
  float softmax_offset[kAmxRowBlock];
  float scale[kAmxRowBlock];
};

// Reduces 16 vectors to one, whose lane i is the reduction of rows[i]: pairwise, in a fixed order.
template <class Combine>
HWY_INLINE __m512 reduce_rows(const float (*rows)[kTileColumns], Combine combine) {
  __m512 fours[4];
  for (int i = 0; i < 4; ++i) {
    __m512 twos[2];
    for (int j = 0; j < 2; ++j) {
      const __m512 a = _mm512_load_ps(rows[4 * i + 2 * j]);
      const __m512 b = _mm512_load_ps(rows[4 * i + 2 * j + 1]);
      twos[j] = combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    const __m512d a = _mm512_castps_pd(twos[0]);
    const __m512d b = _mm512_castps_pd(twos[1]);
    fours[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto join = [&](__m512 a, __m512 b) HWY_ATTR {
    return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return join(join(fours[0], fours[1]), join(fours[2], fours[3]));
}

// amx_exp2(x). kBounded: as weight().
template <bool kBounded>
HWY_INLINE __m512 amx_weight(__m512 x) {
  if constexpr (!kBounded) return amx_exp2(x);
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ);
  // The second operand if one is NaN.
  return _mm512_maskz_mov_ps(kept, amx_exp2(_mm512_max_ps(_mm512_set1_ps(-100.0F), x)));
}

// A block of rows that is in the step's pipeline.
struct AmxBlock {
  RowBlock rows;
  int begin_group = 0;  // groups of 32 keys that some row sees
  int end_group = 0;
  bool masked = false;  // some row does not see all keys of these groups
  float (*scores)[kScoreColumns] = nullptr;

  int groups() const { return end_group - begin_group; }
};

// Values that all blocks of a call share.
struct AmxCall {
  const TileShape& shape;
  const RowBatch& batch;
  AmxScratch& scratch;
  const std::byte* k;
  const std::byte* v;
  bool bounded;          // some visible value is not finite
  std::size_t q_stride;  // in floats
  std::size_t o_stride;
  // Scores are scaled when their weights are computed, unless scaling is not monotonic.
  bool scales_first;
  mutable TilePrefetcher prefetcher;

  AmxCall(const TileShape& shape, const PackedTile& tile, const RowBatch& batch, AmxScratch& scratch)
      : shape(shape),
        batch(batch),
        scratch(scratch),
        k(reinterpret_cast<const std::byte*>(tile.k)),
        v(reinterpret_cast<const std::byte*>(tile.v)),
        bounded(!tile.v_finite),
        q_stride(static_cast<std::size_t>(tiles_of_dims(shape.head_dim)) * kTileDepth / 2),
        o_stride(static_cast<std::size_t>(tiles_of_dims(shape.head_dim_v)) * kTileDepth),
        scales_first(shape.softcap > 0.0F || !(shape.softmax_scale > 0.0F)) {
    if (batch.next == nullptr) return;
    // Once per product of four tiles.
    const auto head_tiles = static_cast<std::size_t>(tiles_of_dims(shape.head_dim));
    const auto value_tiles = static_cast<std::size_t>(tiles_of_dims(shape.head_dim_v));
    const std::size_t bytes = std::size_t{kKeyTile} * kTileDepth * 2;  // of 32 dims
    const std::size_t blocks = (static_cast<std::size_t>(batch.rows) + kAmxRowBlock - 1) / kAmxRowBlock;
    prefetcher = {batch.next->k, head_tiles * bytes, batch.next->v, value_tiles * bytes,
                  blocks * kKeyGroups * (head_tiles + value_tiles)};
  }
};

// Adds +0 to O of the rows that see a part of the tile.
inline void clear_zero_signs(const AmxCall& call, const AmxBlock& block) {
  for (std::size_t row = block.rows.first; row < block.rows.first + static_cast<std::size_t>(block.rows.rows); ++row) {
    if (call.batch.visible[row] == ColumnRange{0, kKeyTile}) continue;
    float* const acc = call.batch.acc + row * call.o_stride;
    for (std::size_t c = 0; c < call.o_stride; c += kTileColumns) {
      _mm512_store_ps(acc + c, _mm512_add_ps(_mm512_load_ps(acc + c), _mm512_setzero_ps()));
    }
  }
}

// The vector work of one block: S → P. It runs in units, some after each few tile products.
class AmxSoftmax {
 public:
  // `block` is null if there is none. `products` is the number of calls of advance() to come.
  AmxSoftmax(const AmxCall& call, const AmxBlock* block, int products) : call_(call), block_(block) {
    if (block == nullptr) return;
    max_units_ = (block->rows.rows + kRowsPerMax - 1) / kRowsPerMax;
    units_ = max_units_ + 1 + block->rows.rows + 1;
    rate_ = products > 0 ? static_cast<unsigned>((units_ << kRateBits) / products) + 1U : 0U;
    c_ = call.scales_first ? 1.0F : call.shape.softmax_scale;
  }

  HWY_INLINE void advance() {
    call_.prefetcher.advance(1);
    due_ += rate_;
    const int due = std::min(units_, static_cast<int>(due_ >> kRateBits));
    while (done_ < due) run(done_++);
  }
  void finish() {
    while (done_ < units_) run(done_++);
  }

 private:
  static constexpr int kRowsPerMax = 4;
  static constexpr int kRateBits = 16;

  HWY_INLINE void run(int unit) {
    const int row = unit - max_units_ - 1;
    if (row >= 0 && row < block_->rows.rows) {
      call_.bounded ? exponentiate<true>(row) : exponentiate<false>(row);
    } else if (row >= 0) {
      add_sums();
    } else if (row == -1) {
      move_offsets();
    } else {
      const int end = std::min(block_->rows.rows, (unit + 1) * kRowsPerMax);
      for (int r = unit * kRowsPerMax; r < end; ++r) find_max(r);
    }
  }

  // A NaN score is ignored in the max: its p is NaN.
  HWY_INLINE void find_max(int row) {
    float* const scores = block_->scores[row];
    __m512 greatest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    if (block_->masked || call_.scales_first) {
      greatest = mask_scores(scores, call_.batch.visible[block_->rows.first + static_cast<std::size_t>(row)]);
    } else {
      for (int c = block_->begin_group * kTileDepth; c < block_->end_group * kTileDepth; c += kTileColumns) {
        greatest = _mm512_max_ps(_mm512_load_ps(scores + c), greatest);
      }
    }
    _mm512_store_ps(call_.scratch.lanes[row], greatest);
  }

  // Scales and caps scores if they are scaled first, and sets the masked ones to −∞. Returns maxima.
  HWY_NOINLINE __m512 mask_scores(float* scores, ColumnRange visible) const {
    const Floats d;
    const __m512 minus_infinity = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 greatest = minus_infinity;
    for (int c = block_->begin_group * kTileDepth; c < block_->end_group * kTileDepth; c += kTileColumns) {
      FloatVector x = hn::Load(d, scores + c);
      if (call_.scales_first) x = hn::Mul(x, hn::Set(d, call_.shape.softmax_scale));
      if (call_.shape.softcap > 0.0F) {
        const FloatVector cap = hn::Set(d, call_.shape.softcap);
        x = hn::Mul(cap, tanh(d, hn::Div(x, cap)));
      }
      const auto below = [&](int column) { return (1U << std::clamp(column - c, 0, kTileColumns)) - 1U; };
      const auto seen = static_cast<__mmask16>(below(visible.end) & ~below(visible.begin));
      const __m512 masked = _mm512_mask_mov_ps(minus_infinity, seen, x.raw);
      _mm512_store_ps(scores + c, masked);
      greatest = _mm512_max_ps(masked, greatest);
    }
    return greatest;
  }

  // m′ and the factors of l and O, as attend_block() has them.
  void move_offsets() {
    const Floats d;
    AmxScratch& scratch = call_.scratch;
    rescaled_ = 0;
    for (int r = 0; r < block_->rows.rows; r += kTileRows) {
      const __mmask16 rows = rows_from(r);
      float* const offset = call_.batch.offset + block_->rows.first + static_cast<std::size_t>(r);
      const __m512 max =
          reduce_rows(scratch.lanes + r, [](__m512 a, __m512 b) HWY_ATTR { return _mm512_max_ps(a, b); });
      const __m512 m_old = _mm512_maskz_loadu_ps(rows, offset);
      const __m512 m_new = _mm512_max_ps(_mm512_mul_ps(max, _mm512_set1_ps(c_)), m_old);
      const __mmask16 seen =
          _mm512_cmp_ps_mask(m_new, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ);
      const __m512 finite = _mm512_maskz_mov_ps(seen, m_new);
      const __m512 change = _mm512_sub_ps(m_old, finite);
      const FloatVector scale = weight(d, hn::Mul(FloatVector{change}, hn::Set(d, kLog2E)));
      _mm512_mask_storeu_ps(offset, rows, m_new);
      _mm512_store_ps(scratch.softmax_offset + r, finite);
      _mm512_store_ps(scratch.scale + r, scale.raw);
      const std::uint32_t moved = _mm512_mask_cmp_ps_mask(rows, scale.raw, _mm512_set1_ps(1.0F), _CMP_NEQ_UQ);
      rescaled_ |= moved << r;
    }
  }

  template <bool kBounded>
  HWY_INLINE void exponentiate(int row) {
    AmxScratch& scratch = call_.scratch;
    if ((rescaled_ >> row & 1U) != 0) rescale(row);
    const __m512 offset = _mm512_set1_ps(scratch.softmax_offset[row]);
    const __m512 c = _mm512_set1_ps(c_);
    const __m512 log2e = _mm512_set1_ps(kLog2E);
    const float* const scores = block_->scores[row];
    __m512 sum = _mm512_setzero_ps();
    for (int key = block_->begin_group * kTileDepth; key < block_->end_group * kTileDepth; key += kTileDepth) {
      const __m512 x0 = _mm512_fmsub_ps(_mm512_load_ps(scores + key), c, offset);
      const __m512 x1 = _mm512_fmsub_ps(_mm512_load_ps(scores + key + kTileColumns), c, offset);
      const __m512 p0 = amx_weight<kBounded>(_mm512_mul_ps(x0, log2e));
      const __m512 p1 = amx_weight<kBounded>(_mm512_mul_ps(x1, log2e));
      sum = _mm512_add_ps(sum, _mm512_add_ps(p0, p1));
      _mm512_store_si512(reinterpret_cast<std::byte*>(block_->scores[row]) + 2 * key, round_to_bf16(p0, p1));
    }
    _mm512_store_ps(scratch.lanes[row], sum);
  }

  HWY_NOINLINE void rescale(int row) const {
    const __m512 scale = _mm512_set1_ps(call_.scratch.scale[row]);
    float* const acc = call_.batch.acc + (block_->rows.first + static_cast<std::size_t>(row)) * call_.o_stride;
    for (std::size_t c = 0; c < call_.o_stride; c += kTileColumns) {
      _mm512_store_ps(acc + c, _mm512_mul_ps(_mm512_load_ps(acc + c), scale));
    }
  }

  void add_sums() {
    for (int r = 0; r < block_->rows.rows; r += kTileRows) {
      const __mmask16 rows = rows_from(r);
      float* const l = call_.batch.sum + block_->rows.first + static_cast<std::size_t>(r);
      const __m512 sum =
          reduce_rows(call_.scratch.lanes + r, [](__m512 a, __m512 b) HWY_ATTR { return _mm512_add_ps(a, b); });
      const __m512 scale = _mm512_load_ps(call_.scratch.scale + r);
      _mm512_mask_storeu_ps(l, rows, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(rows, l), scale, sum));
    }
  }

  __mmask16 rows_from(int row) const {
    return static_cast<__mmask16>((1U << std::min(kTileRows, block_->rows.rows - row)) - 1U);
  }

  const AmxCall& call_;
  const AmxBlock* block_;
  int max_units_ = 0;
  int units_ = 0;
  int done_ = 0;
  unsigned rate_ = 0;  // units for each call of advance(), with kRateBits after the point
  unsigned due_ = 0;
  float c_ = 1.0F;
  std::uint32_t rescaled_ = 0;  // per row: O is rescaled
};

// Computes S, P and P · V of a batch's blocks, three blocks at a time.
class AmxPipeline {
 public:
  explicit AmxPipeline(const AmxCall& call) : call_(call) {}

  void add(const RowBlock& rows, const ColumnRange* visible) {
    AmxBlock block{rows, rows.span.begin / kTileDepth, (rows.span.end + kTileDepth - 1) / kTileDepth};
    block.masked = !sees_whole(visible, rows, kTileDepth);
    block.scores = call_.scratch.scores[blocks_ % 2];
    ++blocks_;
    advance(block);
  }
  void finish() {
    advance({});
    advance({});
  }

 private:
  void advance(const AmxBlock& next) {
    const int head_tiles = tiles_of_dims(call_.shape.head_dim);
    const int value_tiles = tiles_of_dims(call_.shape.head_dim_v);
    AmxSoftmax softmax(call_, scored_.rows.rows > 0 ? &scored_ : nullptr,
                       next.groups() * head_tiles + weighted_.groups() * value_tiles);
    if (weighted_.rows.rows > 0) add_values(weighted_, value_tiles, softmax);
    if (next.rows.rows > 0) score(next, head_tiles, softmax);
    softmax.finish();
    weighted_ = scored_;
    scored_ = next;
  }

  // S of a block.
  void score(const AmxBlock& block, int head_tiles, AmxSoftmax& softmax) {
    configure(block.rows.rows);
    block.rows.rows > kTileRows ? score<2>(block, head_tiles, softmax) : score<1>(block, head_tiles, softmax);
  }
  template <int kHalves>
  void score(const AmxBlock& block, int head_tiles, AmxSoftmax& softmax) {
    const std::size_t q_stride = call_.q_stride * sizeof(float);
    const auto* const q = reinterpret_cast<const std::byte*>(call_.batch.q) + block.rows.first * q_stride;
    const std::size_t key_block = static_cast<std::size_t>(head_tiles) * 2 * kTileElements;  // bytes of 16 keys
    for (int group = block.begin_group; group < block.end_group; ++group) {
      zero_sums<kHalves>();
      const std::byte* k = call_.k + static_cast<std::size_t>(2 * group) * key_block;
      for (int dims = 0; dims < head_tiles; ++dims, k += 2 * kTileElements) {
        const std::byte* const rows = q + static_cast<std::size_t>(dims) * 64;
        load_tile<4>(rows, q_stride);
        load_tile<6>(k, 64);
        multiply_tiles<0, 4, 6>();
        load_tile<7>(k + key_block, 64);
        multiply_tiles<1, 4, 7>();
        if constexpr (kHalves == 2) {
          load_tile<5>(rows + kTileRows * q_stride, q_stride);
          multiply_tiles<2, 5, 6>();
          multiply_tiles<3, 5, 7>();
        }
        softmax.advance();
      }
      float* const scores = block.scores[0] + group * kTileDepth;
      store_tile<0>(scores, kScoreStride);
      store_tile<1>(scores + kTileColumns, kScoreStride);
      if constexpr (kHalves == 2) {
        store_tile<2>(scores + kTileRows * kScoreColumns, kScoreStride);
        store_tile<3>(scores + kTileRows * kScoreColumns + kTileColumns, kScoreStride);
      }
    }
  }

  // O ← O + P · V.
  void add_values(const AmxBlock& block, int value_tiles, AmxSoftmax& softmax) {
    configure(block.rows.rows);
    block.rows.rows > kTileRows ? add_values<2>(block, value_tiles, softmax)
                                : add_values<1>(block, value_tiles, softmax);
    if (block.masked) clear_zero_signs(call_, block);
  }
  template <int kHalves>
  void add_values(const AmxBlock& block, int value_tiles, AmxSoftmax& softmax) {
    constexpr std::size_t kBlockBytes = std::size_t{2} * kKeyTile * kTileColumns;  // of 16 dims
    const std::size_t stride = call_.o_stride * sizeof(float);
    float* acc = call_.batch.acc + block.rows.first * call_.o_stride;
    const auto* const p = reinterpret_cast<const std::byte*>(block.scores);
    const std::byte* v = call_.v;
    for (int dims = 0; dims < value_tiles; ++dims, acc += kTileDepth, v += 2 * kBlockBytes) {
      float* const lower = acc + kTileRows * call_.o_stride;
      load_tile<0>(acc, stride);
      load_tile<1>(acc + kTileColumns, stride);
      if constexpr (kHalves == 2) {
        load_tile<2>(lower, stride);
        load_tile<3>(lower + kTileColumns, stride);
      }
      for (int group = block.begin_group; group < block.end_group; ++group) {
        const std::byte* const weights = p + static_cast<std::size_t>(group) * 64;
        const std::byte* const values = v + static_cast<std::size_t>(group) * 2 * kTileElements;
        load_tile<4>(weights, kScoreStride);
        load_tile<6>(values, 64);
        multiply_tiles<0, 4, 6>();
        load_tile<7>(values + kBlockBytes, 64);
        multiply_tiles<1, 4, 7>();
        if constexpr (kHalves == 2) {
          load_tile<5>(weights + kTileRows * kScoreStride, kScoreStride);
          multiply_tiles<2, 5, 6>();
          multiply_tiles<3, 5, 7>();
        }
        softmax.advance();
      }
      store_tile<0>(acc, stride);
      store_tile<1>(acc + kTileColumns, stride);
      if constexpr (kHalves == 2) {
        store_tile<2>(lower, stride);
        store_tile<3>(lower + kTileColumns, stride);
      }
    }
  }

  template <int kHalves>
  static HWY_INLINE void zero_sums() {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (kHalves == 2) {
      zero_tile<2>();
      zero_tile<3>();
    }
  }

  // Tiles of `rows` rows. Rows after them are neither read nor written.
  void configure(int rows) {
    if (rows == configured_) return;
    TileConfig config;
    const auto upper = static_cast<std::uint8_t>(std::min(rows, kTileRows));
    const auto lower = static_cast<std::uint8_t>(std::max(rows - kTileRows, 1));
    for (const int tile : {0, 1, 4}) config.rows[tile] = upper;
    for (const int tile : {2, 3, 5}) config.rows[tile] = lower;
    configure_tiles(config);
    configured_ = rows;
  }

  const AmxCall& call_;
  int blocks_ = 0;
  int configured_ = 0;
  AmxBlock scored_;    // S is computed; no rows: there is none
  AmxBlock weighted_;  // P is computed
};

inline void attend_tile_with_amx(const TileShape& shape, const PackedTile& tile, const RowBatch& batch, float* scores) {
  const FlushSubnormals flush;
  auto& scratch = *reinterpret_cast<AmxScratch*>(scores);
  AmxCall call(shape, tile, batch, scratch);
  const auto rows = static_cast<std::size_t>(batch.rows);
  const auto block_from = [&](std::size_t first) {
    return next_block(batch.visible, batch.rows, tile.v_finite, first, kAmxRowBlock);
  };
  if (tile.v_finite) {
    AmxPipeline pipeline(call);
    for (std::size_t first = 0; first < rows;) {
      const RowBlock block = block_from(first);
      pipeline.add(block, batch.visible);
      first += static_cast<std::size_t>(block.rows);
    }
    pipeline.finish();
  } else {
    // The rows of a block see the same keys. The second half of tile.v has room for these keys' values.
    float* const visible_values = tile.v + call.o_stride * kKeyTile / 2;
    call.v = reinterpret_cast<const std::byte*>(visible_values);
    for (std::size_t first = 0; first < rows;) {
      const RowBlock block = block_from(first);
      call.bounded = !copy_visible_values(shape.head_dim_v, tile.v, block.span, visible_values);
      AmxPipeline pipeline(call);
      pipeline.add(block, batch.visible);
      pipeline.finish();
      first += static_cast<std::size_t>(block.rows);
    }
  }
  release_tiles();
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
