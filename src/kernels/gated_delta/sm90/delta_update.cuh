// SPDX-License-Identifier: Apache-2.0
// A decode step (GatedDeltaKernel::update): the recurrence for one token, in fp32. A CTA updates one value head's state
// of one sequence. Each thread has a column of it in registers, and sums over key dims are ascending.
#pragma once

#include "kernels/gated_delta/sm90/delta_factors.cuh"

namespace ringattn::sm90 {

// The sum over the CTA's threads: within each warp by halves, then over warps ascending.
__device__ __forceinline__ float sum_of_cta(float value, float* sums) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffffU, value, distance));
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = sums[0];
#pragma unroll
  for (int warp = 1; warp < kDeltaDim / 32; ++warp) sum = __fadd_rn(sum, sums[warp]);
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(kDeltaDim) delta_update_kernel(const __grid_constant__ DeltaUpdateParams p) {
  __shared__ float q[kDeltaDim];
  __shared__ float k[kDeltaDim];
  __shared__ float decay[kDeltaDim];
  __shared__ float sums[2][kDeltaDim / 32];
  const std::int64_t sequence = static_cast<std::int64_t>(blockIdx.x) / p.value_heads;
  const int head = static_cast<int>(static_cast<std::int64_t>(blockIdx.x) % p.value_heads);
  const int key_head = head / p.heads_per_key;
  const int thread = static_cast<int>(threadIdx.x);
  auto& o = static_cast<Element*>(p.o)[sequence * p.o_token_stride + head * p.o_head_stride + thread];
  const std::int64_t slot = p.slots != nullptr ? p.slots[sequence] : sequence;
  if (slot < 0) {
    o = __float2bfloat16_rn(0.0F);
    return;
  }
  const auto element = [sequence, thread](const DeltaTensor& tensor, int of_head) {
    return __bfloat162float(static_cast<const Element*>(
        tensor.data)[sequence * tensor.token_stride + of_head * tensor.head_stride + thread]);
  };
  float own_q = element(p.q, key_head);
  float own_k = element(p.k, key_head);
  if (p.qk_l2norm) {
    const auto norm = [](float sum) { return __fdiv_rn(1.0F, __fsqrt_rn(__fadd_rn(sum, kQkL2NormEps))); };
    own_q = __fmul_rn(own_q, norm(sum_of_cta(__fmul_rn(own_q, own_q), sums[0])));
    own_k = __fmul_rn(own_k, norm(sum_of_cta(__fmul_rn(own_k, own_k), sums[1])));
  }
  q[thread] = own_q;
  k[thread] = own_k;
  const auto* const log_decays = static_cast<const float*>(p.log_decay.data) + sequence * p.log_decay.token_stride +
                                 head * p.log_decay.head_stride;
  decay[thread] = cuda::exp2_approx(log2_decay(log_decays[p.key_decays ? thread : 0]));
  __syncthreads();
  float* const column = p.states + (slot * p.value_heads + head) * kDeltaStateFloats + thread;
  float state[kDeltaDim];
#pragma unroll
  for (int dim = 0; dim < kDeltaDim; ++dim) state[dim] = column[dim * kDeltaDim];
  float product = 0.0F;
#pragma unroll
  for (int dim = 0; dim < kDeltaDim; ++dim) {
    state[dim] = __fmul_rn(decay[dim], state[dim]);
    product = __fmaf_rn(k[dim], state[dim], product);
  }
  const float u = __fmul_rn(delta_number(p.beta, sequence, head), __fsub_rn(element(p.v, head), product));
  float result = 0.0F;
#pragma unroll
  for (int dim = 0; dim < kDeltaDim; ++dim) {
    state[dim] = __fmaf_rn(k[dim], u, state[dim]);
    column[dim * kDeltaDim] = state[dim];
    result = __fmaf_rn(q[dim], state[dim], result);
  }
  o = __float2bfloat16_rn(__fmul_rn(p.scale, result));
}

}  // namespace ringattn::sm90
