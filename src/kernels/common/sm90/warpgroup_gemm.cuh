// SPDX-License-Identifier: Apache-2.0
// GEMMs of one warpgroup on tiles in shared memory (common/cuda/panels.hpp), issued as asynchronous wgmma. wgmma_wait()
// waits for them.
#pragma once

#include <cstdint>

#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

inline constexpr int kGemmStep = 16;                                     // columns or rows of one wgmma (K)
inline constexpr int kStepsOfPanel = cuda::kPanelColumns / kGemmStep;    // along a panel's columns
inline constexpr int kStepBytes = cuda::kPanelRowBytes / kStepsOfPanel;  // along a panel's columns
inline constexpr int kRowStepBytes = cuda::panel_bytes(kGemmStep);       // along a panel's rows
inline constexpr int kDescriptorShift = 4;                               // descriptors count 16 bytes

// Issues D = A · Bᵀ for A [64, kDim] and B [kColumns, kDim], whose panels have kRowsA and kRowsB rows.
template <class Element, int kDim, int kColumns, int kRowsA, int kRowsB>
__device__ __forceinline__ void multiply_transposed(float (&d)[kColumns / 8][4], std::uint32_t a_tile,
                                                    std::uint32_t b_tile) {
  const std::uint32_t a = warp_uniform(descriptor_low(a_tile));
  const std::uint32_t b = warp_uniform(descriptor_low(b_tile));
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / kGemmStep; ++step) {
    const auto at = [step](int panel_bytes) {
      return static_cast<std::uint32_t>((step / kStepsOfPanel * panel_bytes + step % kStepsOfPanel * kStepBytes) >>
                                        kDescriptorShift);
    };
    Wgmma<Element, kColumns>::ss(d, descriptor(a + at(cuda::panel_bytes(kRowsA))),
                                 descriptor(b + at(cuda::panel_bytes(kRowsB))), step > 0);
  }
  wgmma_commit();
}

// Loads A [64, kDim], whose panels have kRowsA rows, into registers.
template <int kDim, int kRowsA>
__device__ __forceinline__ void load_operands(std::uint32_t (&a)[kDim / kGemmStep][4], std::uint32_t a_tile) {
  const int lane = thread_of_warpgroup() % 32;
  const std::uint32_t at = a_tile + cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < kDim / kGemmStep; ++step) cuda::load_matrix(a[step], cuda::at_columns<kRowsA>(at, step));
}

// Issues D = A · Bᵀ for A [64, kDim] in registers and B [kColumns, kDim], whose panels have kRowsB rows.
template <class Element, int kDim, int kColumns, int kRowsB>
__device__ __forceinline__ void multiply_transposed(float (&d)[kColumns / 8][4],
                                                    const std::uint32_t (&a)[kDim / kGemmStep][4],
                                                    std::uint32_t b_tile) {
  const std::uint32_t b = warp_uniform(descriptor_low(b_tile));
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / kGemmStep; ++step) {
    const auto at = static_cast<std::uint32_t>(
        (step / kStepsOfPanel * cuda::panel_bytes(kRowsB) + step % kStepsOfPanel * kStepBytes) >> kDescriptorShift);
    Wgmma<Element, kColumns>::rk(d, a[step], descriptor(b + at), step > 0);
  }
  wgmma_commit();
}

// Issues D += A · B, or D = A · B if `from_zero`, for A [64, 16 · kSteps] in registers and B [16 · kSteps, kColumns],
// whose panels have kRowsB rows.
template <class Element, int kColumns, int kSteps, int kRowsB>
__device__ __forceinline__ void multiply_add(float (&d)[kColumns / 8][4], const std::uint32_t (&a)[kSteps][4],
                                             std::uint32_t b_tile, bool from_zero) {
  const std::uint32_t b = warp_uniform(descriptor_low(b_tile, cuda::panel_bytes(kRowsB)));
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Wgmma<Element, kColumns>::rs(d, a[step],
                                 descriptor(b + static_cast<std::uint32_t>(step * kRowStepBytes >> kDescriptorShift)),
                                 step > 0 || !from_zero);
  }
  wgmma_commit();
}

}  // namespace ringattn::sm90
