// SPDX-License-Identifier: Apache-2.0
// Quantizes the rows of x to int8, one CTA a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/linear/cuda/quantized_finish.cuh"

namespace ringattn::cuda {

namespace {

// Threads of a row. Few rows: many, so that a row is done soon. Many rows: few with more registers for x, so that more
// of it is in flight.
constexpr int kFewRowsThreads = 512;
constexpr int kManyRowsThreads = 128;
constexpr int kFewRows = 132;
constexpr int kHeldElements = 8192;            // of a row, that threads keep in registers
constexpr float kRoundingShift = 12582912.0F;  // 1.5 · 2^23: adding it rounds to an integer, half to even

__device__ __forceinline__ uint4 load_x_chunk(const Int8Rows& p, const char* row, int chunk) {
  const char* const from = row + std::int64_t{16} * chunk;
  if (p.x.aligned && (chunk + 1) * 8 <= p.features) return *reinterpret_cast<const uint4*>(from);
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(from);
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = chunk * 8 + 2 * i;
    words[i] = k < p.features ? elements[2 * i] : 0U;
    if (k + 1 < p.features) words[i] |= static_cast<std::uint32_t>(elements[2 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

template <bool kBf16>
__device__ __forceinline__ void widen_chunk(const uint4& chunk, float (&x)[8]) {
  const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBf16) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    } else {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = both.x;
      x[2 * i + 1] = both.y;
    }
  }
}

// The largest |x| of pairs of elements, as bits. Bit patterns have the same order as magnitudes, and those of ∞ and NaN
// are largest.
__device__ __forceinline__ std::uint32_t largest_pair(const uint4& chunk, std::uint32_t largest) {
  constexpr std::uint32_t kMagnitudes = 0x7fff7fffU;
  largest = __vmaxu2(largest, __vmaxu2(chunk.x & kMagnitudes, chunk.y & kMagnitudes));
  return __vmaxu2(largest, __vmaxu2(chunk.z & kMagnitudes, chunk.w & kMagnitudes));
}
// x| as the bits of a float. Those of ∞ and NaN are the largest.
template <bool kBf16>
__device__ __forceinline__ std::uint32_t largest_bits(std::uint32_t pair) {
  const std::uint32_t largest = max(pair >> 16, pair & 0xffffU);
  return kBf16 ? largest << 16 : __float_as_uint(__half2float(__ushort_as_half(static_cast<std::uint16_t>(largest))));
}

// clamp(rint(x / s), ±127) of eight elements, in the low bytes of `shifted`. x / s is computed with the reciprocal, or
// by division if that might round to another integer, i.e. within 2^-14 of a half. (The reciprocal's error is less: 2
// ulp of at most 127.5.)
__device__ __forceinline__ void quantize_chunk(const float (&x)[8], float scale, float reciprocal,
                                               std::uint32_t (&shifted)[8]) {
  float largest_error = 0.0F;  // NaN is not larger than any
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float quotient = __fmul_rn(x[i], reciprocal);
    const float sum = __fadd_rn(quotient, kRoundingShift);
    const float error = __fsub_rn(quotient, __fsub_rn(sum, kRoundingShift));
    largest_error = fmaxf(largest_error, fabsf(error));
    shifted[i] = __float_as_uint(sum);
  }
  if (reciprocal == reciprocal && largest_error < 0.5F - 0x1p-14F) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float quotient = fminf(fmaxf(__fdiv_rn(x[i], scale), -127.0F), 127.0F);
    shifted[i] = __float_as_uint(__fadd_rn(quotient, kRoundingShift));
  }
}

template <bool kBf16, int kRowThreads>
__global__ void __launch_bounds__(kRowThreads) int8_rows_kernel(const __grid_constant__ Int8Rows p) {
  constexpr int kHeldChunks = kHeldElements / 8 / kRowThreads;
  __shared__ std::uint32_t of_warp[kRowThreads / 32];
  pdl_wait();
  pdl_launch_dependents();  // after the wait: the product may load weights before this kernel is done
  const int row = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const char* const x = p.x.data + row * p.x.stride;
  const int chunks = (p.features + 7) / 8;
  uint4 held[kHeldChunks];
#pragma unroll
  for (int i = 0; i < kHeldChunks; ++i) {
    const int chunk = thread + i * kRowThreads;
    held[i] = chunk < chunks ? load_x_chunk(p, x, chunk) : uint4{};
  }
  constexpr std::uint32_t kInfinityBits = 0x7f800000U;
  std::uint32_t largest = 0;
  if (p.absmax != nullptr) {
    for (int part = 0; part < p.absmax_parts; ++part) {
      largest = max(largest, __float_as_uint(p.absmax[part * p.absmax_stride + row]) & 0x7fffffffU);
    }
  } else {
#pragma unroll
    for (const uint4& chunk : held) largest = largest_pair(chunk, largest);
    for (int chunk = thread + kHeldChunks * kRowThreads; chunk < chunks; chunk += kRowThreads) {
      largest = largest_pair(load_x_chunk(p, x, chunk), largest);
    }
    largest = __reduce_max_sync(0xffffffffU, largest_bits<kBf16>(largest));
    if (thread % 32 == 0) of_warp[thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (const std::uint32_t other : of_warp) largest = max(largest, other);
  }
  const bool finite = largest < kInfinityBits;
  const float absmax = finite ? __uint_as_float(largest) : __uint_as_float(0x7fffffffU);
  if (p.found != nullptr) {
    if (thread == 0) p.found[row] = absmax;
    return;
  }
  float scale = __fdiv_rn(absmax, 127.0F);
  if (scale == 0.0F) scale = 1.0F;
  if (thread == 0) p.scales[row] = scale;
  // The reciprocal of a tiny scale overflows: NaN has every element divided.
  const float reciprocal = scale > 0x1p-100F ? __frcp_rn(scale) : __uint_as_float(0x7fffffffU);
  const int out_chunks = static_cast<int>(int8_row_bytes(p.features) / 8);
  signed char* const to = p.quantized + row * int8_row_bytes(p.features);
  const auto store_chunk = [&](int chunk, const uint4& elements) {
    float values[8];
    widen_chunk<kBf16>(elements, values);
    std::uint32_t shifted[8];
    quantize_chunk(values, scale, reciprocal, shifted);
    const auto word = [&](int i) {
      const std::uint32_t low = __byte_perm(shifted[i], shifted[i + 1], 0x0040);
      const std::uint32_t high = __byte_perm(shifted[i + 2], shifted[i + 3], 0x0040);
      return finite ? __byte_perm(low, high, 0x5410) : 0U;
    };
    *reinterpret_cast<uint2*>(to + std::int64_t{8} * chunk) = {word(0), word(4)};
  };
#pragma unroll
  for (int i = 0; i < kHeldChunks; ++i) {
    const int chunk = thread + i * kRowThreads;
    if (chunk < out_chunks) store_chunk(chunk, held[i]);
  }
  for (int chunk = thread + kHeldChunks * kRowThreads; chunk < out_chunks; chunk += kRowThreads) {
    store_chunk(chunk, chunk < chunks ? load_x_chunk(p, x, chunk) : uint4{});
  }
}

template <bool kBf16, int kRowThreads>
void launch_int8_rows_by(const Int8Rows& params, Stream stream) {
  const auto kernel = int8_rows_kernel<kBf16, kRowThreads>;
  PdlLaunch launch(params.rows, kRowThreads, 0, stream);
  launch.serialize_unless_pdl(reinterpret_cast<const void*>(kernel));
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, params), "int8_rows");
}

template <bool kBf16>
void launch_int8_rows_of(const Int8Rows& params, Stream stream) {
  params.rows <= kFewRows ? launch_int8_rows_by<kBf16, kFewRowsThreads>(params, stream)
                          : launch_int8_rows_by<kBf16, kManyRowsThreads>(params, stream);
}

}  // namespace

void launch_int8_rows(const Int8Rows& params, Stream stream) {
  params.dtype == Dtype::kBf16 ? launch_int8_rows_of<true>(params, stream) : launch_int8_rows_of<false>(params, stream);
}

}  // namespace ringattn::cuda
