// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_conv1d's gradients. A thread computes two channels of a tile of tokens in order: g of each
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
constexpr int kPair = 2;               // channels of a thread
constexpr int kChannels = 32 * kPair;  // of a CTA
constexpr int kTokensAtOnce = 4;       // loaded while the same number of tokens is computed
constexpr int kSumThreads = 128;

// Two adjacent channels of one token, as stored.
template <class Element>
struct alignas(kPair * sizeof(Element)) Pair {
  Element v[kPair];
};

template <class Element>
__device__ __forceinline__ Pair<Element> load_pair(const Element* at, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pair<Element>*>(at);
  Pair<Element> pair;
#pragma unroll
  for (int i = 0; i < kPair; ++i) pair.v[i] = at[i];
  return pair;
}

template <class Element>
__device__ __forceinline__ void store_pair(Element* at, bool aligned, const float (&values)[kPair]) {
  Pair<Element> pair;
#pragma unroll
  for (int i = 0; i < kPair; ++i) pair.v[i] = from_float<Element>(values[i]);
  if (aligned) {
    *reinterpret_cast<Pair<Element>*>(at) = pair;
  } else {
#pragma unroll
    for (int i = 0; i < kPair; ++i) at[i] = pair.v[i];
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
  __device__ __forceinline__ Pair<Element> x(std::int64_t token) const {
    if (token < 0 && run.initial_halo == nullptr) {
      Pair<Element> zeros;
#pragma unroll
      for (int i = 0; i < kPair; ++i) zeros.v[i] = from_float<Element>(0.0F);
      return zeros;
    }
    const Element* at = static_cast<const Element*>(p.x) + (run.row + token) * p.x_stride + channel;
    if (token < 0) {
      at = static_cast<const Element*>(run.initial_halo) + (token + p.width - 1) * p.channels + channel;
    } else if (token >= run.tokens) {
      at = after(run.next_x, token);
    }
    return load_pair(at, p.aligned);
  }
  __device__ __forceinline__ Pair<Element> dy(std::int64_t token) const {
    const Element* at = static_cast<const Element*>(p.dy) + (run.row + token) * p.dy_stride + channel;
    return load_pair(token >= run.tokens ? after(run.next_dy, token) : at, p.aligned);
  }
  // The gradient that token `token` of the final halo, which may be in the initial one, has from it.
  __device__ __forceinline__ void load_dfinal(std::int64_t token, float (&sum)[kPair]) const {
    const std::int64_t row = token - (end() - (p.width - 1));
    const Element* const at = static_cast<const Element*>(run.dfinal_halo) + row * p.channels + channel;
    const Pair<Element> pair = load_pair(at, p.aligned);
#pragma unroll
    for (int i = 0; i < kPair; ++i) sum[i] = to_float(pair.v[i]);
  }
  // The first token from `begin` on, counted from there, that has a gradient from the final halo.
  __device__ int first_in_final(std::int64_t begin) const {
    const std::int64_t first = end() - (p.width - 1) - begin;
    return run.dfinal_halo == nullptr || first > kTileTokensOfWarp ? kTileTokensOfWarp : static_cast<int>(first);
  }
};

// Weights and bias of a thread's channels.
template <int kWidth>
struct Taps {
  float weight[kWidth][kPair];
  float bias[kPair];

  __device__ Taps(const Conv1dGradientParams& p, std::int64_t channel) {
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) weight[k][i] = p.weight[(channel + i) * kWidth + k];
      bias[i] = p.bias == nullptr ? 0.0F : p.bias[channel + i];
    }
  }
};

// g of a token from the window of x that ends with it.
template <int kWidth, int kTokens>
__device__ __forceinline__ void differentiate(const Taps<kWidth>& taps, const float (&x)[kTokens][kPair], int first,
                                              bool with_silu, float (&g)[kPair]) {
  if (!with_silu) return;
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
    float v = taps.bias[i];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v = __fmaf_rn(taps.weight[k][i], x[first + k][i], v);
    g[i] = __fmul_rn(g[i], cuda::silu_slope(v));
  }
}

// Adds a token's terms to the sums of its tile.
template <int kWidth, int kTokens>
__device__ __forceinline__ void add_to_tile(const float (&x)[kTokens][kPair], int first, const float (&g)[kPair],
                                            float (&sums)[kWidth + 1][kPair]) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k][i] = __fmaf_rn(g[i], x[first + k][i], sums[k][i]);
    sums[kWidth][i] = __fadd_rn(sums[kWidth][i], g[i]);
  }
}

// Adds the terms of g of a token and of those after it, `existing` in all, to the token's gradient.
template <int kWidth, int kTokens>
__device__ __forceinline__ void add_terms(const Taps<kWidth>& taps, const float (&g)[kTokens][kPair], int first,
                                          int existing, float (&sum)[kPair]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j >= existing) break;
#pragma unroll
    for (int i = 0; i < kPair; ++i) sum[i] = __fmaf_rn(taps.weight[kWidth - 1 - j][i], g[first + j][i], sum[i]);
  }
}

template <class Element>
__device__ __forceinline__ void widen(const Pair<Element>& pair, float (&values)[kPair]) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) values[i] = to_float(pair.v[i]);
}

// Moves the last kBefore entries of a window to its begin.
template <int kBefore, int kTokens>
__device__ __forceinline__ void keep_last(float (&window)[kTokens][kPair]) {
#pragma unroll
  for (int k = 0; k < kBefore; ++k) {
#pragma unroll
    for (int i = 0; i < kPair; ++i) window[k][i] = window[kTokens - kBefore + k][i];
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) gradient_kernel(const __grid_constant__ Conv1dGradientParams p) {
  constexpr int kBefore = kWidth - 1;
  __shared__ float tiles[kTiles][kWidth + 1][kChannels];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t channel = (std::int64_t{blockIdx.y} * 32 + lane) * kPair;
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
    const int together = count / kTokensAtOnce * kTokensAtOnce;
    const int in_final = tokens.first_in_final(begin);
    const Element* from_x = static_cast<const Element*>(p.x) + (run.row + begin) * p.x_stride + channel;
    const Element* from_dy = static_cast<const Element*>(p.dy) + (run.row + begin) * p.dy_stride + channel;
    Element* dx = static_cast<Element*>(p.dx) + (run.row + begin) * p.dx_stride + channel;
    Pair<Element> x_next[kTokensAtOnce], dy_next[kTokensAtOnce];
    const auto load = [&](int from) {
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        if (from < together) {
          x_next[j] = load_pair(from_x, p.aligned);
          dy_next[j] = load_pair(from_dy, p.aligned);
          from_x += p.x_stride;
          from_dy += p.dy_stride;
        }
      }
    };
    load(0);
    float sums[kWidth + 1][kPair] = {};
    // x and g of the last kBefore tokens, followed by the current ones. Before the tile there is no g.
    float x[kBefore + kTokensAtOnce][kPair], g[kBefore + kTokensAtOnce][kPair] = {};
#pragma unroll
    for (int k = 0; k < kBefore; ++k) widen(tokens.x(begin + k - kBefore), x[k]);
#pragma unroll 1
    for (int first = 0; first < together; first += kTokensAtOnce) {
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        widen(x_next[j], x[kBefore + j]);
        widen(dy_next[j], g[kBefore + j]);
      }
      load(first + kTokensAtOnce);
#pragma unroll
      for (int j = 0; j < kTokensAtOnce; ++j) {
        differentiate(taps, x, j, p.silu, g[kBefore + j]);
        add_to_tile<kWidth>(x, j, g[kBefore + j], sums);
        if (first + j < kBefore) continue;
        float sum[kPair] = {};
        if (first + j - kBefore >= in_final) tokens.load_dfinal(begin + first + j - kBefore, sum);
        add_terms(taps, g, j, kWidth, sum);
        store_pair(dx, p.aligned, sum);
        dx += p.dx_stride;
      }
      keep_last<kBefore>(x);
      keep_last<kBefore>(g);
    }
    // The tile's other tokens, and those after it that its gradients have terms of, one by one.
    float x_one[kWidth][kPair], g_one[kWidth][kPair];
#pragma unroll
    for (int k = 0; k < kBefore; ++k) {
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        x_one[k][i] = x[k][i];
        g_one[k][i] = g[k][i];
      }
    }
    const std::int64_t exist = tokens.end() - begin;
#pragma unroll 1
    for (int t = together; t < count + kBefore; ++t) {
      if (t < exist) {
        widen(tokens.x(begin + t), x_one[kBefore]);
        widen(tokens.dy(begin + t), g_one[kBefore]);
        differentiate(taps, x_one, 0, p.silu, g_one[kBefore]);
      }
      if (t < count) add_to_tile<kWidth>(x_one, 0, g_one[kBefore], sums);
      if (t >= kBefore) {
        float sum[kPair] = {};
        if (t - kBefore >= in_final) tokens.load_dfinal(begin + t - kBefore, sum);
        const std::int64_t existing = exist - (t - kBefore);
        add_terms(taps, g_one, 0, static_cast<int>(existing < kWidth ? existing : kWidth), sum);
        store_pair(dx, p.aligned, sum);
        dx += p.dx_stride;
      }
#pragma unroll
      for (int k = 0; k < kBefore; ++k) {
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
          x_one[k][i] = x_one[k + 1][i];
          g_one[k][i] = g_one[k + 1][i];
        }
      }
    }
#pragma unroll
    for (int row = 0; row <= kWidth; ++row) {
#pragma unroll
      for (int i = 0; i < kPair; ++i) tiles[tile][row][lane * kPair + i] = sums[row][i];
    }
  }
  __syncthreads();
  const std::int64_t left = run.tokens - unit;
  const int present =
      (static_cast<int>(left < kTokenUnit ? left : kTokenUnit) + kTileTokensOfWarp - 1) / kTileTokensOfWarp;
  if (tile > kWidth || channel >= p.channels) return;
  float* const to = p.sums + (std::int64_t{blockIdx.x} * (kWidth + 1) + tile) * p.channels + channel;
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
    float total = tiles[0][tile][lane * kPair + i];
    for (int other = 1; other < present; ++other) total = __fadd_rn(total, tiles[other][tile][lane * kPair + i]);
    to[i] = total;
  }
}

// dx of the tokens before a sequence.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kSumThreads) halo_gradient_kernel(const __grid_constant__ Conv1dGradientParams p) {
  constexpr int kBefore = kWidth - 1;
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kSumThreads + threadIdx.x) * kPair;
  const Conv1dGradientRunEntry& run = p.runs[blockIdx.x];
  if (channel >= p.channels || run.dinitial_halo == nullptr) return;
  const RunTokens<Element> tokens{p, run, channel};
  const Taps<kWidth> taps(p, channel);
  const int exist = static_cast<int>(tokens.end() < kBefore ? tokens.end() : kBefore);
  float x[2 * kBefore][kPair], g[kBefore][kPair];  // of tokens −kBefore …, and 0 …
#pragma unroll
  for (int t = 0; t < 2 * kBefore; ++t) {
    if (t < kBefore + exist) widen(tokens.x(t - kBefore), x[t]);
  }
#pragma unroll
  for (int t = 0; t < kBefore; ++t) {
    if (t >= exist) break;
    widen(tokens.dy(t), g[t]);
    differentiate(taps, x, t, p.silu, g[t]);
  }
#pragma unroll
  for (int s = 0; s < kBefore; ++s) {  // token s − kBefore
    float sum[kPair] = {};
    if (s >= tokens.first_in_final(-kBefore)) tokens.load_dfinal(s - kBefore, sum);
#pragma unroll
    for (int t = 0; t <= s; ++t) {
      if (t >= exist) break;
#pragma unroll
      for (int i = 0; i < kPair; ++i) sum[i] = __fmaf_rn(taps.weight[s - t][i], g[t][i], sum[i]);
    }
    store_pair(static_cast<Element*>(run.dinitial_halo) + s * p.channels + channel, p.aligned, sum);
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
  const dim3 grid(static_cast<unsigned>(params.run_count), blocks_of(params.channels, kSumThreads * kPair));
  kernels_of(dtype, params.width).halo<<<grid, kSumThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "halo gradients of sm80_conv1d");
}

void conv1d_sum_units(const CausalConv1dUnitSum& sum, int width, cudaStream_t stream) {
  const dim3 grid(blocks_of(sum.channels, kSumThreads), static_cast<unsigned>(width) + 1);
  sum_kernel<<<grid, kSumThreads, 0, stream>>>(sum, width);
  check_cuda(cudaGetLastError(), "unit sums of sm80_conv1d");
}

}  // namespace ringattn::sm80
