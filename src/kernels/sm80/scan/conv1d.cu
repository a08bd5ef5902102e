// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/load_kernel.hpp"
#include "kernels/cuda/scan/ssm_device.cuh"
#include "kernels/sm80/scan/conv1d.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::from_float;
using cuda::load_kernel;
using cuda::to_float;

constexpr int kThreads = 128;
// Registers and shared memory are shared among so many.
template <class Element>
constexpr int kCtasOfMultiprocessor = sizeof(Element) > 2 ? 4 : 5;
constexpr int kChannels = 8;  // of a thread
constexpr int kTogether = 4;  // tokens that are asked for, and computed, together
constexpr int kAhead = 2;     // so often are some on their way, while others are computed

// Eight neighbouring channels of one token, as they are in memory.
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

// Weights and bias of a thread's channels.
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

  // A row of y, of kWidth tokens from `first` on.
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
  // Lanes read lines of their own, so few wide loads matter.
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

// Token `token` of a run, which may be in its halo, or a zero in front of the sequence.
template <class Element>
__device__ __forceinline__ Eight<Element> token_of(const Conv1dParams& p, const Conv1dRunEntry& run, std::int64_t token,
                                                   std::int64_t channel) {
  if (token >= 0) {
    return load_eight(static_cast<const Element*>(p.x) + (run.row + token) * p.x_stride + channel, p.aligned);
  }
  if (run.before == nullptr) return zeros<Element>();
  return load_eight(static_cast<const Element*>(run.before) + (token + p.width - 1) * p.channels + channel, p.aligned);
}

// Tokens of a thread's channels that are on their way from memory, in places of shared memory that are the thread's
// own: it takes no registers to ask for many, and nobody waits for another thread.
template <class Element, bool kAligned>
class Arriving {
 public:
  static constexpr int kPieces = sizeof(Eight<Element>) / 16;
  static constexpr int kPlaces = kAhead * kTogether;
  using Places = uint4[kPlaces][kPieces][kThreads];

  __device__ __forceinline__ Arriving(Places& places, const Element* from, std::int64_t stride)
      : mine_(cuda::shared_address(&places[0][0][threadIdx.x])), from_(from), stride_(stride) {}

  // Asks for kTogether tokens more, of which `present` are there, in the nth of kAhead parts of the places.
  __device__ __forceinline__ void ask(int nth, int present) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i, from_ += stride_) {
#pragma unroll
      for (int piece = 0; piece < kPieces && i < present; ++piece) {
        cuda::copy_chunk(at(nth, i, piece), reinterpret_cast<const char*>(from_) + 16 * piece, true, kAligned);
      }
    }
    cuda::copy_commit();
  }
  // Those that were asked for first have arrived.
  __device__ __forceinline__ void take(int nth, Eight<Element>* tokens) const {
    cuda::copy_wait<kAhead - 1>();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        reinterpret_cast<uint4*>(&tokens[i])[piece] = cuda::load_shared_16(at(nth, i, piece));
      }
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t at(int nth, int token, int piece) const {
    return mine_ + static_cast<std::uint32_t>(((nth * kTogether + token) * kPieces + piece) * kThreads * 16);
  }

  std::uint32_t mine_;
  const Element* from_;
  std::int64_t stride_;
};

template <class Element, int kWidth, bool kAligned>
__global__ void __launch_bounds__(kThreads, kCtasOfMultiprocessor<Element>)
    conv1d_kernel(const __grid_constant__ Conv1dParams p) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kChannels;
  if (channel >= p.channels) return;
  int nth = 0;
  while (nth + 1 < p.run_count && p.runs[nth + 1].first_piece <= blockIdx.x) ++nth;
  const Conv1dRunEntry& run = p.runs[nth];
  const std::int64_t begin = (blockIdx.x - run.first_piece) * kPieceTokens;
  const std::int64_t left = run.tokens - begin;
  const int count = static_cast<int>(left < kPieceTokens ? left : kPieceTokens);
  // The tokens in front of the next ones, and those.
  constexpr int kBefore = kWidth - 1;
  Eight<Element> tokens[kBefore + kTogether];
  Element* y = static_cast<Element*>(p.y) + (run.row + begin) * p.y_stride + channel;
  using X = Arriving<Element, kAligned>;
  __shared__ typename X::Places places;
  X x(places, static_cast<const Element*>(p.x) + (run.row + begin) * p.x_stride + channel, p.x_stride);
#pragma unroll
  for (int nth = 0; nth < kAhead; ++nth) x.ask(nth, count - nth * kTogether);
#pragma unroll
  for (int k = 0; k < kBefore; ++k) tokens[k] = token_of<Element>(p, run, begin + k - kBefore, channel);
  const Filter<kWidth> filter(p, channel);
#pragma unroll 1
  for (int first = 0, nth = 0; first < count; first += kTogether, nth = nth + 1 == kAhead ? 0 : nth + 1) {
    x.take(nth, tokens + kBefore);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i < count) store_eight(y, kAligned, filter.convolve(tokens, i, p.silu));
      y += p.y_stride;
    }
    x.ask(nth, count - first - kAhead * kTogether);  // to where those lay that are computed
#pragma unroll
    for (int k = 0; k < kBefore; ++k) tokens[k] = tokens[kTogether + k];
  }
}

// A thread reads its channels' tokens before it writes them: the halo behind a run may lie where the one in front does.
template <class Element>
__global__ void __launch_bounds__(kThreads) halo_kernel(const __grid_constant__ Conv1dParams p) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kChannels;
  const Conv1dRunEntry& run = p.runs[blockIdx.x];
  if (channel >= p.channels || run.behind == nullptr) return;
  Eight<Element> tokens[kMaxWidth - 1];
#pragma unroll
  for (int k = 0; k < kMaxWidth - 1; ++k) {
    if (k < p.width - 1) tokens[k] = token_of<Element>(p, run, run.tokens - (p.width - 1) + k, channel);
  }
#pragma unroll
  for (int k = 0; k < kMaxWidth - 1; ++k) {
    if (k < p.width - 1) {
      store_eight(static_cast<Element*>(run.behind) + k * p.channels + channel, p.aligned, tokens[k]);
    }
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Conv1dParams p, const Conv1dStep step) {
  const std::int64_t channel = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kChannels;
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
  constexpr std::int64_t kChannelsOfCta = std::int64_t{kThreads} * kChannels;
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
  kernel<<<grid_of(params, params.pieces), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "sm80_conv1d");
}

void keep_halos(const Conv1dParams& params, Dtype dtype, cudaStream_t stream) {
  kernels_of(dtype, params.width).halo<<<grid_of(params, params.run_count), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "halos of sm80_conv1d");
}

void update_halos(const Conv1dParams& params, const Conv1dStep& step, Dtype dtype, cudaStream_t stream) {
  kernels_of(dtype, params.width).update<<<grid_of(params, step.sequences), kThreads, 0, stream>>>(params, step);
  check_cuda(cudaGetLastError(), "the update of sm80_conv1d");
}

}  // namespace ringattn::sm80
