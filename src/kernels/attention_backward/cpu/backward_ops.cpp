// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/attention_backward/cpu/backward_ops.hpp"

// The same SIMD targets as in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention_backward/cpu/backward_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/attention_backward/cpu/backward_step-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

template <Dtype kDtype>
void pack_backward_as(const TileShape& shape, const TileRows& m, const TileRows& n, int count, BackwardTile& tile) {
  TileShape of_m = shape;
  of_m.head_dim_v = shape.head_dim;
  TileShape of_n = shape;
  of_n.head_dim = shape.head_dim_v;
  pack_k<kDtype>(of_m, m, count, kPanelWidth, tile.m_transposed);
  pack_k<kDtype>(of_n, n, count, kPanelWidth, tile.n_transposed);
  tile.finite = pack_v<kDtype>(of_m, m, count, kPanelWidth, tile.m);
  if (tile.n != nullptr) tile.finite = pack_v<kDtype>(of_n, n, count, kPanelWidth, tile.n) && tile.finite;
}

void pack_backward(const TileShape& shape, const TileRows& m, const TileRows& n, int count, BackwardTile& tile) {
  switch (shape.dtype) {
    case Dtype::kF32:
      return pack_backward_as<Dtype::kF32>(shape, m, n, count, tile);
    case Dtype::kBf16:
      return pack_backward_as<Dtype::kBf16>(shape, m, n, count, tile);
    case Dtype::kF16:
      return pack_backward_as<Dtype::kF16>(shape, m, n, count, tile);
  }
}

template <Dtype kDtype>
void add_backward_as(const TileShape& shape, const BackwardTile& tile, const BackwardRows& rows, float* scores,
                     float* dp) {
  tile.lse2 != nullptr ? add_backward_rows<kDtype, true>(shape, tile, rows, scores, dp)
                       : add_backward_rows<kDtype, false>(shape, tile, rows, scores, dp);
}

void add_backward(const TileShape& shape, const BackwardTile& tile, const BackwardRows& rows, float* scores,
                  float* dp) {
  switch (shape.dtype) {
    case Dtype::kF32:
      return add_backward_as<Dtype::kF32>(shape, tile, rows, scores, dp);
    case Dtype::kBf16:
      return add_backward_as<Dtype::kBf16>(shape, tile, rows, scores, dp);
    case Dtype::kF16:
      return add_backward_as<Dtype::kF16>(shape, tile, rows, scores, dp);
  }
}

template <Dtype kDtype>
float row_dot_as(const std::byte* a, const std::byte* b, std::size_t count) {
  constexpr std::size_t kChains = 8;
  const AtMostEight d;
  constexpr std::size_t kStep = hn::MaxLanes(AtMostEight());
  HWY_ALIGN float chains[kChains] = {};
  for (std::size_t i = 0; i < count; i += kChains) {
    for (std::size_t c = 0; c < kChains; c += kStep) {
      const auto product_sum =
          hn::MulAdd(load_wide<kDtype>(d, a, i + c), load_wide<kDtype>(d, b, i + c), hn::Load(d, chains + c));
      hn::Store(product_sum, d, chains + c);
    }
  }
  return ((chains[0] + chains[1]) + (chains[2] + chains[3])) + ((chains[4] + chains[5]) + (chains[6] + chains[7]));
}

float row_dot(const void* a, const void* b, Dtype dtype, int count) {
  const auto* const left = static_cast<const std::byte*>(a);
  const auto* const right = static_cast<const std::byte*>(b);
  const auto n = static_cast<std::size_t>(count);
  switch (dtype) {
    case Dtype::kF32:
      return row_dot_as<Dtype::kF32>(left, right, n);
    case Dtype::kBf16:
      return row_dot_as<Dtype::kBf16>(left, right, n);
    case Dtype::kF16:
      break;
  }
  return row_dot_as<Dtype::kF16>(left, right, n);
}

const BackwardOps& backward_ops() {
  static const BackwardOps ops{static_cast<int>(kLanes),
                               static_cast<int>(kPanelWidth),
                               kRowBlock,
                               &widen,
                               &pack_backward,
                               &add_backward,
                               &row_dot};
  return ops;
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(backward_ops);

const BackwardOps& best_backward_ops() { return HWY_DYNAMIC_DISPATCH(backward_ops)(); }

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
