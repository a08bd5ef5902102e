// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_convolution. They enqueue, and throw what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::sm80 {

inline constexpr int kMostWidth = 4;
inline constexpr int kConvolutionRunsOfLaunch = 64;  // travel as kernel arguments

struct ConvolutionRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t first_piece;  // of the launch's pieces
  const void* before;        // or null, as is the one behind
  void* behind;
};

struct ConvolutionParams {
  ConvolutionRunEntry runs[kConvolutionRunsOfLaunch];
  std::int32_t run_count;
  std::int32_t width;
  std::int64_t channels;
  std::int64_t pieces;  // of all runs of the launch
  const void* x;
  void* y;
  std::int64_t x_stride, y_stride;  // of tokens, in elements
  const float* weight;
  const float* bias;  // or null
  bool silu;
  bool aligned;         // eight channels of x, y and halos begin at multiples of 16 bytes
  bool filter_aligned;  // as do weights and bias
};
static_assert(sizeof(ConvolutionParams) <= 4000, "kernel arguments are at most 4 KiB");

// Tokens of a run that a thread computes: pieces of a run have so many, the last one maybe fewer.
inline constexpr int kPieceTokens = 64;

// Loads all of them onto the current device (load_kernel.hpp).
void load_convolution(Dtype dtype, int width);

void convolve_runs(const ConvolutionParams& params, Dtype dtype, cudaStream_t stream);
// The halos behind runs. May write where those in front of them lie, so it follows convolve_runs() of all runs.
void keep_halos(const ConvolutionParams& params, Dtype dtype, cudaStream_t stream);

// One token of each sequence: x and y are [sequences, channels], and so many halos are updated in place.
struct ConvolutionStep {
  std::int64_t sequences;
  void* halos;
  const std::int32_t* slots;  // as of UpdateParams
};
void update_halos(const ConvolutionParams& params, const ConvolutionStep& step, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
