// SPDX-License-Identifier: Apache-2.0
// What the scan with one decay a head needs of every token and head beside x, B and C: dt, and the sum of the
// logarithms of decays from the beginning of its chunk. A thread has a chunk of one head, so sums ascend.
#include "base/cuda.hpp"
#include "kernels/cuda/scan/load_kernel.hpp"
#include "kernels/cuda/scan/scan_device.cuh"
#include "kernels/cuda/scan/steps.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kHeads = 32;                // of a CTA, a lane each
constexpr int kWarps = kChunksOfSegment;  // of a CTA
constexpr int kLoaded = 16;               // tokens that are loaded at a time
constexpr int kWritten = 4;               // that are written at a time

template <class Element>
__global__ void __launch_bounds__(kHeads* kWarps) steps_kernel(const __grid_constant__ ScanParams p) {
  __shared__ float chunk_sums[kChunksOfSegment][kHeads];
  const SegmentPlace place = segment_place(p, blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kHeads;
  const int in_range = static_cast<int>(blockIdx.y) * kHeads + lane;
  const bool present = in_range < p.head_count;
  const int head = p.first_head + in_range;
  const int chunks = (place.tokens + kChunk - 1) / kChunk;
  const int chunk = static_cast<int>(threadIdx.x) / kHeads;
  if (present && chunk < chunks) {
    const float rate = __fmul_rn(p.a[head], kScanLog2E);
    float* const target = p.steps + ((place.index * p.heads + head) * kChunksOfSegment + chunk) * kChunkSteps;
    const float bias = dt_bias_of(p.dt_bias, head);
    float sum = 0.0F;
#pragma unroll 1
    for (int first = 0; first < kChunk; first += kLoaded) {
      Element given[kLoaded];
#pragma unroll
      for (int i = 0; i < kLoaded; ++i) {
        const int token = chunk * kChunk + first + i;
        given[i] = from_float<Element>(0.0F);
        if (token < place.tokens) given[i] = *element_at<Element>(p.dt, place.row + token, head);
      }
#pragma unroll
      for (int begin = 0; begin < kLoaded; begin += kWritten) {
        float sums[kWritten];
        float dts[kWritten];
#pragma unroll
        for (int i = 0; i < kWritten; ++i) {
          dts[i] = 0.0F;  // behind the last token the sum and a dt of 0 go on
          if (chunk * kChunk + first + begin + i < place.tokens) {
            dts[i] = make_dt(to_float(given[begin + i]), bias, p.softplus, p.dt_least, p.dt_most);
            const float log = __fmul_rn(dts[i], rate);
            sum = __fadd_rn(sum, log < kLeastLog ? kLeastLog : log);
          }
          sums[i] = sum;
        }
        float* const at = target + first + begin;
        *reinterpret_cast<float4*>(at) = make_float4(sums[0], sums[1], sums[2], sums[3]);
        *reinterpret_cast<float4*>(at + kChunk) = make_float4(dts[0], dts[1], dts[2], dts[3]);
      }
    }
    chunk_sums[chunk][lane] = sum;
  }
  __syncthreads();
  if (!present || static_cast<int>(threadIdx.x) >= kHeads) return;
  float log = 0.0F;
  for (int i = 0; i < chunks; ++i) log = __fadd_rn(log, chunk_sums[i][lane]);
  p.logs[place.index * p.heads + head] = log;
}

using Steps = void(ScanParams);
Steps* steps_of(Dtype dtype) { return dtype == Dtype::kBf16 ? steps_kernel<__nv_bfloat16> : steps_kernel<__half>; }

}  // namespace

void load_steps(Dtype dtype) { load_kernel(steps_of(dtype)); }

void make_steps(const ScanParams& params, Dtype dtype, cudaStream_t stream) {
  const int blocks = (params.head_count + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(params.segments), static_cast<unsigned>(blocks));
  steps_of(dtype)<<<grid, kHeads * kWarps, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "steps of a scan");
}

}  // namespace ringattn::cuda
