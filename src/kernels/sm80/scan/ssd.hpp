// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm80_scan. They enqueue, and throw what a launch fails with.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "base/dtype.hpp"
#include "kernels/sm80/scan/scan_params.hpp"

namespace ringattn::sm80 {

// dt and sums of logarithms of all tokens (ScanParams::steps), and the logarithms of segments.
void make_steps(const ScanParams& params, Dtype dtype, cudaStream_t stream);

// How a CTA computes: so many heads of one group side by side, each by so many warps of 16 of its dims. Doesn't touch
// bits.
struct SsdShape {
  std::int32_t heads = 1;
  std::int32_t warps = 1;
  std::int32_t stages = 1;  // of chunks in shared memory
};

struct SsdParams {
  ScanParams scan;
  SsdShape shape;
  std::int32_t blocks = 0;  // of heads; CTAs of one segment follow each other, and find B and C in the cache
};

// The kernels of one element type, and states of up to `state_dim`.
struct SsdLauncher {
  void (*fold)(const ScanParams& params, int device, cudaStream_t stream);
  void (*finish)(const ScanParams& params, int device, cudaStream_t stream);
  // Bytes of shared memory that a CTA needs at least.
  std::size_t (*least_shared)(int head_dim);
};

extern const SsdLauncher ssd_bf16_16;
extern const SsdLauncher ssd_bf16_64;
extern const SsdLauncher ssd_bf16_128;
extern const SsdLauncher ssd_bf16_256;
extern const SsdLauncher ssd_fp16_16;
extern const SsdLauncher ssd_fp16_64;
extern const SsdLauncher ssd_fp16_128;
extern const SsdLauncher ssd_fp16_256;

}  // namespace ringattn::sm80
