// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of the SSM kernels. Runs are passed by value, kSsmRunsPerLaunch per launch, so no upload is needed
// and no call waits. After them come the launchers of the kernels that sm80 and sm90 share, and the partition of heads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/common/cuda/divider.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cuda {

inline constexpr int kSsmRunsPerLaunch = 64;
inline constexpr int kSegmentsOfSuper = static_cast<int>(kSuperSegmentTokens / kSegmentTokens);
inline constexpr int kChunk = static_cast<int>(kChunkTokens);
inline constexpr int kChunksOfSegment = static_cast<int>(kSegmentTokens / kChunkTokens);
// Per token and head: dA_cumsum (in log2 units) and dt. Per chunk [2, 64].
inline constexpr int kDaCumsumFloats = 2;
inline constexpr int kChunkDaCumsumFloats = kDaCumsumFloats * kChunk;

// The meaning of SsmParams::logs.
enum class SsmLogs : std::uint8_t {
  kHead,        // a head's decay
  kHeadTimesA,  // sums of dt of a head, to be multiplied by A of each state (state_decays)
  kState,       // the decay of each of a head's states (SsmDecay::kDim)
};

struct SsmRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t segment;        // index of its first segment in the task
  std::int64_t super_segment;  // index of its first super-segment in the task
  const float* initial;
  float* final;
};

// A tensor of 16-bit or fp32 elements. Strides count elements.
struct SsmTensor {
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  bool aligned;  // each row of each head is aligned to 16 bytes
};

struct SsmParams {
  SsmRunEntry runs[kSsmRunsPerLaunch];
  std::int32_t run_count;
  std::int32_t segments;        // in these runs
  std::int32_t super_segments;  // in these runs

  std::int32_t heads, head_dim, state_dim;
  std::int32_t group_heads;  // heads that share a row of B and C
  std::int32_t first_head, head_count;
  SsmDecay decay;
  float scale = 1.0F;  // of y
  bool softplus;
  float dt_min, dt_max;

  SsmTensor x, dt, b, c, z;  // dt: log-decays in fp32 with kToken and kDim, null with kHead; z.data null: no gate
  void* y;
  std::int64_t y_token_stride, y_head_stride;
  bool y_aligned;
  const float* a;  // null with kToken and kDim
  const float* d;  // null: none, as for dt_bias
  const float* dt_bias;

  // Scratch memory of the kernel.
  float* da_cumsum;  // [segments, heads, chunks, 2, 64]; null with state_decays and kDim
  // States that are known to be zero are not stored: M of a super-segment's first segment, and T of a run's first
  // super-segment without an initial state. A super-segment of one segment has that segment's local state.
  float* states;  // [segments, heads, head_dim, state_dim]: local states, then the states before the segments (M)
  // log2 of decays (SsmLogs): [segments, heads], or [segments, heads, state_dim] with kState.
  float* logs;          // of a segment
  float* logs_before;   // from the super-segment's start to the segment
  float* super_states;  // [super_segments, heads, head_dim, state_dim]: local states, then the states before them (T)
  float* super_logs;    // of a super-segment
};
static_assert(sizeof(SsmParams) <= 4000, "kernel arguments are at most 4 KiB");

inline constexpr int kUpdateWidth = 4;  // adjacent elements of a row of states, A, B or C per lane

// One token per sequence (SsmKernel::update).
struct UpdateParams {
  std::int64_t sequences;
  std::int32_t heads, head_dim, state_dim;
  Divider by_head_dim, by_group_heads;
  Divider by_blocks;  // CTAs per sequence
  SsmDecay decay;
  float scale = 1.0F;
  bool softplus;
  float dt_min, dt_max;
  SsmTensor x, dt, b, c, z;  // b and c: aligned to kUpdateWidth elements
  void* y;
  std::int64_t y_token_stride, y_head_stride;
  const float* a;
  const float* d;
  const float* dt_bias;
  float* states;
  const std::int32_t* slots;  // [sequences]; null: slot of a sequence is its index; < 0: padding
  bool states_aligned;        // to 16 bytes
  bool rates_aligned;         // A, to 16 bytes
};

// dt and dA_cumsum for the SSD kernels of sm80 and sm90. With log-decays dt is 1. Functions enqueue and throw if a
// launch fails.

// Loads compute_da_cumsum() onto the current device (load_kernel.hpp).
void load_da_cumsum(Dtype dtype);
// Computes dt and dA_cumsum of all tokens (SsmParams::da_cumsum), and the log decays of segments.
void compute_da_cumsum(const SsmParams& params, Dtype dtype, cudaStream_t stream);

// State passing between segments and super-segments (kernels/ssm/ssm.hpp, 2 and 3). Each element of a state is
// independent. `reversed`: passing of gradients from the end to the beginning (kernels/ssd_backward/ssd_backward.hpp, 2
// and 3), with gradients in the fields of the states, "before" meaning after; SsmParams::super_logs is only read, and
// `logs` is kHead.
// Functions enqueue and throw if a launch fails.

// Loads both kernels onto the current device (load_kernel.hpp).
void load_state_passing(SsmLogs logs, bool reversed = false);

// For each super-segment of the launch with more than one segment: replaces the local states of its segments by the
// states before them, writes its own local state to SsmParams::super_states, and accumulates the log decays.
void pass_segments(const SsmParams& params, SsmLogs logs, cudaStream_t stream, bool reversed = false);

// For each run of the launch: replaces the local states of its super-segments by the states before them, starting from
// the run's initial state, and writes the final state.
void pass_super_segments(const SsmParams& params, SsmLogs logs, cudaStream_t stream, bool reversed = false);

// Decode step of an SSM layer: one token per sequence, states updated in place (SsmKernel::update). Enqueues the launch
// and throws if it fails.

// Loads the kernels onto the current device (load_kernel.hpp). Returns the max. number of resident CTAs of the
// persistent kernel (update_loop_kernel), or 0 if there is none for this spec.
int load_update(Dtype dtype, bool state_decays, SsmDecay decay, int state_dim);
// `resident_ctas`: the return value of load_update().
void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, int resident_ctas, cudaStream_t stream);

// Partition of a range of heads into head blocks that share B and C. Used by sm80 and sm90 SSM kernels.

// The heads of a CTA, all in one group.
struct HeadBlock {
  int first = 0;
  int count = 0;
  int group = 0;
};

// Calls visit(block) for the head blocks of up to `max_heads` heads in the range, until it returns true.
template <class Visit>
__host__ __device__ inline void visit_head_blocks(const SsmParams& p, int max_heads, Visit visit) {
  const int end = p.first_head + p.head_count;
  for (int head = p.first_head; head < end;) {
    const int group = head / p.group_heads;
    int last = head + max_heads;
    if (last > (group + 1) * p.group_heads) last = (group + 1) * p.group_heads;
    if (last > end) last = end;
    if (visit(HeadBlock{head, last - head, group})) return;
    head = last;
  }
}

inline int head_blocks(const SsmParams& p, int max_heads) {
  int blocks = 0;
  visit_head_blocks(p, max_heads, [&](const HeadBlock&) {
    ++blocks;
    return false;
  });
  return blocks;
}

__device__ inline HeadBlock head_block(const SsmParams& p, int max_heads, int nth) {
  HeadBlock found;
  visit_head_blocks(p, max_heads, [&](const HeadBlock& block) {
    found = block;
    return nth-- == 0;
  });
  return found;
}

}  // namespace ringattn::cuda
