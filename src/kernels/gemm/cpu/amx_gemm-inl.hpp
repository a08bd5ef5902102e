// SPDX-License-Identifier: Apache-2.0
// Matrix product of the CPU kernels by AMX tiles, C[rows, columns] = Σ_k X[rows, k] · W[columns, k], of bf16, or of
// int8 with exact sums. Each bf16 element is a sum of TDPBF16PS from zero in K order, 32 elements at a time: two chains
// of 16 fused multiply-adds from zero, one over even elements and one over odd ones, and their sum is added. Subnormals
// are zero. So an element's bits do not depend on which rows and columns are computed together, nor on the form below.
//
// Rows of W are the left factor: W is read without packing, as [16 columns, 64 bytes of K]. The right factor is X,
// packed once for all columns as [⌈bytes of K / 64⌉, 16 quads of bytes, 16 rows, 4]. C is transposed.
#if defined(RINGATTN_KERNELS_CPU_AMX_GEMM_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_AMX_GEMM_INL_HPP_
#undef RINGATTN_KERNELS_CPU_AMX_GEMM_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_AMX_GEMM_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/common/cpu/amx_pairs-inl.hpp"
#include "kernels/common/cpu/amx_tiles.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"

#undef RINGATTN_HAVE_AMX_GEMM
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3
#define RINGATTN_HAVE_AMX_GEMM

// The same warning as in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

static_assert(kLanes == kTileColumns);
inline constexpr std::int64_t kAmxColumns = 2 * kTileRows;  // of a product

// The first `bytes` at `row` (64 or more: all 64), then zeros. Zeros if `row` is null.
HWY_INLINE __m512i load_step(const std::byte* row, std::int64_t bytes) {
  if (row == nullptr || bytes <= 0) return _mm512_setzero_si512();
  if (bytes >= kTileRowBytes) return _mm512_loadu_si512(row);
  return _mm512_maskz_loadu_epi8((std::uint64_t{1} << bytes) - 1, row);
}

// Packs 16 rows of X; a null row is zero.
inline void pack_amx_rows(const std::byte* const* rows, std::int64_t bytes, std::byte* tiles) {
  for (std::int64_t begin = 0; begin < bytes; begin += kTileRowBytes, tiles += kTileBytes) {
    __m512i steps[kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      steps[i] = rows[i] == nullptr ? _mm512_setzero_si512() : load_step(rows[i] + begin, bytes - begin);
    }
    transpose_pairs(steps, tiles);
  }
}

// Copies W's `columns` rows, `stride` bytes apart, to [⌈bytes / 64⌉, 2, 16 columns, 64]; other columns are zero.
inline void pack_amx_columns(const std::byte* w, std::int64_t stride, std::int64_t columns, std::int64_t bytes,
                             std::byte* tiles) {
  for (std::int64_t begin = 0; begin < bytes; begin += kTileRowBytes) {
    for (std::int64_t i = 0; i < kAmxColumns; ++i, tiles += kTileRowBytes) {
      const std::byte* const at = i < columns ? w + i * stride + begin : nullptr;
      _mm512_store_si512(tiles, load_step(at, bytes - begin));
    }
  }
}

// Like pack_amx_columns() of bf16, for a W whose columns are adjacent and whose K is `stride` bytes apart.
inline void pack_amx_columns_transposed(const std::byte* w, std::int64_t stride, std::int64_t columns,
                                        std::int64_t dim_k, std::byte* tiles) {
  for (std::int64_t k = 0; k < dim_k; k += kTileDepth, tiles += 2 * kTileBytes) {
    __m512i halves[2][kTileRows];
    for (int pair = 0; pair < kTileRows; ++pair) {
      const std::int64_t even = k + 2 * pair;
      const __m512i a = load_step(even < dim_k ? w + even * stride : nullptr, 2 * columns);
      const __m512i b = load_step(even + 1 < dim_k ? w + (even + 1) * stride : nullptr, 2 * columns);
      const RowPairs pairs = interleave_rows(a, b);
      halves[0][pair] = pairs.first;
      halves[1][pair] = pairs.second;
    }
    transpose_pairs(halves[0], tiles);
    transpose_pairs(halves[1], tiles + kTileBytes);
  }
}

// 32 columns of W over some of K.
struct AmxColumns {
  const std::byte* data = nullptr;  // of the first 16 columns and 64 bytes of K
  std::size_t column_stride = 0;    // bytes from column to column
  std::size_t half_stride = 0;      // bytes to the other 16 columns
  std::size_t step_stride = 0;      // bytes to the next 64 bytes of K
  std::int64_t steps = 0;           // whole ones
  const std::byte* last = nullptr;  // a packed incomplete step after the others; null: there is none
};

// As pack_amx_columns() wrote them.
inline AmxColumns packed_columns(const std::byte* tiles, std::int64_t bytes) {
  return {tiles, kTileRowBytes, kTileBytes, 2 * kTileBytes, (bytes + kTileRowBytes - 1) / kTileRowBytes, nullptr};
}

// Uses W in place if all columns exist. Otherwise packs them to `scratch`, which has room for all of them.
inline AmxColumns columns_in_place(const std::byte* w, std::int64_t stride, std::int64_t columns, std::int64_t bytes,
                                   std::byte* scratch) {
  if (columns < kAmxColumns) {
    pack_amx_columns(w, stride, columns, bytes, scratch);
    return packed_columns(scratch, bytes);
  }
  const std::int64_t whole = bytes / kTileRowBytes;
  const std::int64_t rest = bytes - whole * kTileRowBytes;
  if (rest > 0) pack_amx_columns(w + whole * kTileRowBytes, stride, columns, rest, scratch);
  return {w,     static_cast<std::size_t>(stride), static_cast<std::size_t>(stride) * kTileRows, kTileRowBytes,
          whole, rest > 0 ? scratch : nullptr};
}

// X as pack_amx_rows() wrote it.
struct AmxRows {
  const std::byte* tiles = nullptr;
  std::size_t stride = 0;  // bytes from 16 rows to the next 16
  std::int64_t rows = 0;
};

template <bool kInteger, int kSum, int kLeft, int kRight>
HWY_INLINE void multiply_step() {
  if constexpr (kInteger) {
    multiply_int8_tiles<kSum, kLeft, kRight>();
  } else {
    multiply_tiles<kSum, kLeft, kRight>();
  }
}

// 32 columns and 16 · kRowTiles rows.
template <bool kInteger, int kRowTiles>
HWY_INLINE void multiply_columns(const AmxColumns& w, const std::byte* x, std::size_t x_stride, float* sums) {
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (kRowTiles == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
  const auto step = [&](const std::byte* columns, std::size_t stride, std::size_t half) HWY_ATTR {
    load_tile<4>(columns, stride);
    load_tile<6>(x, kTileRowBytes);
    multiply_step<kInteger, 0, 4, 6>();
    load_tile<5>(columns + half, stride);
    multiply_step<kInteger, 1, 5, 6>();
    if constexpr (kRowTiles == 2) {
      load_tile<7>(x + x_stride, kTileRowBytes);
      multiply_step<kInteger, 2, 4, 7>();
      multiply_step<kInteger, 3, 5, 7>();
    }
    x += kTileBytes;
  };
  const std::byte* columns = w.data;
  for (std::int64_t i = 0; i < w.steps; ++i, columns += w.step_stride) step(columns, w.column_stride, w.half_stride);
  if (w.last != nullptr) step(w.last, kTileRowBytes, kTileBytes);
  constexpr std::size_t kTileFloats = kTileBytes / sizeof(float);
  store_tile<0>(sums, kTileRowBytes);
  store_tile<1>(sums + kTileFloats, kTileRowBytes);
  if constexpr (kRowTiles == 2) {
    store_tile<2>(sums + 2 * kTileFloats, kTileRowBytes);
    store_tile<3>(sums + 3 * kTileFloats, kTileRowBytes);
  }
}

// Calls store(row, column, vector) for each vector of the product, as multiply() of gemm-inl.hpp. kInteger: vectors of
// int32.
template <bool kInteger, class Store>
HWY_NOINLINE void multiply_amx(const AmxColumns& w, const AmxRows& x, const Store& store) {
  constexpr int kRowBlock = 2 * kTileRows;
  alignas(64) float sums[4][kTileRows][kTileColumns];  // [row tiles, column tiles, columns, rows]
  alignas(64) std::byte transposed[kTileBytes];
  configure_tiles(TileConfig{});
  const std::byte* tiles = x.tiles;
  for (std::int64_t row = 0; row < x.rows; row += kRowBlock, tiles += 2 * x.stride) {
    const std::int64_t rows = std::min<std::int64_t>(kRowBlock, x.rows - row);
    rows > kTileRows ? multiply_columns<kInteger, 2>(w, tiles, x.stride, sums[0][0])
                     : multiply_columns<kInteger, 1>(w, tiles, x.stride, sums[0][0]);
    for (int tile = 0; tile < (rows > kTileRows ? 4 : 2); ++tile) {
      __m512i columns[kTileRows];
      for (int i = 0; i < kTileRows; ++i) columns[i] = _mm512_load_si512(sums[tile][i]);
      transpose_pairs(columns, transposed);
      const std::int64_t first = tile / 2 * kTileRows;
      for (std::int64_t i = 0; i < std::min<std::int64_t>(kTileRows, rows - first); ++i) {
        store(static_cast<std::size_t>(row + first + i), static_cast<std::size_t>(tile % 2 * kTileColumns),
              FloatVector{_mm512_load_ps(transposed + i * kTileRowBytes)});
      }
    }
  }
  release_tiles();
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
