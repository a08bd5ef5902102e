// SPDX-License-Identifier: Apache-2.0
// The SSM kernels `sm80_ssd` and `sm80_selective_scan`: registry entries, launch parameters and compiled kernels.
// `sm80_ssd` has one decay per head (Mamba-2). It uses tensor cores within chunks and keeps states in registers;
// ssd.cuh says what is rounded. `sm80_selective_scan` has one decay per state of each channel (Mamba-1), and goes token
// by token in fp32.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::sm80 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing. Includes too little shared memory on
// a visible GPU.
std::vector<std::string> ssd_missing(const SsmSpec& spec);
std::vector<std::string> selective_scan_missing(const SsmSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend);
std::unique_ptr<SsmKernel> make_selective_scan(const SsmSpec& spec, Backend& backend);

// The compiled kernels of sm80_ssd (kernels/instances.cmake), launched by sm80_ssd.cpp. Functions enqueue and throw if
// a launch fails.

using cuda::kChunk;
using cuda::kChunkDaCumsumFloats;
using cuda::kChunksOfSegment;
using cuda::SsmParams;
using cuda::SsmTensor;

// Work of a CTA: `heads` heads of one group, each with `warps` warps of 16 dims. Does not affect bits.
struct SsdShape {
  std::int32_t heads = 1;
  std::int32_t warps = 1;
  std::int32_t stages = 1;  // pipeline stages of a chunk each
};

inline constexpr int kElementBytes = 2;
inline constexpr int kVectorElements = 8;  // elements of a 16-byte vector
inline constexpr int kWarpDims = 16;       // dims of a head per warp
inline constexpr int kMaxWarps = 8;        // per head
inline constexpr int kMaxHeadsPerCta = 4;

// Rows of a tile are an odd number of 16-byte vectors apart, so that eight rows are in different banks.
constexpr int pitch_of(int columns) { return (columns + kVectorElements) * kElementBytes; }
inline constexpr int kScorePitch = kChunk + 4;             // floats
inline constexpr int kIntraChunkPitch = pitch_of(kChunk);  // bytes

// Shared-memory layout of a CTA: offsets in bytes.
struct SsdLayout {
  std::int32_t b, c, x, da_cumsum, decays, scores, intra_chunk_scores, total;
  std::int32_t x_pitch;
};
constexpr SsdLayout layout_of(const SsdShape& shape, int state_columns, bool with_outputs) {
  const int tile = kChunk * pitch_of(state_columns);
  const int heads = shape.heads;
  int next = 0;
  const auto allocate = [&next](int bytes) {
    const int at = next;
    next += bytes;
    return at;
  };
  SsdLayout at{};
  at.x_pitch = pitch_of(shape.warps * kWarpDims);
  at.b = allocate(shape.stages * tile);
  at.c = allocate(with_outputs ? shape.stages * tile : 0);
  at.x = allocate(shape.stages * heads * kChunk * at.x_pitch);
  at.da_cumsum = allocate(shape.stages * heads * kChunkDaCumsumFloats * 4);
  // Per head: exp2(dA_cumsum), then the scales of x in the state after the chunk.
  at.decays = allocate(heads * 2 * kChunk * 4);
  at.scores = allocate(with_outputs ? kChunk * kScorePitch * 4 : 0);
  at.intra_chunk_scores = allocate(with_outputs ? heads * 2 * kChunk * kIntraChunkPitch : 0);  // hi, then lo
  at.total = next;
  return at;
}

struct SsdParams {
  SsmParams scan;
  SsdShape shape;
  SsdLayout layout;         // computed on the host and read from constant memory, to save registers
  std::int32_t blocks = 0;  // head blocks; CTAs of one segment have consecutive indices, so B and C hit in L2
};

// The kernels of one element type, for state_dim up to that of the name.
struct SsdLauncher {
  void (*load)();  // loads both kernels onto the current device
  void (*accumulate_states)(const SsmParams& params, int device, cudaStream_t stream);
  void (*finish)(const SsmParams& params, int device, cudaStream_t stream);
  // Min. shared memory of a CTA, in bytes.
  std::size_t (*min_shared)(int head_dim);
};

extern const SsdLauncher ssd_bf16_16;
extern const SsdLauncher ssd_bf16_64;
extern const SsdLauncher ssd_bf16_128;
extern const SsdLauncher ssd_bf16_256;
extern const SsdLauncher ssd_fp16_16;
extern const SsdLauncher ssd_fp16_64;
extern const SsdLauncher ssd_fp16_128;
extern const SsdLauncher ssd_fp16_256;

// The kernels of sm80_selective_scan, launched by sm80_ssd.cpp. Functions enqueue and throw if a launch fails.

// Loads both kernels onto the current device (load_kernel.hpp).
void load_selective_scan(Dtype dtype);
// Computes local states of segments, and their sums of dt.
void selective_scan_states(const SsmParams& params, Dtype dtype, cudaStream_t stream);
// Computes y.
void selective_scan_outputs(const SsmParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace ringattn::sm80
