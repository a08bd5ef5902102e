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

// Converts scores to x in place. Returns max(m, max x). A NaN score is ignored in the max: its p is NaN.
template <bool kMasked, bool kCapped>
HWY_INLINE float scale_and_mask(const TileShape& shape, ColumnRange block, ColumnRange visible, float m, float* row) {
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
  HWY_ALIGN float lanes[kLanes];
  hn::Store(greatest, d, lanes);
  for (const float lane : lanes) m = lane > m ? lane : m;
  return m;
}

// Converts x to p in place. Returns Σ p.
HWY_INLINE float exponentiate(ColumnRange block, float softmax_offset, float* row) {
  const Floats d;
  const FloatVector shift = hn::Set(d, softmax_offset);
  const FloatVector log2e = hn::Set(d, kLog2E);
  FloatVector sum = hn::Zero(d);
  for (std::size_t k = static_cast<std::size_t>(block.begin) / kLanes * kLanes; k < static_cast<std::size_t>(block.end);
       k += kLanes) {
    const FloatVector p = weight(d, hn::Mul(hn::Sub(hn::Load(d, row + k), shift), log2e));
    hn::Store(p, d, row + k);
    sum = hn::Add(sum, p);
  }
  HWY_ALIGN float lanes[kLanes];
  hn::Store(sum, d, lanes);
  float total = 0.0F;
  for (const float lane : lanes) total += lane;
  return total;
}

template <bool kMasked, bool kCapped>
void attend_block(const TileShape& shape, const PackedTile& tile, const RowBatch& batch, const RowBlock& block,
                  float* scores) {
  const Floats d;
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const auto head_dim_v = static_cast<std::size_t>(shape.head_dim_v);
  const auto begin = static_cast<std::size_t>(block.span.begin);
  const auto end = static_cast<std::size_t>(block.span.end);
  const auto rows = static_cast<std::size_t>(block.rows);

  for (std::size_t column = begin / kPanelWidth * kPanelWidth; column < end; column += kPanelWidth) {
    multiply<kPanelVectors>({batch.q + block.first * head_dim, head_dim, tile.k + column * head_dim, head_dim}, rows,
                            StoreScores{scores + column});
  }

  HWY_ALIGN float m_old[kRowBlockPadded] = {};
  HWY_ALIGN float m_new[kRowBlockPadded] = {};
  HWY_ALIGN float l[kRowBlockPadded] = {};
  HWY_ALIGN float softmax_offset[kRowBlockPadded];
  HWY_ALIGN float scale[kRowBlockPadded];
  HWY_ALIGN float tile_sum[kRowBlockPadded] = {};
  std::copy_n(batch.offset + block.first, rows, m_old);
  std::copy_n(batch.sum + block.first, rows, l);
  for (std::size_t r = 0; r < rows; ++r) {
    m_new[r] = scale_and_mask<kMasked, kCapped>(shape, block.span, batch.visible[block.first + r], m_old[r],
                                                scores + r * kKeyTile);
  }
  for (std::size_t r = 0; r < rows; r += kLanes) {
    const FloatVector m = hn::Load(d, m_new + r);
    // If every score so far is −∞: −∞ − 0 gives weight 0, but −∞ − −∞ would give NaN.
    const FloatVector finite = hn::IfThenZeroElse(hn::Eq(m, hn::Set(d, -std::numeric_limits<float>::infinity())), m);
    hn::Store(finite, d, softmax_offset + r);
    // Subtract before scaling to log2: an unchanged maximum scales by exactly 1.
    const FloatVector change = hn::Sub(hn::Load(d, m_old + r), finite);
    hn::Store(weight(d, hn::Mul(change, hn::Set(d, kLog2E))), d, scale + r);
  }
  for (std::size_t r = 0; r < rows; ++r)
    tile_sum[r] = exponentiate(block.span, softmax_offset[r], scores + r * kKeyTile);
  for (std::size_t r = 0; r < rows; r += kLanes) {
    hn::Store(hn::MulAdd(hn::Load(d, l + r), hn::Load(d, scale + r), hn::Load(d, tile_sum + r)), d, l + r);
  }
  std::copy_n(m_new, rows, batch.offset + block.first);
  std::copy_n(l, rows, batch.sum + block.first);

  const std::size_t stride = (head_dim_v + kLanes - 1) / kLanes * kLanes;
  for (std::size_t column = 0; column < head_dim_v; column += kPanelWidth) {
    GemmOperands operands{scores + begin, kKeyTile, tile.v + column * kKeyTile + begin * kPanelWidth, end - begin};
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
  for (std::size_t first = 0; first < static_cast<std::size_t>(batch.rows);) {
    const RowBlock block = next_block(batch.visible, batch.rows, tile.v_finite, first, kRowBlock);
    const bool masked = !sees_whole(batch.visible, block, kLanes);
    if (shape.softcap > 0.0F) {
      masked ? attend_block<true, true>(shape, tile, batch, block, scores)
             : attend_block<false, true>(shape, tile, batch, block, scores);
    } else {
      masked ? attend_block<true, false>(shape, tile, batch, block, scores)
             : attend_block<false, false>(shape, tile, batch, block, scores);
    }
    first += static_cast<std::size_t>(block.rows);
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
