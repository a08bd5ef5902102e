// SPDX-License-Identifier: Apache-2.0
// What the scans' kernels are told, on the host and on the device. The runs of a task travel as kernel arguments, some
// of them a launch, so that nothing is uploaded and nothing waited for.
#pragma once

#include <cstdint>

#include "kernels/cuda/divider.hpp"
#include "kernels/ssm.hpp"

namespace ringattn::cuda {

inline constexpr int kSsmRunsPerLaunch = 64;
inline constexpr int kSegmentsOfSuper = static_cast<int>(kSuperSegmentTokens / kSegmentTokens);
inline constexpr int kChunk = static_cast<int>(kChunkTokens);
inline constexpr int kChunksOfSegment = static_cast<int>(kSegmentTokens / kChunkTokens);
// What the kernel with one decay a head keeps of each token and head: the sum of logarithms, and dt. Of a chunk [2,
// 64].
inline constexpr int kDaCumsumFloats = 2;
inline constexpr int kChunkDaCumsumFloats = kDaCumsumFloats * kChunk;

struct SsmRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t segment;        // its first, of all segments of the task
  std::int64_t super_segment;  // its first, of all of the task
  const float* initial;
  float* final;
};

// A tensor of 16-bit or fp32 elements. Strides count elements.
struct SsmTensor {
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  bool aligned;  // rows of heads begin at multiples of 16 bytes
};

struct SsmParams {
  SsmRunEntry runs[kSsmRunsPerLaunch];
  std::int32_t run_count;
  std::int32_t segments;        // of these runs
  std::int32_t super_segments;  // of these runs

  std::int32_t heads, head_dim, state_dim;
  std::int32_t group_heads;  // that share a row of B and C
  std::int32_t first_head, head_count;
  bool softplus;
  float dt_min, dt_max;

  SsmTensor x, dt, b, c, z;  // z.data null: no gate
  void* y;
  std::int64_t y_token_stride, y_head_stride;
  bool y_aligned;
  const float* a;
  const float* d;  // or null, as is the bias
  const float* dt_bias;

  // The kernel's scratch memory.
  float* da_cumsum;  // [segments, heads, chunks, 2, 64]; null with state_decays
  // States that are zero for certain are not there: M of a super-segment's first segment, and T of a run's first
  // super-segment without an initial state. The local state of a super-segment of one segment stays that segment's.
  float* states;        // [segments, heads, head_dim, state_dim]: local states, then those in front of the segments (M)
  float* logs;          // [segments, heads]: of a segment's decay; with state_decays sums of dt, as are those below
  float* logs_before;   // [segments, heads]: of the segments between
  float* super_states;  // [super_segments, heads, head_dim, state_dim]: local states, then those in front of them (T)
  float* super_logs;    // [super_segments, heads]
};
static_assert(sizeof(SsmParams) <= 4000, "kernel arguments are at most 4 KiB");

inline constexpr int kUpdateWidth = 4;  // elements of a row of states, rates, B or C that a lane has side by side

// One token of each sequence.
struct UpdateParams {
  std::int64_t sequences;
  std::int32_t heads, head_dim, state_dim;
  Divider by_head_dim, by_group_heads;
  Divider by_blocks;  // CTAs of a sequence
  bool softplus;
  float dt_min, dt_max;
  SsmTensor x, dt, b, c, z;  // b and c: aligned to kUpdateWidth elements
  void* y;
  std::int64_t y_token_stride, y_head_stride;
  const float* a;
  const float* d;
  const float* dt_bias;
  float* states;
  const std::int32_t* slots;  // [sequences]; null: a sequence's own number. Below 0: none
  bool states_aligned;        // to 16 bytes
  bool rates_aligned;         // A, the same
};

}  // namespace ringattn::cuda
