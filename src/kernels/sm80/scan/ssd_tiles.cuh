// SPDX-License-Identifier: Apache-2.0
// Tiles of a chunk in shared memory, and products of fp32 factors with 16-bit operands on tensor cores.
//
// What is rounded. x, B and C enter products as they are. Factors that are fp32 (weighed x, the state, weighed scores)
// enter as two bf16 parts, hi + lo, of 16 bits together: so each term of a sum is within 2^−17 of its fp32 value, over
// the whole range of fp32. fp16 operands are two bf16 parts as well, which is exact, and lo · lo is left out. C · Bᵀ is
// one product of the given type. All sums are fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/scan/bf16_pair.cuh"
#include "kernels/cuda/scan/head_blocks.cuh"
#include "kernels/cuda/scan/ssm_device.cuh"
#include "kernels/sm80/scan/ssd.hpp"

namespace ringattn::sm80 {

using cuda::HeadBlock;
using cuda::load_matrix;
using cuda::load_matrix_transposed;
using cuda::SegmentCoord;

inline constexpr int kScoreBlocks = 10;  // of 16 × 16, on and below the diagonal of a chunk

// Of the CTA.
__device__ inline HeadBlock block_of_heads(const SsdParams& p) {
  return cuda::head_block(p.scan, p.shape.heads, static_cast<int>(blockIdx.x) % p.blocks);
}
__device__ inline SegmentCoord segment_of_cta(const SsdParams& p) {
  return cuda::segment_coord(p.scan, static_cast<int>(blockIdx.x) / p.blocks);
}

// Copies `rows` rows of `columns` elements to a tile of kChunk rows of `pieces` pieces, and zeros to the rest of it.
// Called by all threads of the CTA; what isn't aligned is copied at once.
__device__ inline void fetch_tile(std::uint32_t target, int pitch, int pieces, const void* data,
                                  std::int64_t token_stride, int rows, int columns, bool aligned) {
  const auto* const source = static_cast<const std::uint16_t*>(data);
#pragma unroll 1  // addresses of several pieces would take registers that the states need
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * pieces; i += static_cast<int>(blockDim.x)) {
    const int row = i / pieces;
    const int column = i % pieces * kPieceElements;
    const bool present = row < rows && column < columns;
    const std::uint32_t to = target + static_cast<std::uint32_t>(row * pitch + column * kElementBytes);
    const std::uint16_t* const from = present ? source + row * token_stride + column : source;
    if (aligned) {
      cuda::copy_16(to, from, present);
    } else {
      std::uint32_t words[4] = {};
      if (present) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = from[2 * w] | static_cast<std::uint32_t>(from[2 * w + 1]) << 16;
      }
      cuda::store_shared(to, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// A head's warps wait for each other. Which barrier it is, and how many wait there, stands in the instruction:
// compute-sanitizer's racecheck may take accesses for unordered by a barrier of which it only sees registers.
template <int kSlot, int kWarps>
__device__ __forceinline__ void wait_for_head() {
  asm volatile("bar.sync %0, %1;" ::"n"(kSlot + 1), "n"(kWarps * 32) : "memory");
}
template <int kWarps>
__device__ __forceinline__ void wait_for_head(int slot) {
  static_assert(kMaxHeadsTogether == 4);
  switch (slot) {
    case 0:
      return wait_for_head<0, kWarps>();
    case 1:
      return wait_for_head<1, kWarps>();
    case 2:
      return wait_for_head<2, kWarps>();
    default:
      return wait_for_head<3, kWarps>();
  }
}
__device__ __forceinline__ void head_barrier(int slot, int warps) {
  static_assert(kMaxWarps == 8);
  switch (warps) {
    case 1:
      return __syncwarp();
    case 2:
      return wait_for_head<2>(slot);
    case 3:
      return wait_for_head<3>(slot);
    case 4:
      return wait_for_head<4>(slot);
    case 5:
      return wait_for_head<5>(slot);
    case 6:
      return wait_for_head<6>(slot);
    case 7:
      return wait_for_head<7>(slot);
    default:
      return wait_for_head<8>(slot);
  }
}

using Bf16Products = cuda::Products<__nv_bfloat16>;
using cuda::split_hi_lo;
using cuda::unpack;

// A given operand as bf16: one part, or two where it is fp16.
template <class Element, int kRegisters>
struct Given {
  static constexpr int kParts = std::is_same_v<Element, __half> ? 2 : 1;
  std::uint32_t part[kParts][kRegisters];

  __device__ __forceinline__ explicit Given(const std::uint32_t* raw) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if constexpr (kParts == 1) {
        part[0][i] = raw[i];
      } else {
        const float2 pair = unpack(raw[i], Element());
        split_hi_lo(pair.x, pair.y, part[0][i], part[1][i]);
      }
    }
  }
};

// d += (hi + lo) · given: fp32 factors on the left.
template <class Element>
__device__ __forceinline__ void multiply_left(float (&d)[4], const std::uint32_t (&hi)[4], const std::uint32_t (&lo)[4],
                                              const Given<Element, 4>& given, int tile) {
  const int at = 2 * tile;
  Bf16Products::mma(d, hi, given.part[0][at], given.part[0][at + 1], d);
  Bf16Products::mma(d, lo, given.part[0][at], given.part[0][at + 1], d);
  if constexpr (Given<Element, 4>::kParts == 2) {
    Bf16Products::mma(d, hi, given.part[1][at], given.part[1][at + 1], d);
  }
}

// d += given · (hi + lo): fp32 factors on the right.
template <class Element>
__device__ __forceinline__ void multiply_right(float (&d)[4], const Given<Element, 4>& given,
                                               const std::uint32_t (&hi)[2], const std::uint32_t (&lo)[2]) {
  Bf16Products::mma(d, given.part[0], hi[0], hi[1], d);
  Bf16Products::mma(d, given.part[0], lo[0], lo[1], d);
  if constexpr (Given<Element, 4>::kParts == 2) Bf16Products::mma(d, given.part[1], hi[0], hi[1], d);
}

// Where a lane's rows begin, relative to a tile of 16 × 16 elements at (row, column), for ldmatrix: of an operand whose
// matrices follow each other first down and then to the right, or first to the right and then down.
__device__ __forceinline__ std::uint32_t down_first(int lane, int pitch) {
  return static_cast<std::uint32_t>(lane % 16 * pitch + lane / 16 * kPieceElements * kElementBytes);
}
__device__ __forceinline__ std::uint32_t right_first(int lane, int pitch) {
  return static_cast<std::uint32_t>((lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * kPieceElements * kElementBytes);
}
__device__ __forceinline__ std::uint32_t tile_at(std::uint32_t tile, int row, int column, int pitch) {
  return tile + static_cast<std::uint32_t>(row * pitch + column * kElementBytes);
}

// What a warp knows of its coord: dims [first_dim, first_dim + 16) of one head's state.
struct WarpCoord {
  int slot;  // of the heads of the CTA
  int warp;  // of the head
  int lane;
  int head;
  int first_dim;

  __device__ WarpCoord(const HeadBlock& block, const SsdShape& shape)
      : slot(static_cast<int>(threadIdx.x) / 32 / shape.warps),
        warp(static_cast<int>(threadIdx.x) / 32 % shape.warps),
        lane(static_cast<int>(threadIdx.x) % 32),
        head(block.first + slot),
        first_dim(warp * kWarpDims) {}

  __device__ int row() const { return lane / 4; }         // of a product's result; and 8 more
  __device__ int column() const { return lane % 4 * 2; }  // and the next one
  // The thread's number among those of the head.
  __device__ int thread() const { return warp * 32 + lane; }
};

// A warp's part of a state: element [t][e] is dim first_dim + row() + e / 2 · 8, column 8 t + column() + e % 2.
template <int kStates>
struct StateTile {
  float s[kStates / 8][4];

  // Calls visit(pair of elements, offset) for what the state has of this tile.
  template <class Visit>
  __device__ __forceinline__ void visit(const SsmParams& p, const WarpCoord& coord, Visit visit_pair) {
#pragma unroll
    for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = coord.first_dim + coord.row() + half * 8;
        const int column = t * 8 + coord.column();
        if (dim < p.head_dim && column < p.state_dim) {
          visit_pair(s[t][2 * half], s[t][2 * half + 1], dim * p.state_dim + column);
        }
      }
    }
  }
};

// S ← fma(a(chunk), S, Σ_j a(tokens behind j) · dt_j · x_j ⊗ B_j), j ascending from zero. `behind` has the
// intra_chunk_scores of x, `decay` is that of the chunk.
template <class Element, int kStates>
__device__ __forceinline__ void accumulate_chunk(StateTile<kStates>& state, const WarpCoord& coord, std::uint32_t x,
                                                 int x_pitch, std::uint32_t b, const float* behind, float decay) {
  constexpr int kPitch = pitch_of(kStates);
  constexpr int kSteps = kChunk / 16;
  std::uint32_t hi[kSteps][4];
  std::uint32_t lo[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    std::uint32_t raw[4];
    load_matrix_transposed(raw, tile_at(x, 16 * k, coord.first_dim, x_pitch) + right_first(coord.lane, x_pitch));
    const float2 first = *reinterpret_cast<const float2*>(behind + 16 * k + coord.column());
    const float2 second = *reinterpret_cast<const float2*>(behind + 16 * k + 8 + coord.column());
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 pair = unpack(raw[r], Element());
      const float2 weight = r < 2 ? first : second;
      split_hi_lo(__fmul_rn(pair.x, weight.x), __fmul_rn(pair.y, weight.y), hi[k][r], lo[k][r]);
    }
  }
#pragma unroll
  for (int n = 0; n < kStates / 16; ++n) {
    float added[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      std::uint32_t raw[4];
      load_matrix_transposed(raw, tile_at(b, 16 * k, 16 * n, kPitch) + down_first(coord.lane, kPitch));
      const Given<Element, 4> given(raw);
      multiply_left(added[0], hi[k], lo[k], given, 0);
      multiply_left(added[1], hi[k], lo[k], given, 1);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.s[2 * n + t][e] = __fmaf_rn(decay, state.s[2 * n + t][e], added[t][e]);
    }
  }
}

}  // namespace ringattn::sm80
