// SPDX-License-Identifier: Apache-2.0
// The causal conv1d kernel `sm80_conv1d`: its registry entry, launch parameters and launches. fp32 arithmetic, eight
// channels per thread, tokens of a tile in order. Reads x and writes y once, and reads width − 1 tokens before each
// tile again.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "base/dtype.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn::sm80 {

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<CausalConv1dKernel> make_conv1d(const CausalConv1dSpec& spec, Backend& backend);

// The kernels of sm80_conv1d, launched by sm80_conv1d.cpp. Functions enqueue and throw if a launch fails.

inline constexpr int kMaxWidth = 4;
inline constexpr int kConv1dRunsPerLaunch = 64;  // passed as kernel arguments

struct Conv1dRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t first_tile;   // index of its first token tile in the launch
  const void* initial_halo;  // [width - 1, channels], the halo before the run, or null; `after` likewise
  void* after;
};

struct Conv1dParams {
  Conv1dRunEntry runs[kConv1dRunsPerLaunch];
  std::int32_t run_count;
  std::int32_t width;
  std::int64_t channels;
  std::int64_t tiles;  // token tiles of all runs in the launch
  const void* x;
  void* y;
  std::int64_t x_stride, y_stride;  // between tokens, in elements
  const float* weight;
  const float* bias;  // or null
  bool silu;
  bool aligned;         // eight channels of x, y and halos are aligned to 16 bytes
  bool filter_aligned;  // weight and bias are aligned to 16 bytes
};
static_assert(sizeof(Conv1dParams) <= 4000, "kernel arguments are at most 4 KiB");

// Tokens per thread. The last tile of a run may have fewer.
inline constexpr int kTileTokens = 64;

// Loads all kernels of this dtype and width onto the current device (load_kernel.hpp).
void load_conv1d(Dtype dtype, int width);

void conv1d_runs(const Conv1dParams& params, Dtype dtype, cudaStream_t stream);
// Stores the halos after runs. They may overwrite those before runs, so conv1d_runs() of all runs must be enqueued
// first.
void store_halos(const Conv1dParams& params, Dtype dtype, cudaStream_t stream);

// Decode step: one token per sequence. x and y are [sequences, channels]. The sequences' halos are updated in place.
struct Conv1dStep {
  std::int64_t sequences;
  void* halos;
  const std::int32_t* slots;  // as UpdateParams::slots
};
void update_halos(const Conv1dParams& params, const Conv1dStep& step, Dtype dtype, cudaStream_t stream);

// The kernels of gradients (conv1d_gradient.cu). A CTA computes a unit of tokens (common/token_units.hpp) of 64
// channels: a warp has a tile of kConv1dGradientTile tokens, a lane two channels.

inline constexpr int kConv1dGradientRunsPerLaunch = 32;  // passed as kernel arguments

struct Conv1dGradientRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t next_tokens;
  std::int64_t first_unit;   // index of its first unit in the launch
  const void* initial_halo;  // this and what follows as in CausalConv1dGradientRun
  const void* next_x;
  const void* next_dy;
  const void* dfinal_halo;
  void* dinitial_halo;
};

struct Conv1dGradientParams {
  Conv1dGradientRunEntry runs[kConv1dGradientRunsPerLaunch];
  std::int32_t run_count;
  std::int32_t width;
  std::int64_t channels;
  std::int64_t units;  // of all runs in the launch
  const void* x;
  const void* dy;
  void* dx;
  std::int64_t x_stride, dy_stride, dx_stride;  // between tokens, in elements
  const float* weight;
  const float* bias;  // or null
  float* sums;        // [units, width + 1, channels] of the launch
  bool silu;
  bool aligned;  // two channels of all rows and halos are aligned to their size
};
static_assert(sizeof(Conv1dGradientParams) <= 4000, "kernel arguments are at most 4 KiB");

void load_conv1d_gradient(Dtype dtype, int width);
void conv1d_gradient_runs(const Conv1dGradientParams& params, Dtype dtype, cudaStream_t stream);
// Gradients of initial halos; of the same runs, in any order.
void conv1d_halo_gradients(const Conv1dGradientParams& params, Dtype dtype, cudaStream_t stream);
void conv1d_sum_units(const CausalConv1dUnitSum& sum, int width, cudaStream_t stream);

}  // namespace ringattn::sm80
