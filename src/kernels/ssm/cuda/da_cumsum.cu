// SPDX-License-Identifier: Apache-2.0
// Computes dt and dA_cumsum per token and head. One thread computes a chunk of one head, in ascending order. A warp
// transposes its results through shared memory, so that global stores are coalesced.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kHeads = 8;           // per CTA: adjacent heads' dt are 16 bytes
constexpr int kLanes = 32;          // lanes of a warp: kHeads heads of several chunks
constexpr int kTokensPerStep = 16;  // tokens loaded and stored at a time
constexpr int kCumsumThreads = kHeads * kChunksOfSegment;
constexpr int kPitch =
    kTokensPerStep + 4;  // floats per lane in shared memory; padded to avoid bank conflicts of float4 stores

// dA_cumsum and dt of kTokensPerStep tokens, for all lanes of a warp.
struct WarpCumsum {
  float values[kDaCumsumFloats][kLanes][kPitch];
};

template <class Element>
__global__ void __launch_bounds__(kCumsumThreads, 5) da_cumsum_kernel(const __grid_constant__ SsmParams p) {
  __shared__ float chunk_sums[kChunksOfSegment][kHeads];
  __shared__ __align__(16) WarpCumsum shared[kCumsumThreads / kLanes];
  const SegmentCoord segment = segment_coord(p, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  WarpCumsum& warp = shared[thread / kLanes];
  const int first_in_range = static_cast<int>(blockIdx.y) * kHeads;
  const int in_cta = thread % kHeads;
  const bool present = first_in_range + in_cta < p.head_count;
  const int head = p.first_head + first_in_range + (present ? in_cta : 0);
  const int chunks = (segment.tokens + kChunk - 1) / kChunk;
  const int chunk = thread / kHeads;
  // With log-decays per token there is no A.
  const float rate = p.decay == SsmDecay::kToken ? kSsmLog2E : __fmul_rn(p.a[head], kSsmLog2E);
  const float bias = dt_bias_of(p.dt_bias, head);
  float sum = 0.0F;
#pragma unroll 1
  for (int first = 0; first < kChunk; first += kTokensPerStep) {
    const int left = segment.tokens - chunk * kChunk - first;
    Element given[kTokensPerStep];
#pragma unroll
    for (int i = 0; i < kTokensPerStep; ++i) {
      given[i] = from_float<Element>(0.0F);
      if (i < left && p.decay != SsmDecay::kHead) {
        given[i] = *element_at<Element>(p.dt, segment.row + chunk * kChunk + first + i, head);
      }
    }
#pragma unroll
    for (int begin = 0; begin < kTokensPerStep; begin += 4) {
      float sums[4];
      float dts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dts[i] = 0.0F;  // tokens after the last one have dt 0 and repeat the sum
        if (begin + i < left) {
          const float of_token = to_float(given[begin + i]);
          dts[i] = p.decay == SsmDecay::kDt ? make_dt(of_token, bias, p.softplus, p.dt_min, p.dt_max) : 1.0F;
          const float log = __fmul_rn(p.decay == SsmDecay::kToken ? of_token : dts[i], rate);
          sum = __fadd_rn(sum, log < kMinLog ? kMinLog : log);
        }
        sums[i] = sum;
      }
      *reinterpret_cast<float4*>(&warp.values[0][lane][begin]) = make_float4(sums[0], sums[1], sums[2], sums[3]);
      *reinterpret_cast<float4*>(&warp.values[1][lane][begin]) = make_float4(dts[0], dts[1], dts[2], dts[3]);
    }
    __syncwarp();
    constexpr int kQuarters = kTokensPerStep / 4;
#pragma unroll
    for (int row = 0; row < kLanes; row += kLanes / kQuarters) {
      const int source_lane = row + lane / kQuarters;  // lane that computed the elements
      const int source_chunk = thread / kLanes * (kLanes / kHeads) + source_lane / kHeads;
      const int source_head = first_in_range + source_lane % kHeads;
      if (source_chunk >= chunks || source_head >= p.head_count) continue;
      float* const target = p.da_cumsum +
                            ((segment.index * p.heads + p.first_head + source_head) * kChunksOfSegment + source_chunk) *
                                kChunkDaCumsumFloats +
                            first + lane % kQuarters * 4;
#pragma unroll
      for (int quantity = 0; quantity < kDaCumsumFloats; ++quantity) {
        *reinterpret_cast<float4*>(target + quantity * kChunk) =
            *reinterpret_cast<const float4*>(&warp.values[quantity][source_lane][lane % kQuarters * 4]);
      }
    }
    __syncwarp();
  }
  chunk_sums[chunk][in_cta] = sum;
  __syncthreads();
  if (!present || thread >= kHeads) return;
  float log = 0.0F;
  for (int i = 0; i < chunks; ++i) log = __fadd_rn(log, chunk_sums[i][in_cta]);
  p.logs[segment.index * p.heads + head] = log;
}

using Kernel = void(SsmParams);
// `dtype`: of dt or log-decays.
Kernel* kernel_of(Dtype dtype) {
  if (dtype == Dtype::kF32) return da_cumsum_kernel<float>;
  return dtype == Dtype::kBf16 ? da_cumsum_kernel<__nv_bfloat16> : da_cumsum_kernel<__half>;
}

}  // namespace

void load_da_cumsum(Dtype dtype) { load_kernel(kernel_of(dtype)); }

void compute_da_cumsum(const SsmParams& params, Dtype dtype, cudaStream_t stream) {
  const int blocks = (params.head_count + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(params.segments), static_cast<unsigned>(blocks));
  kernel_of(dtype)<<<grid, kCumsumThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "da_cumsum of an SSM");
}

}  // namespace ringattn::cuda
