// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_conv1d. A thread computes eight channels of a tile of tokens, and prefetches tokens with
// cp.async.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/sm80/sm80_conv1d.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::from_float;
using cuda::load_kernel;
using cuda::to_float;

constexpr int kConv1dThreads = 128;
// CTAs per SM, which share registers and shared memory.
template <class Element>
constexpr int kCtasOfMultiprocessor = sizeof(Element) > 2 ? 4 : 5;
constexpr int kChannels = 8;       // per thread
constexpr int kTokensPerStep = 4;  // tokens loaded and computed per iteration
constexpr int kStages = 2;         // pipeline stages of kTokensPerStep tokens

// Eight adjacent channels of one token, as stored.
template <class Element>
struct alignas(16) Eight {
  Element v[kChannels];
};

template <class Element>
__device__ __forceinline__ Eight<Element> load_eight(const Element* at, bool aligned) {
  Eight<Element> eight;
  if (aligned) {
#pragma unroll
    for (unsigned i = 0; i < sizeof(eight) / sizeof(uint4); ++i) {
      reinterpret_cast<uint4*>(&eight)[i] = reinterpret_cast<const uint4*>(at)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) eight.v[i] = at[i];
  }
  return eight;
}
template <class Element>
__device__ __forceinline__ void store_eight(Element* at, bool aligned, const Eight<Element>& eight) {
  if (aligned) {
#pragma unroll
    for (unsigned i = 0; i < sizeof(eight) / sizeof(uint4); ++i) {
      reinterpret_cast<uint4*>(at)[i] = reinterpret_cast<const uint4*>(&eight)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) at[i] = eight.v[i];
  }
}
template <class Element>
__device__ __forceinline__ Eight<Element> zeros() {
  Eight<Element> eight;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) eight.v[i] = from_float<Element>(0.0F);
  return eight;
}

// Weights and bias of a thread's channels. weight: [width][channels].
template <int kWidth>
struct Filter {
  float weight[kWidth][kChannels];
  float bias[kChannels];

  __device__ Filter(const Conv1dParams& p, std::int64_t channel) {
    float given[kChannels * kWidth];
    load(p.weight + channel * kWidth, p.filter_aligned, given);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) weight[k][i] = given[i * kWidth + k];
      bias[i] = 0.0F;
    }
    if (p.bias != nullptr) load(p.bias + channel, p.filter_aligned, bias);
  }

  // One token of y, from kWidth tokens from `first` on.
  template <class Element, int kTokens>
  __device__ __forceinline__ Eight<Element> convolve(const Eight<Element> (&tokens)[kTokens], int first,
                                                     bool with_silu) const {
    Eight<Element> y;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      float sum = bias[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum = __fmaf_rn(weight[k][i], to_float(tokens[first + k].v[i]), sum);
      y.v[i] = from_float<Element>(with_silu ? cuda::silu(sum) : sum);
    }
    return y;
  }

 private:
  // Lanes read separate cache lines, so few wide loads are faster.
  template <int kCount>
  static __device__ __forceinline__ void load(const float* from, bool aligned, float (&to)[kCount]) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = from[i];
    }
  }
};

// Loads a token of a run. A negative one is in the run's halo, or zero before the sequence.
template <class Element>
__device__ __forceinline__ Eight<Element> load_token(const Conv1dParams& p, const Conv1dRunEntry& run,
                                                     std::int64_t token, std::int64_t channel) {
  if (token >= 0) {
    return load_eight(static_cast<const Element*>(p.x) + (run.row + token) * p.x_stride + channel, p.aligned);
  }
  if (run.initial_halo == nullptr) return zeros<Element>();
  return load_eight(static_cast<const Element*>(run.initial_halo) + (token + p.width - 1) * p.channels + channel,
                    p.aligned);
}

// cp.async pipeline of a thread's channels. Each thread has its own buffers in shared memory, so prefetching takes no
// registers and needs no synchronization.
template <class Element, bool kAligned>
class TokenPipeline {
 public:
  static constexpr int kVectors = sizeof(Eight<Element>) / 16;
  static constexpr int kBufferTokens = kStages * kTokensPerStep;
  using Buffers = uint4[kBufferTokens][kVectors][kConv1dThreads];

  __device__ __forceinline__ TokenPipeline(Buffers& buffers, const Element* from, std::int64_t stride)
      : address_(cuda::shared_address(&buffers[0][0][threadIdx.x])), from_(from), stride_(stride) {}

  // Issues the loads of the next kTokensPerStep tokens, of which `present` exist, into stage `nth`.
  __device__ __forceinline__ void issue_loads(int nth, int present) {
#pragma unroll
    for (int i = 0; i < kTokensPerStep; ++i, from_ += stride_) {
#pragma unroll
      for (int vector = 0; vector < kVectors && i < present; ++vector) {
        cuda::copy_chunk(at(nth, i, vector), reinterpret_cast<const char*>(from_) + 16 * vector, true, kAligned);
      }
    }
    cuda::copy_commit();
  }
  // Waits for the oldest stage and reads it.
  __device__ __forceinline__ void wait_and_read(int nth, Eight<Element>* tokens) const {
    cuda::copy_wait<kStages - 1>();
#pragma unroll
    for (int i = 0; i < kTokensPerStep; ++i) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        reinterpret_cast<uint4*>(&tokens[i])[vector] = cuda::load_shared_16(at(nth, i, vector));
      }
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t at(int nth, int token, int vector) const {
    return address_ +
           static_cast<std::uint32_t>(((nth * kTokensPerStep + token) * kVectors + vector) * kConv1dThreads * 16);
  }

  std::uint32_t address_;
  const Element* from_;
  std::int64_t stride_;
};

template <class Element, int kWidth, bool kAligned>
__global__ void __launch_bounds__(kConv1dThreads, kCtasOfMultiprocessor<Element>)
    conv1d_kernel(const __grid_constant__ Conv1dParams p) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kConv1dThreads + threadIdx.x) * kChannels;
  if (channel >= p.channels) return;
  int nth = 0;
  while (nth + 1 < p.run_count && p.runs[nth + 1].first_tile <= blockIdx.x) ++nth;
  const Conv1dRunEntry& run = p.runs[nth];
  const std::int64_t begin = (blockIdx.x - run.first_tile) * kTileTokens;
  const std::int64_t left = run.tokens - begin;
  const int count = static_cast<int>(left < kTileTokens ? left : kTileTokens);
  // The last kWidth − 1 tokens, followed by the current ones.
  constexpr int kBefore = kWidth - 1;
  Eight<Element> tokens[kBefore + kTokensPerStep];
  Element* y = static_cast<Element*>(p.y) + (run.row + begin) * p.y_stride + channel;
  using X = TokenPipeline<Element, kAligned>;
  __shared__ typename X::Buffers buffers;
  X x(buffers, static_cast<const Element*>(p.x) + (run.row + begin) * p.x_stride + channel, p.x_stride);
#pragma unroll
  for (int nth = 0; nth < kStages; ++nth) x.issue_loads(nth, count - nth * kTokensPerStep);
#pragma unroll
  for (int k = 0; k < kBefore; ++k) tokens[k] = load_token<Element>(p, run, begin + k - kBefore, channel);
  const Filter<kWidth> filter(p, channel);
#pragma unroll 1
  for (int first = 0, nth = 0; first < count; first += kTokensPerStep, nth = nth + 1 == kStages ? 0 : nth + 1) {
    x.wait_and_read(nth, tokens + kBefore);
#pragma unroll
    for (int i = 0; i < kTokensPerStep; ++i) {
      if (first + i < count) store_eight(y, kAligned, filter.convolve(tokens, i, p.silu));
      y += p.y_stride;
    }
    x.issue_loads(nth, count - first - kStages * kTokensPerStep);  // overwrites the stage that has been computed
#pragma unroll
    for (int k = 0; k < kBefore; ++k) tokens[k] = tokens[kTokensPerStep + k];
  }
}

// A thread loads its channels before it stores them, as the halo after a run may overwrite the one before it.
template <class Element>
__global__ void __launch_bounds__(kConv1dThreads) halo_kernel(const __grid_constant__ Conv1dParams p) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kConv1dThreads + threadIdx.x) * kChannels;
  const Conv1dRunEntry& run = p.runs[blockIdx.x];
  if (channel >= p.channels || run.after == nullptr) return;
  Eight<Element> tokens[kMaxWidth - 1];
#pragma unroll
  for (int k = 0; k < kMaxWidth - 1; ++k) {
    if (k < p.width - 1) tokens[k] = load_token<Element>(p, run, run.tokens - (p.width - 1) + k, channel);
  }
#pragma unroll
  for (int k = 0; k < kMaxWidth - 1; ++k) {
    if (k < p.width - 1) {
      store_eight(static_cast<Element*>(run.after) + k * p.channels + channel, p.aligned, tokens[k]);
    }
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kConv1dThreads)
    update_kernel(const __grid_constant__ Conv1dParams p, const Conv1dStep step) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kConv1dThreads + threadIdx.x) * kChannels;
  if (channel >= p.channels) return;
  const std::int64_t sequence = blockIdx.x;
  const std::int64_t slot = step.slots == nullptr ? sequence : step.slots[sequence];
  Element* const y = static_cast<Element*>(p.y) + sequence * p.y_stride + channel;
  if (slot < 0) return store_eight(y, p.aligned, zeros<Element>());
  Element* const halo = static_cast<Element*>(step.halos) + slot * (kWidth - 1) * p.channels + channel;
  Eight<Element> tokens[kWidth];
#pragma unroll
  for (int k = 0; k + 1 < kWidth; ++k) tokens[k] = load_eight<Element>(halo + k * p.channels, p.aligned);
  tokens[kWidth - 1] = load_eight(static_cast<const Element*>(p.x) + sequence * p.x_stride + channel, p.aligned);
#pragma unroll
  for (int k = 0; k + 1 < kWidth; ++k) store_eight(halo + k * p.channels, p.aligned, tokens[k + 1]);
  const Filter<kWidth> filter(p, channel);
  store_eight(y, p.aligned, filter.convolve(tokens, 0, p.silu));
}

dim3 grid_of(const Conv1dParams& p, std::int64_t rows) {
  constexpr std::int64_t kChannelsOfCta = std::int64_t{kConv1dThreads} * kChannels;
  return {static_cast<unsigned>(rows), static_cast<unsigned>((p.channels + kChannelsOfCta - 1) / kChannelsOfCta)};
}

struct Kernels {
  void (*convolve)(Conv1dParams);
  void (*conv1d_unaligned)(Conv1dParams);
  void (*halo)(Conv1dParams);
  void (*update)(Conv1dParams, Conv1dStep);
};

template <class Element, int kWidth>
constexpr Kernels kernels_of_width() {
  return {conv1d_kernel<Element, kWidth, true>, conv1d_kernel<Element, kWidth, false>, halo_kernel<Element>,
          update_kernel<Element, kWidth>};
}
template <class Element>
Kernels kernels_of(int width) {
  if (width == 2) return kernels_of_width<Element, 2>();
  if (width == 3) return kernels_of_width<Element, 3>();
  return kernels_of_width<Element, kMaxWidth>();
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

}  // namespace

void load_conv1d(Dtype dtype, int width) {
  const Kernels kernels = kernels_of(dtype, width);
  load_kernel(kernels.convolve);
  load_kernel(kernels.conv1d_unaligned);
  load_kernel(kernels.halo);
  load_kernel(kernels.update);
}

void conv1d_runs(const Conv1dParams& params, Dtype dtype, cudaStream_t stream) {
  const Kernels kernels = kernels_of(dtype, params.width);
  const auto kernel = params.aligned ? kernels.convolve : kernels.conv1d_unaligned;
  kernel<<<grid_of(params, params.tiles), kConv1dThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "sm80_conv1d");
}

void store_halos(const Conv1dParams& params, Dtype dtype, cudaStream_t stream) {
  kernels_of(dtype, params.width).halo<<<grid_of(params, params.run_count), kConv1dThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "halos of sm80_conv1d");
}

void update_halos(const Conv1dParams& params, const Conv1dStep& step, Dtype dtype, cudaStream_t stream) {
  kernels_of(dtype, params.width).update<<<grid_of(params, step.sequences), kConv1dThreads, 0, stream>>>(params, step);
  check_cuda(cudaGetLastError(), "the update of sm80_conv1d");
}

}  // namespace ringattn::sm80
