// SPDX-License-Identifier: Apache-2.0
// States before segments (kernels/gated_delta/gated_delta.hpp, 2): S ← M · S + U, segment by segment, in fp32. A CTA
// computes some columns of one value head's state for one run. Each element is one chain of fma that begins with U and
// ascends in the key dim, so bits do not depend on how many columns a CTA has. M is the same for all columns. A
// producer warp loads it up to kStages segments ahead, by bulk copies.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/gated_delta/sm90/delta_segment.cuh"

namespace ringattn::sm90 {

// A CTA has kWidth columns (DeltaCarryForm). A thread has 4 adjacent key dims of kColumns adjacent columns, a warp
// 8 x 4 threads.
template <int kWidth_>
struct DeltaCarryTile {
  static constexpr int kWidth = kWidth_;
  static constexpr int kRows = 4;
  static constexpr int kColumns = kWidth_ < 16 ? kWidth_ / 4 : 4;
  static constexpr int kCtasOfHead = kDeltaDim / kWidth;
  static constexpr int kRowWarps = kDeltaDim / (8 * kRows);
  static constexpr int kConsumerWarps = kRowWarps * (kWidth / (4 * kColumns));
  static constexpr int kConsumers = 32 * kConsumerWarps;
  static constexpr int kThreads = kConsumers + 32;

  // M is loaded in parts, so that the first part arrives early.
  static constexpr int kStages = 3;
  static constexpr int kParts = 4;
  static constexpr int kPartDims = kDeltaDim / kParts;
  static constexpr int kPartBytes = kPartDims * kDeltaDim * 4;
  static constexpr int kTransitionBytes = kDeltaStateFloats * 4;
  static constexpr int kState = kStages * kTransitionBytes;                // [2][key dims][kWidth]
  static constexpr int kFull = kState + 2 * kDeltaDim * kWidth * 4;        // [kStages][kParts]
  static constexpr int kEmpty = kFull + kStages * kParts * kBarrierBytes;  // [kStages]
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kEmpty + kStages * kBarrierBytes, 128);
  static_assert(kColumns % 2 == 0 && kWidth % (4 * kColumns) == 0 && kSharedBytes <= 227 * 1024);
};

inline constexpr int kDeltaCarryBarrier = 1;  // named barrier of the consumers

// Loads or stores 2 or 4 adjacent floats, aligned to their size.
template <int kCount>
__device__ __forceinline__ void load_adjacent(float (&to)[kCount], const float* from) {
  if constexpr (kCount == 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    to[0] = pair.x;
    to[1] = pair.y;
  } else {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
}
template <int kCount>
__device__ __forceinline__ void store_adjacent(float* to, const float (&from)[kCount]) {
  if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  } else {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) delta_carry_kernel(const __grid_constant__ DeltaParams p) {
  constexpr int kRows = Tile::kRows;
  constexpr int kColumns = Tile::kColumns;
  extern __shared__ unsigned char delta_dynamic[];
  unsigned char* const shared = cuda::aligned_shared<128>(delta_dynamic);
  const std::uint32_t base = cuda::shared_address(shared);
  const DeltaRunEntry& run = p.runs[blockIdx.y];
  const int head = p.first_head + static_cast<int>(blockIdx.x) / Tile::kCtasOfHead;
  const std::int64_t segments = (run.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t stride = std::int64_t{p.value_heads} * kDeltaStateFloats;
  const std::int64_t of_head = run.segment * stride + std::int64_t{head} * kDeltaStateFloats;
  // Segments whose M is used: [first, end).
  const std::int64_t first = run.initial == nullptr ? 1 : 0;
  const std::int64_t end = run.final == nullptr ? segments - 1 : segments;
  if (end < first) return;  // one segment from zero, whose final state is not needed
  const auto full = [base](std::uint32_t stage, int part) {
    return base + Tile::kFull + (stage * Tile::kParts + static_cast<std::uint32_t>(part)) * kBarrierBytes;
  };
  const auto empty = [base](std::uint32_t stage) { return base + Tile::kEmpty + stage * kBarrierBytes; };
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < Tile::kStages; ++stage) {
      for (int part = 0; part < Tile::kParts; ++part) barrier_init(full(stage, part), 1);
      barrier_init(empty(stage), Tile::kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = static_cast<int>(warp_uniform(threadIdx.x / 32));
  PackedPipelineState<Tile::kStages> ring;
  if (warp == Tile::kConsumerWarps) {
    if (!elect_one()) return;
#pragma unroll 1
    for (std::int64_t segment = first; segment < end; ++segment, ring.advance()) {
      const std::uint32_t stage = ring.stage();
      const float* const from = p.transitions + of_head + segment * stride;
      barrier_wait(empty(stage), ring.parity() ^ 1U);
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) {
        barrier_arrive_expect(full(stage, part), Tile::kPartBytes);
        tma_load_bytes(base + stage * Tile::kTransitionBytes + static_cast<std::uint32_t>(part * Tile::kPartBytes),
                       from + part * Tile::kPartDims * kDeltaDim, Tile::kPartBytes, full(stage, part));
      }
    }
    return;
  }

  // Lanes whose numbers differ in bit 0 read the same key dims of M, and in bit 1 the same columns of S: a warp's
  // 16-byte loads take less time than with lanes in rows (as CUTLASS's RowMajorInterleaved).
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row_of_warp = (lane >> 1 & 1) | (lane >> 2 & 6);
  const int column_of_warp = (lane & 1) | (lane >> 1 & 2);
  const int row = (warp % Tile::kRowWarps * 8 + row_of_warp) * kRows;
  const int in_cta = (warp / Tile::kRowWarps * 4 + column_of_warp) * kColumns;
  const int column = static_cast<int>(blockIdx.x) % Tile::kCtasOfHead * Tile::kWidth + in_cta;
  float* const states = p.states + of_head + std::int64_t{column} * kDeltaDim + row;
  const std::int64_t given = std::int64_t{head} * kDeltaStateFloats + std::int64_t{row} * kDeltaDim + column;
  const auto load_states = [&](float(&to)[kColumns][kRows], std::int64_t segment) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) load_adjacent(to[c], states + segment * stride + c * kDeltaDim);
  };
  float state[kColumns][kRows];
  float next[kColumns][kRows];  // U of the next segment
  const auto store_states = [&](std::int64_t segment) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) store_adjacent(states + segment * stride + c * kDeltaDim, state[c]);
  };
  if (run.initial == nullptr) {
    load_states(state, 0);
  } else {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[c][r] = run.initial[given + r * kDeltaDim + c];
    }
  }
  if (first < end) load_states(next, first);
#pragma unroll 1
  for (std::int64_t segment = first; segment < end; ++segment, ring.advance()) {
    store_states(segment);
    // S before the segment, in this thread's columns.
    float* const before =
        reinterpret_cast<float*>(shared + Tile::kState) + segment % 2 * (kDeltaDim * Tile::kWidth) + in_cta;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float columns[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) columns[c] = state[c][r];
      store_adjacent(before + (row + r) * Tile::kWidth, columns);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[c][r] = next[c][r];
    }
    if (segment + 1 < end) load_states(next, segment + 1);
    // All threads have stored S. They have also read S of the previous segment, whose memory the next segment
    // overwrites.
    named_sync(kDeltaCarryBarrier, Tile::kConsumers);
    const std::uint32_t stage = ring.stage();
    const auto* const transition = reinterpret_cast<const float*>(shared + stage * Tile::kTransitionBytes) + row;
#pragma unroll 1
    for (int part = 0; part < Tile::kParts; ++part) {
      barrier_wait(full(stage, part), ring.parity());
#pragma unroll
      for (int i = 0; i < Tile::kPartDims; ++i) {
        const int dim = part * Tile::kPartDims + i;
        float m[kRows];
        float s[kColumns];
        load_adjacent(m, transition + dim * kDeltaDim);
        load_adjacent(s, before + dim * Tile::kWidth);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) state[c][r] = __fmaf_rn(m[r], s[c], state[c][r]);
        }
      }
    }
    __syncwarp();  // all lanes have read M
    if (lane == 0) barrier_arrive(empty(stage));
  }
  if (run.final == nullptr) {
    store_states(end);
    return;
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) run.final[given + r * kDeltaDim + c] = state[c][r];
  }
}

}  // namespace ringattn::sm90
