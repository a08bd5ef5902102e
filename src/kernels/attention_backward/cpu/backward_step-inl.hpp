// SPDX-License-Identifier: Apache-2.0
// One tile of the backward pass (backward_ops.hpp). x is the forward's score (attention/cpu/tile_step-inl.hpp):
//   P  = exp2(S · c − LSE2), c = softmax_scale · log2 e; with softcap exp2(x · log2 e − LSE2)
//   dS = P ∘ (dP − delta); with softcap also ∘ (1 − (x / softcap)²)
// both 0 where masked, and rounded to the input dtype.
#if defined(RINGATTN_KERNELS_CPU_BACKWARD_STEP_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_BACKWARD_STEP_INL_HPP_
#undef RINGATTN_KERNELS_CPU_BACKWARD_STEP_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_BACKWARD_STEP_INL_HPP_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/attention/cpu/tile_step-inl.hpp"
#include "kernels/attention_backward/cpu/backward_ops.hpp"
#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

struct AddTileSums {
  float* sums;  // [rows, stride], at the panel's first column
  std::size_t stride;

  HWY_INLINE void operator()(std::size_t row, std::size_t column, FloatVector value) const {
    const Floats d;
    float* at = sums + row * stride + column;
    // + 0 turns −0 into +0, as in AttentionOutputs.
    hn::Store(hn::Add(hn::Load(d, at), hn::Add(value, hn::Zero(d))), d, at);
  }
};

// Converts a row of scores and dP to P and dS in place. `lse2` and `delta` are those of the row, or arrays of the
// columns.
template <Dtype kDtype, bool kColumnStats, bool kMasked, bool kCapped>
HWY_INLINE void differentiate(const TileShape& shape, ColumnRange block, ColumnRange visible, const float* lse2,
                              const float* delta, float* scores, float* dp) {
  const Floats d;
  const FloatVector scale = hn::Set(d, kCapped ? shape.softmax_scale : shape.softmax_scale * kLog2E);
  const FloatVector cap = hn::Set(d, shape.softcap);
  const FloatVector log2e = hn::Set(d, kLog2E);
  const FloatVector begin = hn::Set(d, static_cast<float>(visible.begin));
  const FloatVector end = hn::Set(d, static_cast<float>(visible.end));
  FloatVector shift = hn::Set(d, *lse2);
  FloatVector row_delta = hn::Set(d, *delta);
  for (std::size_t k = static_cast<std::size_t>(block.begin) / kLanes * kLanes; k < static_cast<std::size_t>(block.end);
       k += kLanes) {
    if constexpr (kColumnStats) {
      shift = hn::Load(d, lse2 + k);
      row_delta = hn::Load(d, delta + k);
    }
    const FloatVector s = hn::Load(d, scores + k);
    FloatVector p;
    FloatVector ds = hn::Sub(hn::Load(d, dp + k), row_delta);
    if constexpr (kCapped) {
      const FloatVector x = hn::Mul(cap, tanh(d, hn::Div(hn::Mul(s, scale), cap)));
      const FloatVector ratio = hn::Div(x, cap);
      p = exp2(d, hn::MulSub(x, log2e, shift));
      ds = hn::Mul(hn::Mul(p, ds), hn::NegMulAdd(ratio, ratio, hn::Set(d, 1.0F)));
    } else {
      p = exp2(d, hn::MulSub(s, scale, shift));
      ds = hn::Mul(p, ds);
    }
    if constexpr (kMasked) {
      const FloatVector index = hn::Iota(d, static_cast<float>(k));
      const auto is_visible = hn::And(hn::Ge(index, begin), hn::Lt(index, end));
      p = hn::IfThenElseZero(is_visible, p);
      ds = hn::IfThenElseZero(is_visible, ds);
    }
    // P feeds dY only, which has the stats in columns.
    if constexpr (kColumnStats) hn::Store(round_to<kDtype>(d, p), d, scores + k);
    hn::Store(round_to<kDtype>(d, ds), d, dp + k);
  }
}

// sums[rows, dim] += weights[rows, span] · the tile's rows in `span`. panels: [⌈dim / panel_width⌉, kKeyTile,
// panel_width].
inline void add_product(const float* weights, std::size_t rows, ColumnRange span, const float* panels, std::size_t dim,
                        float* sums) {
  const auto begin = static_cast<std::size_t>(span.begin);
  const std::size_t depth = static_cast<std::size_t>(span.end) - begin;
  const std::size_t stride = (dim + kLanes - 1) / kLanes * kLanes;
  for (std::size_t column = 0; column < dim; column += kPanelWidth) {
    GemmOperands operands{weights + begin, kKeyTile, panels + column * kKeyTile + begin * kPanelWidth, depth};
    AddTileSums store{sums + column, stride};
    if (column + (kPanelVectors - 1) * kLanes < dim) {
      multiply<kPanelVectors>(operands, rows, store);
      continue;
    }
    for (std::size_t c = column; c < dim; c += kLanes, operands.b += kLanes, store.sums += kLanes) {
      multiply<1>(operands, rows, store);
    }
  }
}

template <Dtype kDtype, bool kColumnStats, bool kMasked, bool kCapped>
void add_backward_block(const TileShape& shape, const BackwardTile& tile, const BackwardRows& batch,
                        const RowBlock& block, float* scores, float* dp) {
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const auto head_dim_v = static_cast<std::size_t>(shape.head_dim_v);
  const auto begin = static_cast<std::size_t>(block.span.begin);
  const auto end = static_cast<std::size_t>(block.span.end);
  const auto rows = static_cast<std::size_t>(block.rows);
  for (std::size_t column = begin / kPanelWidth * kPanelWidth; column < end; column += kPanelWidth) {
    multiply<kPanelVectors>(
        {batch.x + block.first * head_dim, head_dim, tile.m_transposed + column * head_dim, head_dim}, rows,
        StoreScores{scores + column});
    multiply<kPanelVectors>(
        {batch.y + block.first * head_dim_v, head_dim_v, tile.n_transposed + column * head_dim_v, head_dim_v}, rows,
        StoreScores{dp + column});
  }
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t row = block.first + r;
    differentiate<kDtype, kColumnStats, kMasked, kCapped>(
        shape, block.span, batch.visible[row], kColumnStats ? tile.lse2 : batch.lse2 + row,
        kColumnStats ? tile.delta : batch.delta + row, scores + r * kKeyTile, dp + r * kKeyTile);
  }
  const std::size_t dx_stride = (head_dim + kLanes - 1) / kLanes * kLanes;
  add_product(dp, rows, block.span, tile.m, head_dim, batch.dx + block.first * dx_stride);
  if constexpr (kColumnStats) {
    const std::size_t dy_stride = (head_dim_v + kLanes - 1) / kLanes * kLanes;
    add_product(scores, rows, block.span, tile.n, head_dim_v, batch.dy + block.first * dy_stride);
  }
}

template <Dtype kDtype, bool kColumnStats>
void add_backward_rows(const TileShape& shape, const BackwardTile& tile, const BackwardRows& batch, float* scores,
                       float* dp) {
  for (std::size_t first = 0; first < static_cast<std::size_t>(batch.rows);) {
    const RowBlock block = next_block(batch.visible, batch.rows, tile.finite, first, kRowBlock);
    const bool masked = !sees_whole(batch.visible, block, kLanes);
    if (shape.softcap > 0.0F) {
      masked ? add_backward_block<kDtype, kColumnStats, true, true>(shape, tile, batch, block, scores, dp)
             : add_backward_block<kDtype, kColumnStats, false, true>(shape, tile, batch, block, scores, dp);
    } else {
      masked ? add_backward_block<kDtype, kColumnStats, true, false>(shape, tile, batch, block, scores, dp)
             : add_backward_block<kDtype, kColumnStats, false, false>(shape, tile, batch, block, scores, dp);
    }
    first += static_cast<std::size_t>(block.rows);
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
