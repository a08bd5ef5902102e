// SPDX-License-Identifier: Apache-2.0
// Launches of sm90_gated_delta. kernels/instances.cmake lists its instantiation.
#pragma once

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/gated_delta/sm90/delta_carry.cuh"
#include "kernels/gated_delta/sm90/delta_factors.cuh"
#include "kernels/gated_delta/sm90/delta_key_factors.cuh"
#include "kernels/gated_delta/sm90/delta_output.cuh"
#include "kernels/gated_delta/sm90/delta_state.cuh"
#include "kernels/gated_delta/sm90/delta_update.cuh"

namespace ringattn::sm90 {

// Allows a kernel its dynamic shared memory, which is above the default limit.
template <class Kernel>
void load_with_shared(Kernel* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

template <class Element, bool kOutputs, bool kKeyDecays>
constexpr auto delta_chunk_kernel() {
  if constexpr (kOutputs) {
    return &delta_output_kernel<Element, kKeyDecays>;
  } else {
    return &delta_state_kernel<Element, kKeyDecays>;
  }
}

template <class Element, bool kKeyDecays>
void load_delta_chunk_kernels() {
  load_with_shared(delta_chunk_kernel<Element, false, kKeyDecays>(), DeltaLayout<false, kKeyDecays>::kSharedBytes);
  load_with_shared(delta_chunk_kernel<Element, true, kKeyDecays>(), DeltaLayout<true, kKeyDecays>::kSharedBytes);
}

template <int kForm>
using DeltaCarryOfForm = DeltaCarryTile<kDeltaCarryForms[kForm].width>;

template <class Element>
void load_gated_delta() {
  load_with_shared(&delta_factors_kernel<Element>, DeltaFactorLayout::kSharedBytes);
  load_with_shared(&delta_key_factors_kernel<Element>, DeltaKeyFactorLayout::kSharedBytes);
  load_delta_chunk_kernels<Element, false>();
  load_delta_chunk_kernels<Element, true>();
  load_with_shared(&delta_carry_kernel<DeltaCarryOfForm<0>>, DeltaCarryOfForm<0>::kSharedBytes);
  load_with_shared(&delta_carry_kernel<DeltaCarryOfForm<1>>, DeltaCarryOfForm<1>::kSharedBytes);
  load_with_shared(&delta_carry_kernel<DeltaCarryOfForm<2>>, DeltaCarryOfForm<2>::kSharedBytes);
  cuda::load_kernel(&delta_update_kernel<Element>);
}

template <class Element>
void launch_factors(const DeltaParams& p, cudaStream_t stream) {
  const auto chunks = kDeltaChunksOfSegment * static_cast<unsigned>(p.segments);
  if (p.key_decays) {
    delta_key_factors_kernel<Element>
        <<<chunks* static_cast<unsigned>(p.head_count), kFactorThreads, DeltaKeyFactorLayout::kSharedBytes, stream>>>(
            p);
  } else {
    const int keys = (p.first_head + p.head_count - 1) / p.heads_per_key - p.first_head / p.heads_per_key + 1;
    const int head_blocks = keys * ((p.heads_per_key + kFactorHeads - 1) / kFactorHeads);
    delta_factors_kernel<Element>
        <<<chunks* static_cast<unsigned>(head_blocks), kFactorThreads, DeltaFactorLayout::kSharedBytes, stream>>>(
            p, head_blocks);
  }
  check_cuda(cudaGetLastError(), "the factors of sm90_gated_delta");
}

template <class Element, bool kOutputs>
void launch_chunks(const DeltaParams& p, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>(p.head_count) * static_cast<unsigned>(p.segments);
  if (p.key_decays) {
    delta_chunk_kernel<Element, kOutputs,
                       true>()<<<ctas, kDeltaThreads, DeltaLayout<kOutputs, true>::kSharedBytes, stream>>>(p);
  } else {
    delta_chunk_kernel<Element, kOutputs,
                       false>()<<<ctas, kDeltaThreads, DeltaLayout<kOutputs, false>::kSharedBytes, stream>>>(p);
  }
  check_cuda(cudaGetLastError(), "sm90_gated_delta");
}

template <int kForm>
void launch_carry_form(const DeltaParams& p, cudaStream_t stream) {
  using Tile = DeltaCarryOfForm<kForm>;
  const dim3 ctas(static_cast<unsigned>(p.head_count * Tile::kCtasOfHead), static_cast<unsigned>(p.run_count));
  delta_carry_kernel<Tile><<<ctas, Tile::kThreads, Tile::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "the carry of sm90_gated_delta");
}

inline void launch_carry(const DeltaParams& p, int form, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const DeltaParams&, cudaStream_t) = {launch_carry_form<0>, launch_carry_form<1>,
                                                                     launch_carry_form<2>};
  static_assert(std::size(kLaunches) == std::size(kDeltaCarryForms));
  kLaunches[form](p, stream);
}

template <class Element>
void launch_delta_update(const DeltaUpdateParams& p, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>(p.sequences * p.value_heads);
  delta_update_kernel<Element><<<ctas, kDeltaDim, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "the update of sm90_gated_delta");
}

template <class Element>
constexpr GatedDeltaLauncher gated_delta_launcher() {
  return {load_gated_delta<Element>,    launch_factors<Element>,     launch_chunks<Element, false>, launch_carry,
          launch_chunks<Element, true>, launch_delta_update<Element>};
}

}  // namespace ringattn::sm90
