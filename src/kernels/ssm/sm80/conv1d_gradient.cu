// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_conv1d's gradients. A thread computes four channels of a tile of tokens in order: g of each
// token, dx of the token width − 1 before it, and the tile's terms of dweight and dbias. Tiles of a unit are added
// through shared memory. g of the width − 1 tokens after a tile is computed again.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/sm80/sm80_conv1d.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::from_float;
using cuda::to_float;

constexpr int kTileTokensOfWarp = static_cast<int>(kConv1dGradientTile);
constexpr int kTiles = static_cast<int>(kTokenUnit) / kTileTokensOfWarp;
constexpr int kThreads = 32 * kTiles;
constexpr int kQuad = 2;               // channels of a thread
constexpr int kChannels = 32 * kQuad;  // of a CTA
constexpr int kTokensAtOnce = 4;       // loaded while as many are computed
constexpr int kSumThreads = 128;

// Four adjacent channels of one token, as stored.
template <class Element>
struct alignas(kQuad * sizeof(Element)) Quad {
  Element v[kQuad];
};

template <class Element>
__device__ __forceinline__ Quad<Element> load_quad(const Element* at, bool aligned) {
  if (aligned) return *reinterpret_cast<const Quad<Element>*>(at);
  Quad<Element> quad;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) quad.v[i] = at[i];
  return quad;
}

template <class Element>
__device__ __forceinline__ void store_quad(Element* at, bool aligned, const float (&values)[kQuad]) {
  Quad<Element> quad;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) quad.v[i] = from_float<Element>(values[i]);
  if (aligned) {
    *reinterpret_cast<Quad<Element>*>(at) = quad;
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) at[i] = quad.v[i];
  }
}

// A run's tokens of a thread's channels.
template <class Element>
struct RunTokens {
  const Conv1dGradientParams& p;
  const Conv1dGradientRunEntry& run;
  std::int64_t channel;

  __device__ std::int64_t end() const { return run.tokens + run.next_tokens; }

  __device__ __forceinline__ const Element* after(const void* next, std::int64_t token) const {
    return static_cast<const Element*>(next) + (token - run.tokens) * p.channels + channel;
  }
  // Token `token` < end(). A negative one is in the halo, or zero before the sequence.
  __device__ __forceinline__ Quad<Element> x(std::int64_t token) const {
    if (token < 0 && run.initial_halo == nullptr) {
      Quad<Element> zeros;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) zeros.v[i] = from_float<Element>(0.0F);
      return zeros;
    }
    const Element* at = static_cast<const Element*>(p.x) + (run.row + token) * p.x_stride + channel;
    if (token < 0) {
      at = static_cast<const Element*>(run.initial_halo) + (token + p.width - 1) * p.channels + channel;
    } else if (token >= run.tokens) {
      at = after(run.next_x, token);
    }
    return load_quad(at, p.aligned);
  }
  __device__ __forceinline__ Quad<Element> dy(std::int64_t token) const {
    const Element* at = static_cast<const Element*>(p.dy) + (run.row + token) * p.dy_stride + channel;
    return load_quad(token >= run.tokens ? after(run.next_dy, token) : at, p.aligned);
  }
  // The gradient that a token, which may be in the halo, has from the final halo.
  __device__ __forceinline__ void load_dfinal(std::int64_t token, float (&sum)[kQuad]) const {
    const std::int64_t in_final = token - (end() - (p.width - 1));
#pragma unroll
    for (int i = 0; i < kQuad; ++i) sum[i] = 0.0F;
    if (run.dfinal_halo == nullptr || in_final < 0) return;
    const Quad<Element> quad =
        load_quad(static_cast<const Element*>(run.dfinal_halo) + in_final * p.channels + channel, p.aligned);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) sum[i] = to_float(quad.v[i]);
  }
};

// Weights and bias of a thread's channels.
template <int kWidth>
struct Taps {
  float weight[kWidth][kQuad];
  float bias[kQuad];

  __device__ Taps(const Conv1dGradientParams& p, std::int64_t channel) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) weight[k][i] = p.weight[(channel + i) * kWidth + k];
      bias[i] = p.bias == nullptr ? 0.0F : p.bias[channel + i];
    }
  }
};

// The last kWidth tokens: x, and g of those that exist.
template <int kWidth>
struct Window {
  float x[kWidth][kQuad];
  float g[kWidth][kQuad];

  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int k = 0; k + 1 < kWidth; ++k) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        x[k][i] = x[k + 1][i];
        g[k][i] = g[k + 1][i];
      }
    }
  }
  // Makes a token the last one.
  template <class Element>
  __device__ __forceinline__ void take(const Quad<Element>& x_quad, const Quad<Element>& dy, const Taps<kWidth>& taps,
                                       bool with_silu) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      x[kWidth - 1][i] = to_float(x_quad.v[i]);
      float slope = 1.0F;
      if (with_silu) {
        float v = taps.bias[i];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) v = __fmaf_rn(taps.weight[k][i], x[k][i], v);
        const float s = cuda::reciprocal_approx(__fadd_rn(cuda::exp2_approx(__fmul_rn(v, -cuda::kSsmLog2E)), 1.0F));
        slope = __fmul_rn(s, __fmaf_rn(v, __fsub_rn(1.0F, s), 1.0F));
      }
      g[kWidth - 1][i] = with_silu ? __fmul_rn(to_float(dy.v[i]), slope) : to_float(dy.v[i]);
    }
  }
  // Adds the terms of the first token of the window to its gradient. Its tokens from `existing` on do not exist.
  __device__ __forceinline__ void add_terms(const Taps<kWidth>& taps, std::int64_t existing,
                                            float (&sum)[kQuad]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= existing) break;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) sum[i] = __fmaf_rn(taps.weight[kWidth - 1 - j][i], g[j][i], sum[i]);
    }
  }
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) gradient_kernel(const __grid_constant__ Conv1dGradientParams p) {
  __shared__ float tiles[kTiles][kWidth + 1][kChannels];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t channel = (std::int64_t{blockIdx.y} * 32 + lane) * kQuad;
  int nth = 0;
  while (nth + 1 < p.run_count && p.runs[nth + 1].first_unit <= blockIdx.x) ++nth;
  const Conv1dGradientRunEntry& run = p.runs[nth];
  const std::int64_t unit = (blockIdx.x - run.first_unit) * kTokenUnit;
  const std::int64_t begin = unit + tile * kTileTokensOfWarp;
  if (channel < p.channels && begin < run.tokens) {
    const RunTokens<Element> tokens{p, run, channel};
    const Taps<kWidth> taps(p, channel);
    const std::int64_t left = run.tokens - begin;
    const int count = static_cast<int>(left < kTileTokensOfWarp ? left : kTileTokensOfWarp);
    const std::int64_t after = tokens.end() - begin;
    const int last = static_cast<int>(after < count + kWidth - 1 ? after : count + kWidth - 1);
    Window<kWidth> window;
#pragma unroll
    for (int k = 0; k + 1 < kWidth; ++k) {
      const Quad<Element> x = tokens.x(begin + k - (kWidth - 1));
#pragma unroll
      for (int i = 0; i < kQuad; ++i) window.x[k + 1][i] = to_float(x.v[i]);
    }
    float sums[kWidth + 1][kQuad] = {};
    Quad<Element> x[kTokensAtOnce], dy[kTokensAtOnce];
    const auto load = [&](int from) {
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        if (from + j < last) {
          x[j] = tokens.x(begin + from + j);
          dy[j] = tokens.dy(begin + from + j);
        }
      }
    };
    load(0);
    Element* dx = static_cast<Element*>(p.dx) + (run.row + begin) * p.dx_stride + channel;
#pragma unroll 1
    for (int from = 0; from < count + kWidth - 1; from += kTokensAtOnce) {
      Quad<Element> x_now[kTokensAtOnce], dy_now[kTokensAtOnce];
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        x_now[j] = x[j];
        dy_now[j] = dy[j];
      }
      load(from + kTokensAtOnce);
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        const int t = from + j;
        if (t >= count + kWidth - 1) break;
        if (t > 0) window.shift();
        if (t < last) window.take(x_now[j], dy_now[j], taps, p.silu);
        if (t < count) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            const float g = window.g[kWidth - 1][i];
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sums[k][i] = __fmaf_rn(g, window.x[k][i], sums[k][i]);
            sums[kWidth][i] = __fadd_rn(sums[kWidth][i], g);
          }
        }
        const int s = t - (kWidth - 1);
        if (s < 0) continue;
        float sum[kQuad];
        tokens.load_dfinal(begin + s, sum);
        window.add_terms(taps, last - s, sum);
        store_quad(dx, p.aligned, sum);
        dx += p.dx_stride;
      }
    }
#pragma unroll
    for (int row = 0; row <= kWidth; ++row) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) tiles[tile][row][lane * kQuad + i] = sums[row][i];
    }
  }
  __syncthreads();
  const std::int64_t left = run.tokens - unit;
  const int present =
      static_cast<int>((left < kTokenUnit ? left : kTokenUnit) + kTileTokensOfWarp - 1) / kTileTokensOfWarp;
  if (tile > kWidth || channel >= p.channels) return;
  float* const to = p.sums + (std::int64_t{blockIdx.x} * (kWidth + 1) + tile) * p.channels + channel;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    float total = tiles[0][tile][lane * kQuad + i];
    for (int other = 1; other < present; ++other) total = __fadd_rn(total, tiles[other][tile][lane * kQuad + i]);
    to[i] = total;
  }
}

// dx of the tokens before a sequence.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kSumThreads) halo_gradient_kernel(const __grid_constant__ Conv1dGradientParams p) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kSumThreads + threadIdx.x) * kQuad;
  const Conv1dGradientRunEntry& run = p.runs[blockIdx.x];
  if (channel >= p.channels || run.dinitial_halo == nullptr) return;
  const RunTokens<Element> tokens{p, run, channel};
  const Taps<kWidth> taps(p, channel);
  Window<kWidth> window;
#pragma unroll
  for (int k = 0; k + 1 < kWidth; ++k) {
    const Quad<Element> x = tokens.x(k - (kWidth - 1));
#pragma unroll
    for (int i = 0; i < kQuad; ++i) window.x[k + 1][i] = to_float(x.v[i]);
  }
  float g[kWidth - 1][kQuad];  // of tokens 0 …
#pragma unroll
  for (int t = 0; t < kWidth - 1; ++t) {
    if (t >= tokens.end()) break;
    if (t > 0) window.shift();
    window.take(tokens.x(t), tokens.dy(t), taps, p.silu);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) g[t][i] = window.g[kWidth - 1][i];
  }
#pragma unroll
  for (int s = 0; s < kWidth - 1; ++s) {  // token s − (kWidth − 1)
    float sum[kQuad];
    tokens.load_dfinal(s - (kWidth - 1), sum);
#pragma unroll
    for (int t = 0; t <= s; ++t) {
      if (t >= tokens.end()) break;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) sum[i] = __fmaf_rn(taps.weight[s - t][i], g[t][i], sum[i]);
    }
    store_quad(static_cast<Element*>(run.dinitial_halo) + s * p.channels + channel, p.aligned, sum);
  }
}

__global__ void __launch_bounds__(kSumThreads) sum_kernel(const CausalConv1dUnitSum sum, int width) {
  const std::int64_t channel = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  const int row = static_cast<int>(blockIdx.y);
  if (channel >= sum.channels) return;
  float* const to = row < width ? sum.dweight + channel * width + row : sum.dbias + channel;
  if (row == width && sum.dbias == nullptr) return;
  const float* from = sum.units + row * sum.channels + channel;
  float total = 0.0F;
#pragma unroll 8
  for (std::int64_t unit = 0; unit < sum.count; ++unit, from += (width + 1) * sum.channels) {
    total = unit == 0 ? *from : __fadd_rn(total, *from);
  }
  *to = total;
}

struct Kernels {
  void (*gradient)(Conv1dGradientParams);
  void (*halo)(Conv1dGradientParams);
};

template <class Element>
Kernels kernels_of(int width) {
  if (width == 2) return {gradient_kernel<Element, 2>, halo_gradient_kernel<Element, 2>};
  if (width == 3) return {gradient_kernel<Element, 3>, halo_gradient_kernel<Element, 3>};
  return {gradient_kernel<Element, kMaxWidth>, halo_gradient_kernel<Element, kMaxWidth>};
}

Kernels kernels_of(Dtype dtype, int width) {
  switch (dtype) {
    case Dtype::kF32:
      return kernels_of<float>(width);
    case Dtype::kBf16:
      return kernels_of<__nv_bfloat16>(width);
    default:
      return kernels_of<__half>(width);
  }
}

unsigned blocks_of(std::int64_t channels, int each) { return static_cast<unsigned>((channels + each - 1) / each); }

}  // namespace

void load_conv1d_gradient(Dtype dtype, int width) {
  const Kernels kernels = kernels_of(dtype, width);
  cuda::load_kernel(kernels.gradient);
  cuda::load_kernel(kernels.halo);
  cuda::load_kernel(sum_kernel);
}

void conv1d_gradient_runs(const Conv1dGradientParams& params, Dtype dtype, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.units), blocks_of(params.channels, kChannels));
  kernels_of(dtype, params.width).gradient<<<grid, kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "gradients of sm80_conv1d");
}

void conv1d_halo_gradients(const Conv1dGradientParams& params, Dtype dtype, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.run_count), blocks_of(params.channels, kSumThreads * kQuad));
  kernels_of(dtype, params.width).halo<<<grid, kSumThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "halo gradients of sm80_conv1d");
}

void conv1d_sum_units(const CausalConv1dUnitSum& sum, int width, cudaStream_t stream) {
  const dim3 grid(blocks_of(sum.channels, kSumThreads), static_cast<unsigned>(width) + 1);
  sum_kernel<<<grid, kSumThreads, 0, stream>>>(sum, width);
  check_cuda(cudaGetLastError(), "unit sums of sm80_conv1d");
}

}  // namespace ringattn::sm80
