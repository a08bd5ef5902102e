// SPDX-License-Identifier: Apache-2.0
// The compiled kernels of sm80_ssd. They enqueue, and throw what a launch fails with.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "base/dtype.hpp"
#include "kernels/cuda/scan/ssm_params.hpp"

namespace ringattn::sm80 {

using cuda::kChunk;
using cuda::kChunkDaCumsumFloats;
using cuda::kChunksOfSegment;
using cuda::SsmParams;
using cuda::SsmTensor;

// How a CTA computes: so many heads of one group side by side, each by so many warps of 16 of its dims. Doesn't touch
// bits.
struct SsdShape {
  std::int32_t heads = 1;
  std::int32_t warps = 1;
  std::int32_t stages = 1;  // of chunks in shared memory
};

inline constexpr int kElementBytes = 2;
inline constexpr int kPieceElements = 8;  // 16 bytes
inline constexpr int kWarpDims = 16;      // of a head, that a warp has
inline constexpr int kMaxWarps = 8;       // of a head
inline constexpr int kMaxHeadsTogether = 4;

// Rows of a tile lie an odd number of 16 bytes apart: eight of them are in different banks.
constexpr int pitch_of(int columns) { return (columns + kPieceElements) * kElementBytes; }
inline constexpr int kScorePitch = kChunk + 4;             // floats
inline constexpr int kIntraChunkPitch = pitch_of(kChunk);  // bytes

// Where everything lies in a CTA's shared memory, in bytes.
struct SsdLayout {
  std::int32_t b, c, x, da_cumsum, factors, scores, intra_chunk_scores, total;
  std::int32_t x_pitch;
};
constexpr SsdLayout layout_of(const SsdShape& shape, int state_columns, bool with_outputs) {
  const int tile = kChunk * pitch_of(state_columns);
  const int heads = shape.heads;
  int next = 0;
  const auto take = [&next](int bytes) {
    const int at = next;
    next += bytes;
    return at;
  };
  SsdLayout at{};
  at.x_pitch = pitch_of(shape.warps * kWarpDims);
  at.b = take(shape.stages * tile);
  at.c = take(with_outputs ? shape.stages * tile : 0);
  at.x = take(shape.stages * heads * kChunk * at.x_pitch);
  at.da_cumsum = take(shape.stages * heads * kChunkDaCumsumFloats * 4);
  at.factors = take(heads * 2 * kChunk * 4);  // decays up to each token, then those behind it times dt
  at.scores = take(with_outputs ? kChunk * kScorePitch * 4 : 0);
  at.intra_chunk_scores = take(with_outputs ? heads * 2 * kChunk * kIntraChunkPitch : 0);  // hi, then lo
  at.total = next;
  return at;
}

struct SsdParams {
  SsmParams scan;
  SsdShape shape;
  SsdLayout layout;         // on the host and in constant memory, so that it takes no registers
  std::int32_t blocks = 0;  // of heads; CTAs of one segment follow each other, and find B and C in the cache
};

// The kernels of one element type, and states of up to `state_dim`.
struct SsdLauncher {
  void (*load)();  // both, onto the current device
  void (*accumulate_states)(const SsmParams& params, int device, cudaStream_t stream);
  void (*finish)(const SsmParams& params, int device, cudaStream_t stream);
  // Bytes of shared memory that a CTA needs at least.
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

}  // namespace ringattn::sm80
