// SPDX-License-Identifier: Apache-2.0
// States before segments (kernels/gated_delta/gated_delta.hpp, 2): S ← M · S + U, segment by segment, in fp32. A CTA
// processes some columns of one value head's state for one run. Each element is one chain of fma that begins with U and
// ascends in the key dim, so bits do not depend on how many columns a CTA has. M is the same for all columns, and the
// next segment's is loaded into shared memory, by bulk copies, while this one's is used.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/gated_delta/sm90/delta_segment.cuh"

namespace ringattn::sm90 {

// A thread has kRows adjacent key dims of kColumns adjacent columns.
template <int kRows_, int kColumns_, int kGroups_>
struct DeltaCarryTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kWidth = kColumns_ * kGroups_;  // columns of a CTA
  static constexpr int kThreads = kDeltaDim / kRows_ * kGroups_;
  static constexpr int kCtasOfHead = kDeltaDim / kWidth;

  // Shared memory: M and S of this segment and the next. M is loaded in parts, so that the first is there early.
  static constexpr int kParts = 4;
  static constexpr int kTransitionBytes = kDeltaStateFloats * 4;
  static constexpr int kState = 2 * kTransitionBytes;                    // [2][key dims][kWidth]
  static constexpr int kBarriers = kState + 2 * kDeltaDim * kWidth * 4;  // [2][parts]
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBarriers + 2 * kParts * 8, 128);
};
// With many heads, a CTA has half of one and reads M once for it. With few, the chain of segments decides, and it is
// shorter with fewer columns.
using DeltaCarryWide = DeltaCarryTile<4, 8, 8>;
using DeltaCarryNarrow = DeltaCarryTile<2, 4, 2>;

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) delta_carry_kernel(const __grid_constant__ DeltaParams p) {
  constexpr int kRows = Tile::kRows;
  constexpr int kColumns = Tile::kColumns;
  constexpr int kPartDims = kDeltaDim / Tile::kParts;
  extern __shared__ unsigned char delta_dynamic[];
  unsigned char* const shared = cuda::aligned_shared<128>(delta_dynamic);
  const std::uint32_t base = cuda::shared_address(shared);
  const DeltaRunEntry& run = p.runs[blockIdx.y];
  const int head = p.first_head + static_cast<int>(blockIdx.x) / Tile::kCtasOfHead;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % (kDeltaDim / kRows) * kRows;
  const int in_cta = thread / (kDeltaDim / kRows) * kColumns;
  const int column = static_cast<int>(blockIdx.x) % Tile::kCtasOfHead * Tile::kWidth + in_cta;
  const std::int64_t segments = (run.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t stride = std::int64_t{p.value_heads} * kDeltaStateFloats;
  const std::int64_t of_head = run.segment * stride + std::int64_t{head} * kDeltaStateFloats;
  float* const states = p.states + of_head + std::int64_t{column} * kDeltaDim + row;
  const std::int64_t given = std::int64_t{head} * kDeltaStateFloats + std::int64_t{row} * kDeltaDim + column;

  // Segments whose M is used.
  const std::int64_t first_used = run.initial == nullptr ? 1 : 0;
  const std::int64_t end_used = run.final == nullptr ? segments - 1 : segments;
  const auto barrier = [base](std::int64_t segment, int part) {
    return base + Tile::kBarriers + static_cast<std::uint32_t>((segment % 2 * Tile::kParts + part) * kBarrierBytes);
  };
  const auto load_transition = [&](std::int64_t segment) {
    if (thread != 0 || segment >= end_used) return;
    constexpr int kPartBytes = Tile::kTransitionBytes / Tile::kParts;
    const float* const from = p.transitions + of_head + segment * stride;
    for (int part = 0; part < Tile::kParts; ++part) {
      barrier_arrive_expect(barrier(segment, part), kPartBytes);
      tma_load_bytes(base + static_cast<std::uint32_t>(segment % 2 * Tile::kTransitionBytes + part * kPartBytes),
                     from + part * kPartDims * kDeltaDim, kPartBytes, barrier(segment, part));
    }
  };
  if (thread == 0) {
    for (int i = 0; i < 2 * Tile::kParts; ++i) barrier_init(base + Tile::kBarriers + i * kBarrierBytes, 1);
    barrier_init_fence();
  }
  __syncthreads();
  load_transition(first_used);

  float before[kRows][kColumns];
  float after[kRows][kColumns];  // begins with U
  float next[kRows][kColumns];   // U of the next segment
  const auto load_u = [&](std::int64_t segment) {
    if (segment >= segments || (segment + 1 == segments && run.final == nullptr)) return;
    const float* const from = states + segment * stride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) next[r][c] = from[c * kDeltaDim + r];
    }
  };
  // S before a segment, in this thread's columns.
  const auto state_of = [&](std::int64_t segment) {
    return reinterpret_cast<float*>(shared + Tile::kState) + segment % 2 * (kDeltaDim * Tile::kWidth) + in_cta;
  };
  load_u(0);
  if (run.initial != nullptr) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) before[r][c] = run.initial[given + r * kDeltaDim + c];
    }
  }
#pragma unroll 1
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    if (segment >= first_used) {
      float* const to = states + segment * stride;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) to[c * kDeltaDim + r] = before[r][c];
      }
      if (segment == end_used) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 4) {
          *reinterpret_cast<float4*>(state_of(segment) + (row + r) * Tile::kWidth + c) =
              make_float4(before[r][c], before[r][c + 1], before[r][c + 2], before[r][c + 3]);
        }
      }
      __syncthreads();  // all threads have stored S, and have used M of the segment before
      load_transition(segment + 1);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) after[r][c] = next[r][c];
    }
    if (segment == end_used) return;  // one segment from zero, whose state nobody needs
    load_u(segment + 1);
    if (segment >= first_used) {
      const auto* const transition =
          reinterpret_cast<const float*>(shared + segment % 2 * Tile::kTransitionBytes) + row;
      const float* const state = state_of(segment);
#pragma unroll 1
      for (int part = 0; part < Tile::kParts; ++part) {
        barrier_wait(barrier(segment, part), static_cast<std::uint32_t>((segment - first_used) / 2 % 2));
#pragma unroll 8
        for (int dim = part * kPartDims; dim < (part + 1) * kPartDims; ++dim) {
          float factors[kRows];
#pragma unroll
          for (int r = 0; r < kRows; r += 2) {
            const float2 pair = *reinterpret_cast<const float2*>(transition + dim * kDeltaDim + r);
            factors[r] = pair.x;
            factors[r + 1] = pair.y;
          }
#pragma unroll
          for (int c = 0; c < kColumns; c += 4) {
            const float4 s = *reinterpret_cast<const float4*>(state + dim * Tile::kWidth + c);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              after[r][c] = __fmaf_rn(factors[r], s.x, after[r][c]);
              after[r][c + 1] = __fmaf_rn(factors[r], s.y, after[r][c + 1]);
              after[r][c + 2] = __fmaf_rn(factors[r], s.z, after[r][c + 2]);
              after[r][c + 3] = __fmaf_rn(factors[r], s.w, after[r][c + 3]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) before[r][c] = after[r][c];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) run.final[given + r * kDeltaDim + c] = before[r][c];
  }
}

}  // namespace ringattn::sm90
