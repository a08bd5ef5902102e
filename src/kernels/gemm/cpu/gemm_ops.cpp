// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/gemm/cpu/gemm_ops.hpp"

#include <algorithm>

// The same SIMD targets as in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/cpu/gemm_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/gemm/cpu/amx_gemm-inl.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"
#include "kernels/gemm/cpu/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

template <Dtype kDtype>
void pack_matrix(const GemmMatrix& matrix, float* panels) {
  constexpr auto kWidth = static_cast<std::int64_t>(kPanelWidth);
  constexpr auto kElement = static_cast<std::int64_t>(size_of(kDtype));
  const auto panel_of = [&](std::int64_t column) {
    return panels + (column / kWidth * kWidth) * matrix.dim_k + column % kWidth;
  };
  if (matrix.k_stride == kElement) {
    for (std::int64_t column = 0; column < matrix.dim_n; column += kKeysAtOnce) {
      const std::byte* rows[kKeysAtOnce];
      for (std::int64_t i = 0; i < kKeysAtOnce; ++i) rows[i] = matrix.data + (column + i) * matrix.n_stride;
      transpose<kDtype>(rows, static_cast<std::size_t>(matrix.dim_k), kPanelWidth, panel_of(column));
    }
  } else {
    const AtMostEight d;
    for (std::int64_t i = 0; i < matrix.dim_k; ++i) {
      const std::byte* const row = matrix.data + i * matrix.k_stride;
      for (std::int64_t column = 0; column < matrix.dim_n; column += static_cast<std::int64_t>(hn::Lanes(d))) {
        hn::Store(load_wide<kDtype>(d, row, static_cast<std::size_t>(column)), d, panel_of(column) + i * kWidth);
      }
    }
  }
  if (matrix.dim_n % kWidth == 0) return;
  for (std::int64_t i = 0; i < matrix.dim_k; ++i) {
    std::fill_n(panel_of(matrix.dim_n) + i * kWidth, kWidth - matrix.dim_n % kWidth, 0.0F);
  }
}

void pack_gemm(const GemmMatrix& matrix, float* panels) {
  switch (matrix.dtype) {
    case Dtype::kF32:
      return pack_matrix<Dtype::kF32>(matrix, panels);
    case Dtype::kBf16:
      return pack_matrix<Dtype::kBf16>(matrix, panels);
    case Dtype::kF16:
      return pack_matrix<Dtype::kF16>(matrix, panels);
  }
}

template <Dtype kDtype>
void multiply_as(const GemmRows& rows, std::int64_t dim_n, std::int64_t dim_k, const float* panels) {
  const auto depth = static_cast<std::size_t>(dim_k);
  const auto columns = static_cast<std::size_t>(dim_n);
  for (std::size_t column = 0; column < columns; column += kPanelWidth) {
    multiply<kPanelVectors>(
        {rows.rows, depth, panels + column * depth, depth}, static_cast<std::size_t>(rows.count),
        StoreRounded<kDtype>{rows.out + column * size_of(kDtype), rows.out_stride, columns - column});
  }
}

void multiply_gemm(const GemmRows& rows, std::int64_t dim_n, std::int64_t dim_k, const float* panels) {
  switch (rows.dtype) {
    case Dtype::kF32:
      return multiply_as<Dtype::kF32>(rows, dim_n, dim_k, panels);
    case Dtype::kBf16:
      return multiply_as<Dtype::kBf16>(rows, dim_n, dim_k, panels);
    case Dtype::kF16:
      return multiply_as<Dtype::kF16>(rows, dim_n, dim_k, panels);
  }
}

#ifdef RINGATTN_HAVE_AMX_GEMM
static_assert(kAmxColumns == kGemmTileColumns && kTileRows == kGemmTileRows && kTileDepth == kGemmTileDepth);

void pack_transposed_tiles(const GemmMatrix& matrix, std::byte* tiles) {
  const std::int64_t panel_bytes = (matrix.dim_k + kTileDepth - 1) / kTileDepth * 2 * kGemmTileBytes;
  for (std::int64_t column = 0; column < matrix.dim_n; column += kAmxColumns, tiles += panel_bytes) {
    pack_amx_columns_transposed(matrix.data + column * matrix.n_stride, matrix.k_stride,
                                std::min(kAmxColumns, matrix.dim_n - column), matrix.dim_k, tiles);
  }
}

void multiply_gemm_tiles(const GemmTiles& gemm) {
  const GemmMatrix& matrix = gemm.matrix;
  const std::int64_t bytes = 2 * matrix.dim_k;
  const std::byte* packed = gemm.packed;
  for (std::int64_t column = 0; column < matrix.dim_n; column += kAmxColumns) {
    const std::int64_t columns = matrix.dim_n - column;
    AmxColumns w;
    if (packed != nullptr) {
      w = packed_columns(packed, bytes);
      packed += w.steps * 2 * kGemmTileBytes;
    } else {
      w = columns_in_place(matrix.data + column * matrix.n_stride, matrix.n_stride, columns, bytes, gemm.scratch);
    }
    multiply_amx<false>(w, {gemm.rows, static_cast<std::size_t>(gemm.rows_stride), gemm.count},
                        StoreRounded<Dtype::kBf16>{gemm.out + 2 * column, gemm.out_stride,
                                                   static_cast<std::size_t>(std::min(kAmxColumns, columns))});
  }
}
#endif

// The table with AMX tiles, or null for a target without AVX-512.
const GemmTileOps* gemm_tile_table() {
#ifdef RINGATTN_HAVE_AMX_GEMM
  static const GemmTileOps ops{&pack_amx_rows, &pack_transposed_tiles, &multiply_gemm_tiles};
  return &ops;
#else
  return nullptr;
#endif
}

const GemmOps& gemm_ops() {
  static const GemmOps ops{static_cast<int>(kPanelWidth), &pack_gemm, &multiply_gemm};
  return ops;
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(gemm_ops);
HWY_EXPORT(gemm_tile_table);

const GemmOps& best_gemm_ops() { return HWY_DYNAMIC_DISPATCH(gemm_ops)(); }
const GemmTileOps* gemm_tile_ops() { return has_amx_bf16() ? HWY_DYNAMIC_DISPATCH(gemm_tile_table)() : nullptr; }

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
