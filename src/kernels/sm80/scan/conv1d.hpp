// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_conv1d. They enqueue, and throw what the launch fails with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::sm80 {

inline constexpr int kMaxWidth = 4;
inline constexpr int kConv1dRunsPerLaunch = 64;  // travel as kernel arguments

struct Conv1dRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t first_piece;  // of the launch's pieces
  const void* before;        // or null, as is the one behind
  void* behind;
};

struct Conv1dParams {
  Conv1dRunEntry runs[kConv1dRunsPerLaunch];
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
static_assert(sizeof(Conv1dParams) <= 4000, "kernel arguments are at most 4 KiB");

// Tokens of a run that a thread computes: pieces of a run have so many, the last one maybe fewer.
inline constexpr int kPieceTokens = 64;

// Loads all of them onto the current device (load_kernel.hpp).
void load_conv1d(Dtype dtype, int width);

void conv1d_runs(const Conv1dParams& params, Dtype dtype, cudaStream_t stream);
// The halos behind runs. May write where those in front of them lie, so it follows conv1d_runs() of all runs.
void keep_halos(const Conv1dParams& params, Dtype dtype, cudaStream_t stream);

// One token of each sequence: x and y are [sequences, channels], and so many halos are updated in place.
struct Conv1dStep {
  std::int64_t sequences;
  void* halos;
  const std::int32_t* slots;  // as of UpdateParams
};
void update_halos(const Conv1dParams& params, const Conv1dStep& step, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
