// SPDX-License-Identifier: Apache-2.0
// Sums of partial results in a fixed order, and the gradient of rows before the gate.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;  // adjacent elements per thread

template <class Element>
__device__ void store_elements(const SsdGradientRows& rows, std::int64_t at, const float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (rows.wide) {
      static_cast<float*>(rows.data)[at + i] = values[i];
    } else {
      static_cast<Element*>(rows.data)[at + i] = from_float<Element>(values[i]);
    }
  }
}

// A CTA adds a chunk's dB (blockIdx.z 0) or dC.
template <class Element>
__global__ void __launch_bounds__(kThreads) sum_sets_kernel(const __grid_constant__ SsdSumParams p) {
  const SegmentCoord segment = segment_coord(p.scan, blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * kChunk;
  const int left = segment.tokens - first;
  const int tokens = left < kChunk ? left : kChunk;
  const SsdGradientRows& target = blockIdx.z == 0 ? p.db : p.dc;
  const std::int64_t columns = std::int64_t{p.groups} * p.scan.state_dim;
  const std::int64_t set_floats = p.rows * columns;
  const float* const source = p.set_db + (blockIdx.z == 0 ? 0 : p.sets) * set_floats + (segment.row + first) * columns;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < tokens * columns; i += kThreads * kWidth) {
    float4 sum = *reinterpret_cast<const float4*>(source + i);
#pragma unroll 4
    for (int set = 1; set < p.sets; ++set) {
      const float4 more = *reinterpret_cast<const float4*>(source + set * set_floats + i);
      sum = make_float4(__fadd_rn(sum.x, more.x), __fadd_rn(sum.y, more.y), __fadd_rn(sum.z, more.z),
                        __fadd_rn(sum.w, more.w));
    }
    const int token = i / static_cast<int>(columns);
    const int column = i % static_cast<int>(columns);
    const std::int64_t at = (segment.row + first + token) * target.token_stride +
                            column / p.scan.state_dim * target.head_stride + column % p.scan.state_dim;
    store_elements<Element>(target, at, {sum.x, sum.y, sum.z, sum.w});
  }
}

__global__ void __launch_bounds__(kThreads)
    sum_terms_kernel(const __grid_constant__ SsmParams p, const float4* chunk_terms, float* terms) {
  const SegmentCoord segment = segment_coord(p, blockIdx.x);
  const int chunks = (segment.tokens + kChunk - 1) / kChunk;
  for (int i = static_cast<int>(threadIdx.x); i < p.head_count; i += kThreads) {
    const std::int64_t head = segment.index * p.heads + p.first_head + i;
    float4 sum = chunk_terms[head * kChunksOfSegment];
#pragma unroll 4
    for (int chunk = 1; chunk < chunks; ++chunk) {
      const float4 more = chunk_terms[head * kChunksOfSegment + chunk];
      sum = make_float4(__fadd_rn(sum.x, more.x), __fadd_rn(sum.y, more.y), __fadd_rn(sum.z, more.z), 0.0F);
    }
    terms[head * 3] = sum.x;
    terms[head * 3 + 1] = p.d != nullptr ? sum.y : 0.0F;
    terms[head * 3 + 2] = p.dt_bias != nullptr ? sum.z : 0.0F;
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    gate_gradients_kernel(const __grid_constant__ SsmParams p, const __grid_constant__ SsmTensor g) {
  const SegmentCoord segment = segment_coord(p, blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * kChunk;
  const int left = segment.tokens - first;
  const int tokens = left < kChunk ? left : kChunk;
  const int columns = p.head_count * p.head_dim;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < tokens * columns; i += kThreads * kWidth) {
    const std::int64_t row = segment.row + first + i / columns;
    const int head = p.first_head + i % columns / p.head_dim;
    const int dim = i % p.head_dim;
    const Element* const dy = element_at<Element>(p.x, row, head) + dim;
    const Element* const z = element_at<Element>(p.z, row, head) + dim;
    auto* const target = const_cast<Element*>(element_at<Element>(g, row, head)) + dim;
    Element values[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      values[e] = from_float<Element>(__fmul_rn(to_float(dy[e]), silu(to_float(z[e]))));
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) target[e] = values[e];
  }
}

// The same for rows of whole vectors of eight elements, aligned to 16 bytes. A thread loads kVectorsInFlight of each
// tensor before it stores: the compiler cannot move loads before stores to memory that they might overlap.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    gate_gradient_vectors_kernel(const __grid_constant__ SsmParams p, const __grid_constant__ SsmTensor g) {
  constexpr int kVectorsInFlight = 4;
  constexpr int kElements = 8;
  const SegmentCoord segment = segment_coord(p, blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * kChunk;
  const int left = segment.tokens - first;
  const int tokens = left < kChunk ? left : kChunk;
  const int of_head = p.head_dim / kElements;
  const int columns = p.head_count * of_head;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * columns; i += kThreads * kVectorsInFlight) {
    uint4 dy[kVectorsInFlight];
    uint4 z[kVectorsInFlight];
    uint4* targets[kVectorsInFlight];
#pragma unroll
    for (int v = 0; v < kVectorsInFlight; ++v) {
      const int nth = i + v * kThreads;
      targets[v] = nullptr;
      if (nth >= tokens * columns) continue;
      const std::int64_t row = segment.row + first + nth / columns;
      const int head = p.first_head + nth % columns / of_head;
      const int dim = nth % of_head * kElements;  // columns is a multiple of of_head
      dy[v] = *reinterpret_cast<const uint4*>(element_at<Element>(p.x, row, head) + dim);
      z[v] = *reinterpret_cast<const uint4*>(element_at<Element>(p.z, row, head) + dim);
      targets[v] = reinterpret_cast<uint4*>(const_cast<Element*>(element_at<Element>(g, row, head)) + dim);
    }
#pragma unroll
    for (int v = 0; v < kVectorsInFlight; ++v) {
      if (targets[v] == nullptr) continue;
      const auto* const of_dy = reinterpret_cast<const Element*>(&dy[v]);
      const auto* const of_z = reinterpret_cast<const Element*>(&z[v]);
      uint4 words;
      auto* const values = reinterpret_cast<Element*>(&words);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        values[e] = from_float<Element>(__fmul_rn(to_float(of_dy[e]), silu(to_float(of_z[e]))));
      }
      *targets[v] = words;
    }
  }
}

dim3 grid_of(const SsmParams& p, unsigned outputs) {
  return {static_cast<unsigned>(p.segments), kChunksOfSegment, outputs};
}

}  // namespace

void load_ssd_sums(Dtype dtype) {
  if (dtype == Dtype::kBf16) {
    load_kernel(sum_sets_kernel<__nv_bfloat16>);
    load_kernel(gate_gradients_kernel<__nv_bfloat16>);
    load_kernel(gate_gradient_vectors_kernel<__nv_bfloat16>);
  } else {
    load_kernel(sum_sets_kernel<__half>);
    load_kernel(gate_gradients_kernel<__half>);
    load_kernel(gate_gradient_vectors_kernel<__half>);
  }
  load_kernel(sum_terms_kernel);
}

void sum_head_sets(const SsdSumParams& params, Dtype dtype, cudaStream_t stream) {
  const auto kernel = dtype == Dtype::kBf16 ? sum_sets_kernel<__nv_bfloat16> : sum_sets_kernel<__half>;
  kernel<<<grid_of(params.scan, 2), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the sum of dB and dC over heads");
}

void sum_chunk_terms(const SsmParams& params, const float4* chunk_terms, float* terms, cudaStream_t stream) {
  sum_terms_kernel<<<static_cast<unsigned>(params.segments), kThreads, 0, stream>>>(params, chunk_terms, terms);
  check_cuda(cudaGetLastError(), "the sum of the parameters' terms");
}

void gate_gradients(const SsmParams& params, const SsmTensor& g, Dtype dtype, cudaStream_t stream) {
  const bool bf16 = dtype == Dtype::kBf16;
  const bool vectors = params.x.aligned && params.z.aligned && g.aligned && params.head_dim % 8 == 0;
  const auto kernel = vectors
                          ? (bf16 ? gate_gradient_vectors_kernel<__nv_bfloat16> : gate_gradient_vectors_kernel<__half>)
                          : (bf16 ? gate_gradients_kernel<__nv_bfloat16> : gate_gradients_kernel<__half>);
  kernel<<<grid_of(params, 1), kThreads, 0, stream>>>(params, g);
  check_cuda(cudaGetLastError(), "the gradient of rows before the gate");
}

}  // namespace ringattn::cuda
