// SPDX-License-Identifier: Apache-2.0
// The two GEMMs of a key tile, issued as asynchronous wgmma. wgmma_wait() waits for them.
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm90/config.hpp"
#include "kernels/common/sm90/warpgroup_gemm.cuh"

namespace ringattn::sm90 {

// Issues S = Q Kᵀ for the warpgroup's 64 rows and one key tile. q_tile and k_tile are shared-memory addresses.
template <class C>
__device__ __forceinline__ void qk_gemm(float (&s)[C::kKeyTile / 8][4], std::uint32_t q_tile, std::uint32_t k_tile) {
  multiply_transposed<typename C::Element, C::kDim, C::kKeyTile, kQueryTile, C::kKeyTile>(s, q_tile, k_tile);
}

// Issues O += P V, or O = P V where `first`, which is the first P V of a KV split.
template <class C>
__device__ __forceinline__ void pv_gemm(float (&o)[C::kDimV / 8][4],
                                        const std::uint32_t (&probability)[C::kKeyTile / 16][4], std::uint32_t v_tile,
                                        bool first) {
  multiply_add<typename C::Element, C::kDimV, C::kKeyTile / kGemmStep, C::kKeyTile>(o, probability, v_tile, first);
}

// A branch that is never taken, which ends the basic block. Without it ptxas (13.0) moves the softmax after the wait
// that should follow it, or runs out of registers between the softmax and P V.
__device__ __forceinline__ void end_block(const cuda::AttentionParams& p) {
  if (p.heads == 0) __trap();
}

}  // namespace ringattn::sm90
