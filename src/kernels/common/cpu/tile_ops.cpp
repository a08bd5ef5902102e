// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/common/cpu/tile_ops.hpp"

// The lane count is part of the arithmetic: targets with scalable vectors run as NEON or EMU128.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/common/cpu/tile_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/attention/cpu/merge-inl.hpp"
#include "kernels/attention/cpu/tile_step-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

template <Dtype kDtype>
void pack_as(const TileShape& shape, const TileRows& k, const TileRows& v, int keys, PackedTile& tile) {
  pack_k<kDtype>(shape, k, keys, kPanelWidth, tile.k);
  tile.v_finite = pack_v<kDtype>(shape, v, keys, kPanelWidth, tile.v);
}

void pack(const TileShape& shape, const TileRows& k, const TileRows& v, int keys, PackedTile& tile) {
  switch (shape.dtype) {
    case Dtype::kF32:
      return pack_as<Dtype::kF32>(shape, k, v, keys, tile);
    case Dtype::kBf16:
      return pack_as<Dtype::kBf16>(shape, k, v, keys, tile);
    case Dtype::kF16:
      return pack_as<Dtype::kF16>(shape, k, v, keys, tile);
  }
}

// Measured on one core, rounded (bench/notes/attention-portable.md). It depends on the vector length, so that
// unmeasured targets have an estimate too.
constexpr double kFlopsPerSecond = kLanes >= 16 ? 1.4e11 : kLanes >= 8 ? 7e10 : kLanes >= 4 ? 2.5e10 : 8e9;

const TileOps& tile_ops() {
  static const TileOps ops{hwy::TargetName(HWY_TARGET),
                           static_cast<int>(kLanes),
                           static_cast<int>(kPanelWidth),
                           kRowBlock,
                           kFlopsPerSecond,
                           &widen,
                           &pack,
                           &attend_tile,
                           &merge};
  return ops;
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(tile_ops);

const TileOps& best_tile_ops() { return HWY_DYNAMIC_DISPATCH(tile_ops)(); }

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
