// SPDX-License-Identifier: Apache-2.0
// Register-blocked matrix product of the CPU kernels, C[rows, panel] = Σ_k A[rows, k] · B[k, panel]. Each element is
// one chain of multiply-adds over k in order, from zero: its bits do not depend on which rows are computed together.
#if defined(RINGATTN_KERNELS_CPU_GEMM_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_GEMM_INL_HPP_
#undef RINGATTN_KERNELS_CPU_GEMM_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_GEMM_INL_HPP_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/common/unroll.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using FloatVector = hn::Vec<Floats>;

// Register blocking: rows × vectors accumulators, with one row of B and one element of A at a time.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3  // 32 registers
inline constexpr int kBlockRows = 12;
inline constexpr int kPanelVectors = 2;
#elif HWY_ARCH_ARM_A64  // 32 registers of 4 floats
inline constexpr int kBlockRows = 6;
inline constexpr int kPanelVectors = 4;
#else                   // 16 registers
inline constexpr int kBlockRows = 6;
inline constexpr int kPanelVectors = 2;
#endif
inline constexpr std::size_t kLanes = hn::MaxLanes(Floats());
inline constexpr std::size_t kPanelWidth = kPanelVectors * kLanes;
inline constexpr std::size_t kPanelRowsAhead = 12;  // B is prefetched this far ahead: 150 cycles with AVX-512
inline constexpr int kLineVectors = kLanes < 16 ? static_cast<int>(16 / kLanes) : 1;  // vectors of a cache line

struct GemmOperands {
  const float* a = nullptr;  // [rows, a_stride]
  std::size_t a_stride = 0;
  const float* b = nullptr;  // [depth, kPanelWidth]
  std::size_t depth = 0;
};

// Makes the compiler forget how the pointer was computed, so that it does not keep further pointers derived from it.
HWY_INLINE void hide_origin(const char*& pointer) { asm("" : "+r"(pointer)); }

template <int kRows, int kVectors, class Store>
HWY_INLINE void multiply_block(const GemmOperands& f, std::size_t row, const Store& store) {
  const Floats d;
  FloatVector sum[kRows][kVectors];
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  // Row r of A is at a[r / 3] + r % 3 * stride. With a pointer for each of 12 rows, some would not fit into the general
  // registers, and moving them back from vector registers takes the port of a multiply-add.
  constexpr int kPointers = (kRows + 2) / 3;
  const std::size_t stride = f.a_stride * sizeof(float);
  const char* a[kPointers];
  RINGATTN_UNROLL
  for (int i = 0; i < kPointers; ++i) {
    a[i] = reinterpret_cast<const char*>(f.a + (row + static_cast<std::size_t>(3 * i)) * f.a_stride);
  }
  const float* b = f.b;
  for (std::size_t k = 0; k < f.depth; ++k, b += kPanelWidth) {
    RINGATTN_UNROLL
    for (int i = 0; i < kPointers; ++i) hide_origin(a[i]);
    if constexpr (kRows == kBlockRows && kVectors == kPanelVectors) {
      // B is in the L2 cache if other rows used it, and hardware prefetchers stop at pages. The next panel follows.
      RINGATTN_UNROLL
      for (int v = 0; v < kVectors; v += kLineVectors) {
        __builtin_prefetch(b + kPanelRowsAhead * kPanelWidth + static_cast<std::size_t>(v) * kLanes);
      }
    }
    FloatVector b_row[kVectors];
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) b_row[v] = hn::Load(d, b + static_cast<std::size_t>(v) * kLanes);
    RINGATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const char* const element = a[r / 3] + static_cast<std::size_t>(r % 3) * stride;
      const FloatVector a_element = hn::Set(d, *reinterpret_cast<const float*>(element));
      RINGATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(a_element, b_row[v], sum[r][v]);
    }
    RINGATTN_UNROLL
    for (int i = 0; i < kPointers; ++i) a[i] += sizeof(float);
  }
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      store(row + static_cast<std::size_t>(r), static_cast<std::size_t>(v) * kLanes, sum[r][v]);
    }
  }
}

// Rows [row, rows) in blocks of kRows, and the remaining rows in smaller blocks. Their sizes are powers of two, to
// limit the number of instantiations.
template <int kRows, int kVectors, class Store>
HWY_INLINE void multiply_from(const GemmOperands& f, std::size_t row, std::size_t rows, const Store& store) {
  for (; row + kRows <= rows; row += kRows) multiply_block<kRows, kVectors>(f, row, store);
  if constexpr (kRows > 1) {
    constexpr int kSmaller = kRows > 8 ? 8 : kRows > 4 ? 4 : kRows / 2;
    multiply_from<kSmaller, kVectors>(f, row, rows, store);
  }
}

// Calls store(row, column, vector) for each vector of the product of `rows` rows and the first kVectors vectors of a
// panel.
template <int kVectors, class Store>
HWY_NOINLINE void multiply(const GemmOperands& f, std::size_t rows, const Store& store) {
  multiply_from<kBlockRows, kVectors>(f, 0, rows, store);
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
