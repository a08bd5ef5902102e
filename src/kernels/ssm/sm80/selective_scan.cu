// SPDX-License-Identifier: Apache-2.0
// Selective scan (one decay per state of each channel), token by token in fp32. A lane has up to 16 states of a channel
// in registers. Larger states are distributed over adjacent lanes, whose addends of y are summed in a fixed order. The
// channels of a CTA are in one group and share tiles of B and C in shared memory.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::element_at;
using cuda::from_float;
using cuda::HeadBlock;
using cuda::SegmentCoord;
using cuda::SsmTensor;
using cuda::to_float;

constexpr int kScanThreads = 128;
constexpr int kStates = 16;        // per lane
constexpr int kTileFloats = 2048;  // floats of B, and of C, in shared memory
constexpr int kMaxTileTokens = 64;
constexpr int kTokensPerStep = 4;  // tokens loaded and computed per iteration

struct SelectiveScanParams {
  SsmParams scan;
  std::int32_t lanes;   // per channel
  std::int32_t blocks;  // channel blocks; CTAs of one segment have consecutive indices
};
static_assert(sizeof(SelectiveScanParams) <= 4096);

// Loads B or C of some tokens as fp32 [tokens, columns]. Columns from state_dim on, and tokens up to a multiple of
// kTokensPerStep, are zero.
template <class Element>
__device__ void load_tile(const SsmTensor& tensor, std::int64_t row, int tokens, int group, int state_dim, int columns,
                          float* tile) {
  const int whole = (tokens + kTokensPerStep - 1) / kTokensPerStep * kTokensPerStep;
  for (int i = static_cast<int>(threadIdx.x); i < whole * columns; i += kScanThreads) {
    const int token = i / columns;
    const int column = i % columns;
    const bool in_range = token < tokens && column < state_dim;
    tile[i] = in_range ? to_float(element_at<Element>(tensor, row + token, group)[column]) : 0.0F;
  }
}

__device__ __forceinline__ void load_states(const float* from, float (&to)[kStates]) {
#pragma unroll
  for (int i = 0; i < kStates; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x;
    to[i + 1] = four.y;
    to[i + 2] = four.z;
    to[i + 3] = four.w;
  }
}

// Inputs of kTokensPerStep tokens of a channel.
template <class Element, bool kOutputs>
struct TokenInputs {
  Element x[kTokensPerStep];
  Element dt[kTokensPerStep];
  Element z[kOutputs ? kTokensPerStep : 1];

  // Loads tokens from `row` on. Only the first `count` exist.
  __device__ __forceinline__ void load(const SsmParams& p, std::int64_t row, int count, int channel) {
    load_rows(p.x, row, count, channel, x);
    load_rows(p.dt, row, count, channel, dt);
    if constexpr (kOutputs) {
      if (p.z.data != nullptr) load_rows(p.z, row, count, channel, z);
    }
  }

 private:
  static __device__ __forceinline__ void load_rows(const SsmTensor& tensor, std::int64_t row, int count, int channel,
                                                   Element (&to)[kTokensPerStep]) {
    const Element* from = element_at<Element>(tensor, row, channel);
#pragma unroll
    for (int i = 0; i < kTokensPerStep; ++i, from += tensor.token_stride) {
      to[i] = from_float<Element>(0.0F);
      if (i < count) to[i] = *from;
    }
  }
};

template <class Element, bool kOutputs>
__global__ void __launch_bounds__(kScanThreads, 5)
    selective_scan_kernel(const __grid_constant__ SelectiveScanParams params) {
  __shared__ __align__(16) float b_tile[kTileFloats];
  __shared__ __align__(16) float c_tile[kOutputs ? kTileFloats : 4];
  const SsmParams& p = params.scan;
  const SegmentCoord segment = cuda::segment_coord(p, static_cast<int>(blockIdx.x) / params.blocks);
  const HeadBlock block =
      cuda::head_block(p, kScanThreads / params.lanes, static_cast<int>(blockIdx.x) % params.blocks);
  const int in_block = static_cast<int>(threadIdx.x) / params.lanes;
  const bool present = in_block < block.count;
  const int channel = block.first + (present ? in_block : 0);
  const int lane = static_cast<int>(threadIdx.x) % params.lanes;
  const int first_state = lane * kStates;
  const int columns = params.lanes * kStates;
  const int tile_tokens = kTileFloats / columns < kMaxTileTokens ? kTileFloats / columns : kMaxTileTokens;

  // States from state_dim on stay 0.
  const std::int64_t of_segment = segment.index * p.heads + channel;
  float rates[kStates];
  float state[kStates];
#pragma unroll
  for (int n = 0; n < kStates; ++n) {
    rates[n] = 0.0F;
    state[n] = 0.0F;
    if (first_state + n < p.state_dim) {
      rates[n] = __fmul_rn(p.a[std::int64_t{channel} * p.state_dim + first_state + n], cuda::kSsmLog2E);
      if (kOutputs) {
        const std::int64_t of_super = segment.super_segment * p.heads + channel;
        const float log = segment.first_of_super ? 0.0F : p.logs_before[of_segment];
        const float local = segment.first_of_super ? 0.0F : p.states[of_segment * p.state_dim + first_state + n];
        const float before = segment.from_zero ? 0.0F : p.super_states[of_super * p.state_dim + first_state + n];
        state[n] = __fmaf_rn(cuda::exp2_approx(__fmul_rn(rates[n], log)), before, local);
      }
    }
  }
  const float skip = kOutputs && p.d != nullptr ? p.d[channel] : 0.0F;
  const float bias = cuda::dt_bias_of(p.dt_bias, channel);
  float dt_sum = 0.0F;
  TokenInputs<Element, kOutputs> next;
  next.load(p, segment.row, present ? segment.tokens : 0, channel);

  for (int tile = 0; tile < segment.tokens; tile += tile_tokens) {
    const int left = segment.tokens - tile;
    const int tokens = left < tile_tokens ? left : tile_tokens;
    const std::int64_t row = segment.row + tile;
    __syncthreads();  // all reads of the previous tile are done
    load_tile<Element>(p.b, row, tokens, block.group, p.state_dim, columns, b_tile);
    if (kOutputs) load_tile<Element>(p.c, row, tokens, block.group, p.state_dim, columns, c_tile);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < tokens; first += kTokensPerStep) {
      const TokenInputs<Element, kOutputs> given = next;
      const int count = tokens - first;
      next.load(p, row + first + kTokensPerStep, present ? left - first - kTokensPerStep : 0, channel);
      // Tokens from `count` on have dt 0 and input 0, which do not change the state. Their B and C are 0.
      float dt[kTokensPerStep];
      float input[kTokensPerStep];
#pragma unroll
      for (int i = 0; i < kTokensPerStep; ++i) dt[i] = __fadd_rn(to_float(given.dt[i]), bias);
      if (p.softplus) {
#pragma unroll
        for (int i = 0; i < kTokensPerStep; ++i) dt[i] = cuda::softplus(dt[i]);
      }
#pragma unroll
      for (int i = 0; i < kTokensPerStep; ++i) {
        dt[i] = i < count ? cuda::smaller(cuda::larger(dt[i], p.dt_min), p.dt_max) : 0.0F;
        input[i] = __fmul_rn(dt[i], to_float(given.x[i]));
        dt_sum = __fadd_rn(dt_sum, dt[i]);
      }
      float y[kTokensPerStep];
#pragma unroll
      for (int i = 0; i < kTokensPerStep; ++i) {
        float b[kStates];
        load_states(b_tile + (first + i) * columns + first_state, b);
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          const float decay = cuda::exp2_approx(__fmul_rn(dt[i], rates[n]));
          state[n] = __fmaf_rn(decay, state[n], __fmul_rn(input[i], b[n]));
        }
        if constexpr (kOutputs) {
          float c[kStates];
          load_states(c_tile + (first + i) * columns + first_state, c);
          y[i] = 0.0F;
#pragma unroll
          for (int n = 0; n < kStates; ++n) y[i] = __fmaf_rn(c[n], state[n], y[i]);
        }
      }
      if constexpr (kOutputs) {
        for (int other = params.lanes / 2; other > 0; other /= 2) {
#pragma unroll
          for (int i = 0; i < kTokensPerStep; ++i) y[i] = __fadd_rn(y[i], __shfl_xor_sync(0xffffffffU, y[i], other));
        }
        if (!present || lane != 0) continue;
        if (p.d != nullptr) {
#pragma unroll
          for (int i = 0; i < kTokensPerStep; ++i) y[i] = __fmaf_rn(skip, to_float(given.x[i]), y[i]);
        }
        if (p.z.data != nullptr) {
#pragma unroll
          for (int i = 0; i < kTokensPerStep; ++i) y[i] = __fmul_rn(y[i], cuda::silu(to_float(given.z[i])));
        }
        Element* target = static_cast<Element*>(p.y) + (row + first) * p.y_token_stride + channel * p.y_head_stride;
#pragma unroll
        for (int i = 0; i < kTokensPerStep; ++i, target += p.y_token_stride) {
          if (i < count) *target = from_float<Element>(y[i]);
        }
      }
    }
  }
  if constexpr (!kOutputs) {
    if (!present) return;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      if (first_state + n < p.state_dim) p.states[of_segment * p.state_dim + first_state + n] = state[n];
    }
    if (lane == 0) p.logs[of_segment] = dt_sum;
  }
}

using Kernel = void(SelectiveScanParams);

template <bool kOutputs>
Kernel* kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return selective_scan_kernel<float, kOutputs>;
    case Dtype::kBf16:
      return selective_scan_kernel<__nv_bfloat16, kOutputs>;
    default:
      return selective_scan_kernel<__half, kOutputs>;
  }
}

void launch(Kernel* kernel, const SsmParams& scan, cudaStream_t stream) {
  SelectiveScanParams params{scan, 1, 0};
  while (params.lanes * kStates < scan.state_dim) params.lanes *= 2;
  params.blocks = cuda::head_blocks(scan, kScanThreads / params.lanes);
  const auto ctas = static_cast<unsigned>(params.blocks) * static_cast<unsigned>(scan.segments);
  kernel<<<ctas, kScanThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "sm80_selective_scan");
}

}  // namespace

void load_selective_scan(Dtype dtype) {
  cuda::load_kernel(kernel_of<false>(dtype));
  cuda::load_kernel(kernel_of<true>(dtype));
}

void selective_scan_states(const SsmParams& params, Dtype dtype, cudaStream_t stream) {
  launch(kernel_of<false>(dtype), params, stream);
}
void selective_scan_outputs(const SsmParams& params, Dtype dtype, cudaStream_t stream) {
  launch(kernel_of<true>(dtype), params, stream);
}

}  // namespace ringattn::sm80
