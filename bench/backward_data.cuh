// SPDX-License-Identifier: Apache-2.0
// The backward spike's random inputs (Q, K, V, dO, O, LSE), and the delta pass.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "bench/backward_common.cuh"

namespace ringattn::spike {

#define CHECK(call)                                                                                   \
  do {                                                                                                \
    const cudaError_t error_ = (call);                                                                \
    if (error_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (false)

constexpr int kHeads = 32, kKvHeads = 8;
constexpr double kLog2E = 1.4426950408889634;

struct Shape {
  int batch, seq, swizzle_heads;
  constexpr std::int64_t tokens() const { return std::int64_t{batch} * seq; }
  // FLOPs of one matmul over the causal half.
  double matmul_flops() const { return 2.0 * seq * seq / 2 * kDim * kHeads * batch; }
};

__device__ inline std::uint32_t hash(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<std::uint32_t>((x ^ x >> 33) >> 16);
}
__device__ inline float normal(std::uint64_t seed) {
  const float u = (static_cast<float>(hash(seed * 2) >> 8) + 0.5F) * 0x1p-24F;
  const float w = static_cast<float>(hash(seed * 2 + 1) >> 8) * 0x1p-24F;
  return sqrtf(-2.0F * logf(u)) * cospif(2.0F * w);
}
static __global__ void fill_normal(bf16* x, std::int64_t count, std::uint64_t seed, float sigma) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    x[i] = __float2bfloat16(sigma * normal(seed + static_cast<std::uint64_t>(i)));
  }
}
// Scores are normal with variance 1, so the LSE of a row with n keys is close to ln n + 1/2, and O is about 1 / √n.
static __global__ void make_forward(bf16* o, float* lse, Shape shape, std::uint64_t seed) {
  const std::int64_t count = shape.tokens() * kHeads * kDim;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t token = i / (kHeads * kDim);
    const auto keys = static_cast<float>(token % shape.seq + 1);
    o[i] = __float2bfloat16(normal(seed + static_cast<std::uint64_t>(i)) * rsqrtf(keys));
    if (i % kDim == 0) {
      const std::int64_t head = i / kDim % kHeads;
      lse[head * shape.tokens() + token] = logf(keys) + 0.5F + 0.1F * normal(seed * 3 + static_cast<std::uint64_t>(i));
    }
  }
}
// delta = rowsum(dO ∘ O) and LSE · log2 e of [heads, tokens]; 16 lanes a row.
static __global__ void __launch_bounds__(256)
    delta_kernel(const bf16* o, const bf16* dout, const float* lse, float* lse2, float* delta, std::int64_t tokens) {
  const std::int64_t row = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 16;  // token · heads + head
  const int lane = static_cast<int>(threadIdx.x) % 16;
  const uint4 a = reinterpret_cast<const uint4*>(o + row * kDim)[lane];
  const uint4 b = reinterpret_cast<const uint4*>(dout + row * kDim)[lane];
  const auto* x = reinterpret_cast<const __nv_bfloat162*>(&a);
  const auto* y = reinterpret_cast<const __nv_bfloat162*>(&b);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(__low2float(x[i]), __low2float(y[i]), sum);
    sum = fmaf(__high2float(x[i]), __high2float(y[i]), sum);
  }
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  if (lane != 0) return;
  const std::int64_t at = row % kHeads * tokens + row / kHeads;
  const float x2 = lse[at] * static_cast<float>(kLog2E);
  lse2[at] = isinf(x2) ? 0.0F : x2;
  delta[at] = sum;
}

template <class T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

// Tensors of one shape.
struct Data {
  explicit Data(const Shape& s) : shape(s) {
    const std::int64_t wide = s.tokens() * kHeads * kDim, narrow = s.tokens() * kKvHeads * kDim;
    q = allocate<bf16>(wide);
    dout = allocate<bf16>(wide);
    dq = allocate<bf16>(wide);
    o = allocate<bf16>(wide);
    k = allocate<bf16>(narrow);
    v = allocate<bf16>(narrow);
    dk = allocate<bf16>(narrow);
    dv = allocate<bf16>(narrow);
    spill = allocate<std::uint32_t>(spill_bytes() / 4);
    lse = allocate<float>(s.tokens() * kHeads);
    lse2 = allocate<float>(s.tokens() * kHeads);
    delta = allocate<float>(s.tokens() * kHeads);
    fill_normal<<<2048, 256>>>(q, wide, 1ULL << 40, 1.0F);
    fill_normal<<<2048, 256>>>(k, narrow, 2ULL << 40, 1.0F);
    fill_normal<<<2048, 256>>>(v, narrow, 3ULL << 40, 1.0F);
    fill_normal<<<2048, 256>>>(dout, wide, 4ULL << 40, 1.0F);
    make_forward<<<2048, 256>>>(o, lse, s, 5ULL << 40);
    make_delta();
    CHECK(cudaDeviceSynchronize());
  }
  std::int64_t spill_bytes() const { return std::int64_t{shape.batch} * kHeads * shape.seq * shape.seq * 2; }
  void make_delta() const {
    delta_kernel<<<static_cast<unsigned>(shape.tokens() * kHeads / 16), 256>>>(o, dout, lse, lse2, delta,
                                                                               shape.tokens());
  }
  ~Data() {
    for (void* memory :
         {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(dout),
          static_cast<void*>(o), static_cast<void*>(dq), static_cast<void*>(dk), static_cast<void*>(dv),
          static_cast<void*>(spill), static_cast<void*>(lse), static_cast<void*>(lse2), static_cast<void*>(delta)}) {
      cudaFree(memory);
    }
  }
  Data(const Data&) = delete;
  Shape shape;
  bf16 *q, *k, *v, *dout, *o, *dq, *dk, *dv;
  float *lse, *lse2, *delta;
  std::uint32_t* spill;
};

}  // namespace ringattn::spike
