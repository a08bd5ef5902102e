// SPDX-License-Identifier: Apache-2.0
// The two GEMMs of a key tile, issued as asynchronous wgmma. wgmma_wait() waits for them.
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm90/config.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

// Issues S = Q Kᵀ for the warpgroup's 64 rows and one key tile. q_tile and k_tile are shared-memory addresses.
template <class C>
__device__ __forceinline__ void qk_gemm(float (&s)[C::kKeyTile / 8][4], std::uint32_t q_tile, std::uint32_t k_tile) {
  const std::uint32_t q = warp_uniform(descriptor_low(q_tile));
  const std::uint32_t k = warp_uniform(descriptor_low(k_tile));
  pin(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kDim / 16; ++step) {
    const auto at = [step](int panel_bytes) {
      return static_cast<std::uint32_t>((step / 4 * panel_bytes + step % 4 * 32) >> 4);
    };
    Wgmma<typename C::Element, C::kKeyTile>::ss(s, descriptor(q + at(cuda::panel_bytes(kQueryTile))),
                                                descriptor(k + at(cuda::panel_bytes(C::kKeyTile))), step > 0);
  }
  wgmma_commit();
}

// Issues O += P V, or O = P V where `first`, which is the first P V of a KV split.
template <class C>
__device__ __forceinline__ void pv_gemm(float (&o)[C::kDimV / 8][4],
                                        const std::uint32_t (&probability)[C::kKeyTile / 16][4], std::uint32_t v_tile,
                                        bool first) {
  const std::uint32_t v = warp_uniform(descriptor_low(v_tile, cuda::panel_bytes(C::kKeyTile)));
  pin(o);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kKeyTile / 16; ++step) {
    Wgmma<typename C::Element, C::kDimV>::rs(
        o, probability[step], descriptor(v + static_cast<std::uint32_t>(step * 16 * kPanelRowBytes >> 4)),
        step > 0 || !first);
  }
  wgmma_commit();
}

// A branch that is never taken, which ends the basic block. Without it ptxas (13.0) moves the softmax after the wait
// that should follow it, or runs out of registers between the softmax and P V.
__device__ __forceinline__ void end_block(const cuda::AttentionParams& p) {
  if (p.heads == 0) __trap();
}

}  // namespace ringattn::sm90
