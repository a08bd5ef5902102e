// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/common/cpu/tile_ops.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/common/cpu/amx.hpp"

// The number of lanes affects the bits, so targets with scalable vectors are disabled. They run as NEON or EMU128.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/common/cpu/tile_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/attention/cpu/amx_step-inl.hpp"
#include "kernels/attention/cpu/merge-inl.hpp"
#include "kernels/attention/cpu/tile_step-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/decode/cpu/amx_rows-inl.hpp"
#include "kernels/gemm/cpu/store-inl.hpp"

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

template <Dtype kDtype>
void write_row_as(const float* acc, std::size_t count, float scale, float sum, std::byte* out) {
  const Floats d;
  const StoreRounded<kDtype> store{out, 0, count};
  const auto finished = [&](FloatVector a) HWY_ATTR { return hn::Div(hn::Mul(a, hn::Set(d, scale)), hn::Set(d, sum)); };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(0, i, finished(hn::LoadU(d, acc + i)));
  if (i == count) return;
  HWY_ALIGN float rest[kLanes] = {};
  std::copy(acc + i, acc + count, rest);
  store(0, i, finished(hn::Load(d, rest)));
}

void write_row(const float* acc, int count, float scale, float sum, Dtype dtype, std::byte* out) {
  const auto n = static_cast<std::size_t>(count);
  switch (dtype) {
    case Dtype::kF32:
      return write_row_as<Dtype::kF32>(acc, n, scale, sum, out);
    case Dtype::kBf16:
      return write_row_as<Dtype::kBf16>(acc, n, scale, sum, out);
    case Dtype::kF16:
      return write_row_as<Dtype::kF16>(acc, n, scale, sum, out);
  }
}

// Packing a key tile costs about as much as attending 10 rows to it.
constexpr std::size_t kWorkTileRows = 480;

// Measured on one core, rounded (bench/notes/attention-portable.md). It depends on the vector length, so that
// unmeasured targets have an estimate too.
constexpr double kFlopsPerSecond = kLanes >= 16 ? 1.4e11 : kLanes >= 8 ? 7e10 : kLanes >= 4 ? 2.5e10 : 8e9;

const TileOps& tile_ops() {
  static const TileOps ops{hwy::TargetName(HWY_TARGET),
                           static_cast<int>(kLanes),
                           static_cast<int>(kPanelWidth),
                           kRowBlock,
                           /*dim_multiple=*/1,
                           /*q_per_float=*/1,
                           /*score_floats=*/std::size_t{kRowBlock} * kKeyTile,
                           kWorkTileRows,
                           /*work_tile_bytes=*/std::numeric_limits<std::size_t>::max(),
                           kFlopsPerSecond,
                           &widen,
                           &widen,
                           &pack,
                           &attend_tile,
                           /*few_rows=*/0,
                           /*pack_queries=*/nullptr,
                           /*attend_in_place=*/nullptr,
                           &merge};
  return ops;
}

// The table with AMX tiles, or null for a target without AVX-512.
const TileOps* tile_ops_with_amx() {
#ifdef RINGATTN_HAVE_AMX_STEP
  static const std::string target = std::string(hwy::TargetName(HWY_TARGET)) + "+AMX-BF16";
  static const TileOps ops{target.c_str(),
                           kTileDepth,
                           kTileDepth,
                           kAmxRowBlock,
                           /*dim_multiple=*/kTileDepth,
                           /*q_per_float=*/2,
                           sizeof(AmxScratch) / sizeof(float),
                           /*work_tile_rows=*/1024,
                           /*work_tile_bytes=*/std::size_t{768} << 10,  // 3/8 of the L2 cache of a Sapphire Rapids
                           /*flops_per_second=*/5e11,                   // one core of a Sapphire Rapids, bf16, rounded
                           &widen,
                           &load_amx_query,
                           &pack_for_amx,
                           &attend_tile_with_amx,
                           /*few_rows=*/kTileRows,
                           &pack_amx_queries,
                           &attend_in_place,
                           &merge};
  return &ops;
#else
  return nullptr;
#endif
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(tile_ops);
HWY_EXPORT(tile_ops_with_amx);
HWY_EXPORT(write_row);

const TileOps& best_tile_ops() { return HWY_DYNAMIC_DISPATCH(tile_ops)(); }
const TileOps* amx_tile_ops() { return has_amx_bf16() ? HWY_DYNAMIC_DISPATCH(tile_ops_with_amx)() : nullptr; }

void write_row(const float* acc, int count, float scale, float sum, Dtype dtype, std::byte* out) {
  HWY_DYNAMIC_DISPATCH(write_row)(acc, count, scale, sum, dtype, out);
}

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
