// SPDX-License-Identifier: Apache-2.0
// The scan with a decay for each state of each channel, token by token in fp32. A lane has up to 16 states of two
// neighbouring channels in registers, so that what it reads of B and C serves twice; channels with more are spread over
// neighbouring lanes, whose parts of y are added in a fixed order. The channels of a CTA belong to one group, and B and
// C of some tokens lie in shared memory for all of them.
//
// An exponential for each token, channel and state is what this takes longest for: 16 a cycle of a multiprocessor.
#include "base/cuda.hpp"
#include "kernels/cuda/scan/head_blocks.cuh"
#include "kernels/cuda/scan/load_kernel.hpp"
#include "kernels/cuda/scan/scan_device.cuh"
#include "kernels/sm80/scan/selective.hpp"

namespace ringattn::sm80 {

namespace {

using cuda::element_at;
using cuda::from_float;
using cuda::HeadBlock;
using cuda::ScanTensor;
using cuda::SegmentPlace;
using cuda::to_float;

constexpr int kThreads = 64;
constexpr int kCtasOfMultiprocessor = 8;
constexpr int kPair = 2;  // channels of a lane
constexpr int kStatesLog = 4;
constexpr int kStates = 1 << kStatesLog;  // of a lane and channel
constexpr int kTileFloats = 2048;         // of B, and as many of C, in shared memory
constexpr int kMostTileTokens = 64;
constexpr int kAhead = 2;  // tokens that are loaded together, while those before them are computed

struct SelectiveParams {
  ScanParams scan;
  std::int32_t lanes;        // of a pair of channels
  std::int32_t columns_log;  // of lanes * kStates, the columns of a tile
  std::int32_t blocks;       // of channels; CTAs of one segment follow each other
  bool paired;               // a pair of channels lies in one word of x, dt, z and y
};
static_assert(sizeof(SelectiveParams) <= 4096);

// B or C of some tokens as fp32, [tokens, columns]; columns that the scan lacks are 0. There are 2^columns_log columns.
template <class Element>
__device__ __forceinline__ void load_tile(const ScanTensor& tensor, std::int64_t row, int tokens, int group,
                                          int state_dim, int columns_log, float* tile) {
  const Element* const source = element_at<Element>(tensor, row, group);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < tokens << columns_log; i += kThreads) {
    const int column = i & ((1 << columns_log) - 1);
    tile[i] = column < state_dim ? to_float(source[(i >> columns_log) * tensor.token_stride + column]) : 0.0F;
  }
}

// Two neighbouring channels of a token, as they are in memory.
template <class Element>
struct alignas(kPair * sizeof(Element)) Pair {
  Element v[kPair];
};

// A pair of channels of one tensor, from a token on.
template <class Element>
struct PairColumn {
  const Element* at;
  std::int64_t token_stride;
  std::int64_t head_stride;

  __device__ __forceinline__ PairColumn(const ScanTensor& tensor, std::int64_t row, int channel)
      : at(element_at<Element>(tensor, row, channel)),
        token_stride(tensor.token_stride),
        head_stride(tensor.head_stride) {}

  // The next kAhead tokens, of which so many are there; the others become zeros.
  __device__ __forceinline__ void load(Pair<Element> (&to)[kAhead], int tokens, bool paired) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= tokens) {
        to[i].v[0] = to[i].v[1] = from_float<Element>(0.0F);
      } else if (paired) {
        to[i] = *reinterpret_cast<const Pair<Element>*>(at);
      } else {
        to[i].v[0] = at[0];
        to[i].v[1] = at[head_stride];
      }
      at += token_stride;
    }
  }
};

// What is given of some tokens.
template <class Element, bool kOutputs>
struct Given {
  Pair<Element> x[kAhead];
  Pair<Element> dt[kAhead];
  Pair<Element> z[kOutputs ? kAhead : 1];
};

// The states of a lane.
template <class Element, bool kOutputs>
class PairOfChannels {
 public:
  __device__ __forceinline__ PairOfChannels(const SelectiveParams& params, const SegmentPlace& place, int channel,
                                            int part)
      : params_(params), part_(part), of_segment_(place.index * params.scan.heads + channel) {
    const ScanParams& p = params.scan;
    const std::int64_t of_super = place.super_segment * p.heads + channel;
    const int first_state = part * kStates;
#pragma unroll
    for (int c = 0; c < kPair; ++c) {
      bias_[c] = cuda::dt_bias_of(p.dt_bias, channel + c);
      skip_[c] = kOutputs && p.d != nullptr ? p.d[channel + c] : 0.0F;
      const float log = kOutputs ? p.logs_before[of_segment_ + c] : 0.0F;
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        rates_[c][n] = 0.0F;  // states that the scan lacks stay 0
        state_[c][n] = 0.0F;
        if (first_state + n >= p.state_dim) continue;
        const auto at = [&](std::int64_t of) { return (of + c) * p.state_dim + first_state + n; };
        rates_[c][n] = __fmul_rn(p.a[at(channel)], cuda::kScanLog2E);
        if (!kOutputs) continue;
        const float decay = cuda::exp2_approx(__fmul_rn(rates_[c][n], log));
        state_[c][n] = __fmaf_rn(decay, p.super_states[at(of_super)], p.states[at(of_segment_)]);
      }
    }
  }

  // Token i of those given. b and c are its rows in shared memory, from the lane's first state on.
  __device__ __forceinline__ void step(const Given<Element, kOutputs>& given, int i, const float* b_row,
                                       const float* c_row, Element* y_at, bool present) {
    const ScanParams& p = params_.scan;
    float x[kPair];
    float dt[kPair];
    float input[kPair];
    float y[kPair] = {};
#pragma unroll
    for (int c = 0; c < kPair; ++c) {
      x[c] = to_float(given.x[i].v[c]);
      dt[c] = cuda::make_dt(to_float(given.dt[i].v[c]), bias_[c], p.softplus, p.dt_least, p.dt_most);
      input[c] = __fmul_rn(dt[c], x[c]);
      time_[c] = __fadd_rn(time_[c], dt[c]);
    }
#pragma unroll
    for (int first = 0; first < kStates; first += 4) {
      const float4 b_four = *reinterpret_cast<const float4*>(b_row + first);
      const float b[4] = {b_four.x, b_four.y, b_four.z, b_four.w};
      float4 c_four{};
      if constexpr (kOutputs) c_four = *reinterpret_cast<const float4*>(c_row + first);
      const float of_c[4] = {c_four.x, c_four.y, c_four.z, c_four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int c = 0; c < kPair; ++c) {
          float& state = state_[c][first + n];
          const float decay = cuda::exp2_approx(__fmul_rn(dt[c], rates_[c][first + n]));
          state = __fmaf_rn(decay, state, __fmul_rn(input[c], b[n]));
          if constexpr (kOutputs) y[c] = __fmaf_rn(of_c[n], state, y[c]);
        }
      }
    }
    if constexpr (kOutputs) {
      for (int other = params_.lanes / 2; other > 0; other /= 2) {
#pragma unroll
        for (int c = 0; c < kPair; ++c) y[c] = __fadd_rn(y[c], __shfl_xor_sync(0xffffffffU, y[c], other));
      }
      Pair<Element> rounded;
#pragma unroll
      for (int c = 0; c < kPair; ++c) {
        if (p.d != nullptr) y[c] = __fmaf_rn(skip_[c], x[c], y[c]);
        if (p.z.data != nullptr) y[c] = __fmul_rn(y[c], cuda::silu(to_float(given.z[i].v[c])));
        rounded.v[c] = from_float<Element>(y[c]);
      }
      if (!present || part_ != 0) return;
      if (params_.paired) {
        *reinterpret_cast<Pair<Element>*>(y_at) = rounded;
      } else {
        y_at[0] = rounded.v[0];
        y_at[p.y_head_stride] = rounded.v[1];
      }
    }
  }

  // The local state of the segment, and its sum of dt.
  __device__ __forceinline__ void keep() const {
    const ScanParams& p = params_.scan;
#pragma unroll
    for (int c = 0; c < kPair; ++c) {
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        const int state = part_ * kStates + n;
        if (state < p.state_dim) p.states[(of_segment_ + c) * p.state_dim + state] = state_[c][n];
      }
      if (part_ == 0) p.logs[of_segment_ + c] = time_[c];
    }
  }

 private:
  const SelectiveParams& params_;
  int part_;
  std::int64_t of_segment_;
  float rates_[kPair][kStates];
  float state_[kPair][kStates];
  float bias_[kPair];
  float skip_[kPair];
  float time_[kPair] = {};  // the sum of dt
};

// The channels of a CTA: pairs, because groups and ranges of channels are multiples of eight.
__host__ __device__ constexpr int channels_together(int lanes) { return kThreads / lanes * kPair; }
__device__ HeadBlock channels_of(const SelectiveParams& params, int nth) {
  return cuda::head_block(params.scan, channels_together(params.lanes), nth);
}

template <class Element, bool kOutputs>
__global__ void __launch_bounds__(kThreads, kCtasOfMultiprocessor)
    selective_kernel(const __grid_constant__ SelectiveParams params) {
  __shared__ __align__(16) float b_tile[kTileFloats];
  __shared__ __align__(16) float c_tile[kOutputs ? kTileFloats : 4];
  const ScanParams& p = params.scan;
  const SegmentPlace place = cuda::segment_place(p, static_cast<int>(blockIdx.x) / params.blocks);
  const HeadBlock block = channels_of(params, static_cast<int>(blockIdx.x) % params.blocks);
  const int in_block = static_cast<int>(threadIdx.x) / params.lanes * kPair;
  const bool present = in_block < block.count;
  const int channel = block.first + (present ? in_block : 0);
  const int part = static_cast<int>(threadIdx.x) % params.lanes;
  const int columns = params.lanes * kStates;
  const int tile_tokens = kTileFloats / columns < kMostTileTokens ? kTileFloats / columns : kMostTileTokens;
  PairOfChannels<Element, kOutputs> channels(params, place, channel, part);

  PairColumn<Element> x(p.x, place.row, channel);
  PairColumn<Element> dt(p.dt, place.row, channel);
  const bool gated = kOutputs && p.z.data != nullptr && part == 0;
  PairColumn<Element> z(gated ? p.z : p.x, place.row, channel);
  Element* y = nullptr;
  if (kOutputs) y = static_cast<Element*>(p.y) + place.row * p.y_token_stride + channel * p.y_head_stride;
  Given<Element, kOutputs> next;
  const auto load = [&](int token) {
    const int tokens = place.tokens - token;
    x.load(next.x, tokens, params.paired);
    dt.load(next.dt, tokens, params.paired);
    if constexpr (kOutputs) z.load(next.z, gated ? tokens : 0, params.paired);
  };
  load(0);
  for (int tile = 0; tile < place.tokens; tile += tile_tokens) {
    const int left = place.tokens - tile;
    const int tokens = left < tile_tokens ? left : tile_tokens;
    const std::int64_t row = place.row + tile;
    __syncthreads();  // nobody reads the tile before any more
    load_tile<Element>(p.b, row, tokens, block.group, p.state_dim, params.columns_log, b_tile);
    if (kOutputs) load_tile<Element>(p.c, row, tokens, block.group, p.state_dim, params.columns_log, c_tile);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < tokens; first += kAhead) {
      const Given<Element, kOutputs> given = next;
      load(tile + first + kAhead);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= tokens) break;
        const int at = (first + i) * columns + part * kStates;
        channels.step(given, i, b_tile + at, c_tile + (kOutputs ? at : 0), y, present);
        if (kOutputs) y += p.y_token_stride;
      }
    }
  }
  if (!kOutputs && present) channels.keep();
}

using Selective = void(SelectiveParams);

template <bool kOutputs>
Selective* kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return selective_kernel<float, kOutputs>;
    case Dtype::kBf16:
      return selective_kernel<__nv_bfloat16, kOutputs>;
    default:
      return selective_kernel<__half, kOutputs>;
  }
}

// Whether channels 2 i and 2 i + 1 of each token are the halves of an aligned word.
bool pairs_in_words(const ScanTensor& tensor, std::size_t element_bytes) {
  const auto pair = static_cast<std::uint64_t>(kPair * element_bytes);
  const auto token_bytes = static_cast<std::uint64_t>(tensor.token_stride) * element_bytes;
  return tensor.head_stride == 1 && (reinterpret_cast<std::uint64_t>(tensor.data) | token_bytes) % pair == 0;
}

void launch(Selective* kernel, const ScanParams& scan, std::size_t bytes, cudaStream_t stream) {
  SelectiveParams params{scan, 1, kStatesLog, 0, false};
  for (; params.lanes * kStates < scan.state_dim; params.lanes *= 2) ++params.columns_log;
  params.blocks = cuda::head_blocks(scan, channels_together(params.lanes));
  params.paired = pairs_in_words(scan.x, bytes) && pairs_in_words(scan.dt, bytes) &&
                  (scan.z.data == nullptr || pairs_in_words(scan.z, bytes)) &&
                  pairs_in_words({scan.y, scan.y_token_stride, scan.y_head_stride, false}, bytes);
  const auto ctas = static_cast<unsigned>(params.blocks) * static_cast<unsigned>(scan.segments);
  kernel<<<ctas, kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "sm80_selective");
}

}  // namespace

void load_selective(Dtype dtype) {
  cuda::load_kernel(kernel_of<false>(dtype));
  cuda::load_kernel(kernel_of<true>(dtype));
}

void selective_fold(const ScanParams& params, Dtype dtype, cudaStream_t stream) {
  launch(kernel_of<false>(dtype), params, size_of(dtype), stream);
}
void selective_finish(const ScanParams& params, Dtype dtype, cudaStream_t stream) {
  launch(kernel_of<true>(dtype), params, size_of(dtype), stream);
}

}  // namespace ringattn::sm80
