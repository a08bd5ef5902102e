// SPDX-License-Identifier: Apache-2.0
// Online softmax step for one key tile within a KV split, (m, l, O) and tile → (m′, l′, O′):
//   x  = softcap(S · softmax_scale), −∞ where masked        m′ = max(m, max x)
//   p  = exp(x − m′)                                        s  = exp(m − m′)
//   l′ = l · s + Σ p                                        O′ = O · s + Σ p · v
// A row's bits depend only on the row and the keys that it sees: Σ p is summed from zero, lane by lane, in key order. A
// masked key's p = 0 adds nothing, so masked keys may be skipped or not.
#if defined(RINGATTN_KERNELS_CPU_TILE_STEP_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_TILE_STEP_INL_HPP_
#undef RINGATTN_KERNELS_CPU_TILE_STEP_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_TILE_STEP_INL_HPP_
#endif

#include <algorithm>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cpu/amx_pairs-inl.hpp"
#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline constexpr int kRowBlock = 24;  // S, P and a panel fit into the L1 cache
inline constexpr std::size_t kRowBlockPadded = (kRowBlock + kLanes - 1) / kLanes * kLanes;
static_assert(kRowBlock % kBlockRows == 0 && kKeyTile % kPanelWidth == 0);

// Up to kRowBlock rows of a batch. `span` holds every key that one of them sees.
struct RowBlock {
  std::size_t first = 0;
  int rows = 0;
  ColumnRange span;
};

struct StoreScores {
  float* scores;  // [kRowBlock, kKeyTile], at the panel's first column

  HWY_INLINE void operator()(std::size_t row, std::size_t column, FloatVector value) const {
    hn::Store(value, Floats(), scores + row * kKeyTile + column);
  }
};

struct AttentionOutputs {
  float* o;  // [rows, stride], at the panel's first column
  std::size_t stride;
  const float* scale;

  HWY_INLINE void operator()(std::size_t row, std::size_t column, FloatVector value) const {
    const Floats d;
    float* at = o + row * stride + column;
    // + 0 turns −0 into +0: otherwise the sign of a zero would depend on whether masked keys are multiplied or skipped.
    const FloatVector tile_sum = hn::Add(value, hn::Zero(d));
    hn::Store(hn::MulAdd(hn::Load(d, at), hn::Set(d, scale[row]), tile_sum), d, at);
  }
};

// One vector per row of a block.
using RowLanes = float[kRowBlockPadded][kLanes];

// Reduces the lanes of kLanes rows from `first` on, in order: combine(lane, total) for one lane of all rows at a time.
template <class Combine>
HWY_INLINE FloatVector reduce_lanes(const RowLanes& rows, std::size_t first, FloatVector total, Combine combine) {
  const Floats d;
  HWY_ALIGN float columns[kLanes][kLanes];
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3
  __m512i vectors[kLanes];
  RINGATTN_UNROLL
  for (std::size_t r = 0; r < kLanes; ++r) vectors[r] = _mm512_load_si512(rows[first + r]);
  transpose_pairs(vectors, reinterpret_cast<std::byte*>(columns));
#else
  for (std::size_t r = 0; r < kLanes; ++r) {
    for (std::size_t c = 0; c < kLanes; ++c) columns[c][r] = rows[first + r][c];
  }
#endif
  for (std::size_t c = 0; c < kLanes; ++c) total = combine(hn::Load(d, columns[c]), total);
  return total;
}

// Maxima of a row of scores, lane by lane. A NaN score is ignored: its p is NaN.
HWY_INLINE FloatVector max_score(ColumnRange block, const float* row) {
  const Floats d;
  FloatVector greatest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (std::size_t k = static_cast<std::size_t>(block.begin) / kLanes * kLanes; k < static_cast<std::size_t>(block.end);
       k += kLanes) {
    greatest = hn::Max(hn::Load(d, row + k), greatest);
  }
  return greatest;
}

// Converts scores to x in place, and returns their maxima as max_score() does.
template <bool kMasked, bool kCapped>
HWY_INLINE FloatVector scale_and_mask(const TileShape& shape, ColumnRange block, ColumnRange visible, float* row) {
  const Floats d;
  const FloatVector scale = hn::Set(d, shape.softmax_scale);
  const FloatVector cap = hn::Set(d, shape.softcap);
  const FloatVector minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVector begin = hn::Set(d, static_cast<float>(visible.begin));
  const FloatVector end = hn::Set(d, static_cast<float>(visible.end));
  FloatVector greatest = minus_infinity;
  for (std::size_t k = static_cast<std::size_t>(block.begin) / kLanes * kLanes; k < static_cast<std::size_t>(block.end);
       k += kLanes) {
    FloatVector x = hn::Mul(hn::Load(d, row + k), scale);
    if constexpr (kCapped) x = hn::Mul(cap, tanh(d, hn::Div(x, cap)));
    if constexpr (kMasked) {
      const FloatVector index = hn::Iota(d, static_cast<float>(k));
      x = hn::IfThenElse(hn::And(hn::Ge(index, begin), hn::Lt(index, end)), x, minus_infinity);
    }
    hn::Store(x, d, row + k);
    greatest = hn::Max(x, greatest);
  }
  return greatest;
}

// Converts scores · scale to p in place. Returns Σ p, lane by lane.
template <bool kScaled>
HWY_INLINE FloatVector exponentiate(ColumnRange block, float softmax_scale, float softmax_offset, float* row) {
  const Floats d;
  const FloatVector scale = hn::Set(d, softmax_scale);
  const FloatVector shift = hn::Set(d, softmax_offset);
  const FloatVector log2e = hn::Set(d, kLog2E);
  FloatVector sum = hn::Zero(d);
  for (std::size_t k = static_cast<std::size_t>(block.begin) / kLanes * kLanes; k < static_cast<std::size_t>(block.end);
       k += kLanes) {
    FloatVector x = hn::Load(d, row + k);
    if constexpr (!kScaled) x = hn::Mul(x, scale);
    const FloatVector p = weight(d, hn::Mul(hn::Sub(x, shift), log2e));
    hn::Store(p, d, row + k);
    sum = hn::Add(sum, p);
  }
  return sum;
}

// Whether scores may be scaled after their maximum is taken: scaling is monotonic and makes no NaN.
inline bool scales_after_max(const TileShape& shape) {
  return shape.softmax_scale > 0.0F && shape.softmax_scale <= std::numeric_limits<float>::max();
}

// kScaled: scores are scaled before their maximum is taken.
template <bool kScaled, bool kMasked, bool kCapped>
void attend_block(const TileShape& shape, const PackedTile& tile, const RowBatch& batch, const RowBlock& block,
                  float* scores, TilePrefetcher& prefetcher) {
  const Floats d;
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const auto head_dim_v = static_cast<std::size_t>(shape.head_dim_v);
  const auto begin = static_cast<std::size_t>(block.span.begin);
  const auto end = static_cast<std::size_t>(block.span.end);
  const auto rows = static_cast<std::size_t>(block.rows);

  for (std::size_t column = begin / kPanelWidth * kPanelWidth; column < end; column += kPanelWidth) {
    multiply<kPanelVectors>({batch.q + block.first * head_dim, head_dim, tile.k + column * head_dim, head_dim}, rows,
                            StoreScores{scores + column});
    prefetcher.advance(rows);
  }

  HWY_ALIGN RowLanes lanes = {};
  HWY_ALIGN float m[kRowBlockPadded] = {};
  HWY_ALIGN float l[kRowBlockPadded] = {};
  HWY_ALIGN float softmax_offset[kRowBlockPadded];
  HWY_ALIGN float scale[kRowBlockPadded];
  std::copy_n(batch.offset + block.first, rows, m);
  std::copy_n(batch.sum + block.first, rows, l);
  for (std::size_t r = 0; r < rows; ++r) {
    float* const row = scores + r * kKeyTile;
    prefetcher.advance(1);
    if constexpr (kScaled) {
      hn::Store(scale_and_mask<kMasked, kCapped>(shape, block.span, batch.visible[block.first + r], row), d, lanes[r]);
    } else {
      hn::Store(max_score(block.span, row), d, lanes[r]);
    }
  }
  const FloatVector minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  // Never NaN, as x86 returns max's second operand and other targets compare.
  const auto greater = [](FloatVector lane, FloatVector max) HWY_ATTR {
    return HWY_ARCH_X86 ? hn::Max(lane, max) : hn::IfThenElse(hn::Gt(lane, max), lane, max);
  };
  for (std::size_t r = 0; r < rows; r += kLanes) {
    FloatVector max = reduce_lanes(lanes, r, minus_infinity, greater);
    if constexpr (!kScaled) max = hn::Mul(max, hn::Set(d, shape.softmax_scale));
    const FloatVector m_old = hn::Load(d, m + r);
    // + 0 turns −0 into +0: which zero is the maximum depends on when scores are scaled.
    const FloatVector m_new = hn::Add(greater(max, m_old), hn::Zero(d));
    // If every score so far is −∞: −∞ − 0 gives weight 0, but −∞ − −∞ would give NaN.
    const FloatVector finite = hn::IfThenZeroElse(hn::Eq(m_new, minus_infinity), m_new);
    hn::Store(m_new, d, m + r);
    hn::Store(finite, d, softmax_offset + r);
    // Subtract before scaling to log2: an unchanged maximum scales by exactly 1.
    hn::Store(weight(d, hn::Mul(hn::Sub(m_old, finite), hn::Set(d, kLog2E))), d, scale + r);
  }
  for (std::size_t r = 0; r < rows; ++r) {
    prefetcher.advance(1);
    hn::Store(exponentiate<kScaled>(block.span, shape.softmax_scale, softmax_offset[r], scores + r * kKeyTile), d,
              lanes[r]);
  }
  const auto add = [](FloatVector lane, FloatVector total) HWY_ATTR { return hn::Add(total, lane); };
  for (std::size_t r = 0; r < rows; r += kLanes) {
    const FloatVector tile_sum = reduce_lanes(lanes, r, hn::Zero(d), add);
    hn::Store(hn::MulAdd(hn::Load(d, l + r), hn::Load(d, scale + r), tile_sum), d, l + r);
  }
  std::copy_n(m, rows, batch.offset + block.first);
  std::copy_n(l, rows, batch.sum + block.first);

  const std::size_t stride = (head_dim_v + kLanes - 1) / kLanes * kLanes;
  for (std::size_t column = 0; column < head_dim_v; column += kPanelWidth) {
    GemmOperands operands{scores + begin, kKeyTile, tile.v + column * kKeyTile + begin * kPanelWidth, end - begin};
    prefetcher.advance(rows);
    AttentionOutputs store{batch.acc + block.first * stride + column, stride, scale};
    if (column + (kPanelVectors - 1) * kLanes < head_dim_v) {
      multiply<kPanelVectors>(operands, rows, store);
      continue;
    }
    for (std::size_t c = column; c < head_dim_v; c += kLanes, operands.b += kLanes, store.o += kLanes) {
      multiply<1>(operands, rows, store);
    }
  }
}

// The next rows to process together, at most `max_rows`. If the tile is not finite, they must see the same columns,
// because p = 0 of a masked one times NaN or ∞ would be NaN.
inline RowBlock next_block(const ColumnRange* visible, int rows, bool finite, std::size_t first, int max_rows) {
  RowBlock block{first, 0, visible[first]};
  const int limit = std::min(max_rows, rows - static_cast<int>(first));
  while (block.rows < limit) {
    const ColumnRange next = visible[first + static_cast<std::size_t>(block.rows)];
    if (!finite && next != visible[first]) break;
    block.span = {std::min(block.span.begin, next.begin), std::max(block.span.end, next.end)};
    ++block.rows;
  }
  return block;
}

// Whether each row sees all columns of the block's span, which begins and ends at multiples of `columns`.
inline bool sees_whole(const ColumnRange* visible, const RowBlock& block, std::size_t columns) {
  if (static_cast<std::size_t>(block.span.begin) % columns != 0) return false;
  if (static_cast<std::size_t>(block.span.end) % columns != 0) return false;
  const ColumnRange* const first = visible + block.first;
  return std::all_of(first, first + block.rows, [&](const ColumnRange& span) { return span == block.span; });
}

inline void attend_tile(const TileShape& shape, const PackedTile& tile, const RowBatch& batch, float* scores) {
  const auto rows = static_cast<std::size_t>(batch.rows);
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const std::size_t panels_v = (static_cast<std::size_t>(shape.head_dim_v) + kPanelWidth - 1) / kPanelWidth;
  TilePrefetcher prefetcher;
  if (batch.next != nullptr) {
    // Once per row and panel of a product, and once per row in each pass over scores.
    prefetcher = {batch.next->k, head_dim * kKeyTile * sizeof(float), batch.next->v,
                  panels_v * kPanelWidth * kKeyTile * sizeof(float), rows * (kKeyTile / kPanelWidth + panels_v + 2)};
  }
  for (std::size_t first = 0; first < rows;) {
    const RowBlock block = next_block(batch.visible, batch.rows, tile.v_finite, first, kRowBlock);
    const bool masked = !sees_whole(batch.visible, block, kLanes);
    if (shape.softcap > 0.0F) {
      masked ? attend_block<true, true, true>(shape, tile, batch, block, scores, prefetcher)
             : attend_block<true, false, true>(shape, tile, batch, block, scores, prefetcher);
    } else if (masked || !scales_after_max(shape)) {
      attend_block<true, true, false>(shape, tile, batch, block, scores, prefetcher);
    } else {
      attend_block<false, false, false>(shape, tile, batch, block, scores, prefetcher);
    }
    first += static_cast<std::size_t>(block.rows);
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
