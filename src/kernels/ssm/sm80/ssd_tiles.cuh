// SPDX-License-Identifier: Apache-2.0
// Tiles of a chunk in shared memory, and MMAs of fp32 factors with 16-bit operands.
//
// Rounding: x, B and C are MMA operands as they are. fp32 factors (scaled x, the state, intra-chunk scores) become a
// bf16 hi/lo pair of 16 bits together, so each term of a sum is within 2^−17 of its fp32 value, over the whole range of
// fp32. fp16 operands are also split into a bf16 pair, which is exact, and lo · lo is omitted. C · Bᵀ is one MMA in the
// input type. All sums are fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/bf16_pair.cuh"
#include "kernels/ssm/cuda/head_blocks.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/sm80/ssd.hpp"

namespace ringattn::sm80 {

using cuda::HeadBlock;
using cuda::load_matrix;
using cuda::load_matrix_transposed;
using cuda::SegmentCoord;

inline constexpr int kScoreBlocks = 10;  // 16 × 16 blocks on and below the diagonal of a chunk

// The head block and segment of this CTA.
__device__ inline HeadBlock block_of_heads(const SsdParams& p) {
  return cuda::head_block(p.scan, p.shape.heads, static_cast<int>(blockIdx.x) % p.blocks);
}
__device__ inline SegmentCoord segment_of_cta(const SsdParams& p) {
  return cuda::segment_coord(p.scan, static_cast<int>(blockIdx.x) / p.blocks);
}

// Copies `rows` rows of `columns` elements to a tile of kChunk rows of `vectors` 16-byte vectors, and zero-fills the
// rest. By all threads of the CTA. Unaligned rows are copied synchronously.
__device__ inline void copy_tile(std::uint32_t target, int pitch, int vectors, const void* data,
                                 std::int64_t token_stride, int rows, int columns, bool aligned) {
  const auto* const source = static_cast<const std::uint16_t*>(data);
#pragma unroll 1  // unrolled addresses would take registers that the states need
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * vectors; i += static_cast<int>(blockDim.x)) {
    const int row = i / vectors;
    const int column = i % vectors * kVectorElements;
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

// Syncs the warps of a head. Barrier id and thread count are immediates: with registers, compute-sanitizer's racecheck
// may consider accesses unordered.
template <int kHeadIndex, int kWarps>
__device__ __forceinline__ void sync_head() {
  asm volatile("bar.sync %0, %1;" ::"n"(kHeadIndex + 1), "n"(kWarps * 32) : "memory");
}
template <int kWarps>
__device__ __forceinline__ void sync_head(int head_index) {
  static_assert(kMaxHeadsPerCta == 4);
  switch (head_index) {
    case 0:
      return sync_head<0, kWarps>();
    case 1:
      return sync_head<1, kWarps>();
    case 2:
      return sync_head<2, kWarps>();
    default:
      return sync_head<3, kWarps>();
  }
}
__device__ __forceinline__ void head_barrier(int head_index, int warps) {
  static_assert(kMaxWarps == 8);
  switch (warps) {
    case 1:
      return __syncwarp();
    case 2:
      return sync_head<2>(head_index);
    case 3:
      return sync_head<3>(head_index);
    case 4:
      return sync_head<4>(head_index);
    case 5:
      return sync_head<5>(head_index);
    case 6:
      return sync_head<6>(head_index);
    case 7:
      return sync_head<7>(head_index);
    default:
      return sync_head<8>(head_index);
  }
}

using Bf16Mma = cuda::MmaTraits<__nv_bfloat16>;
using cuda::split_hi_lo;
using cuda::unpack;

// An input operand as bf16: as it is, or as a hi/lo pair if it is fp16.
template <class Element, int kRegisters>
struct InputOperand {
  static constexpr int kAddends = std::is_same_v<Element, __half> ? 2 : 1;
  std::uint32_t addend[kAddends][kRegisters];

  __device__ __forceinline__ explicit InputOperand(const std::uint32_t* raw) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if constexpr (kAddends == 1) {
        addend[0][i] = raw[i];
      } else {
        const float2 pair = unpack(raw[i], Element());
        split_hi_lo(pair.x, pair.y, addend[0][i], addend[1][i]);
      }
    }
  }
};

// d += (hi + lo) · operand, with the fp32 factor as A.
template <class Element>
__device__ __forceinline__ void multiply_left(float (&d)[4], const std::uint32_t (&hi)[4], const std::uint32_t (&lo)[4],
                                              const InputOperand<Element, 4>& operand, int tile) {
  const int at = 2 * tile;
  Bf16Mma::mma(d, hi, operand.addend[0][at], operand.addend[0][at + 1], d);
  Bf16Mma::mma(d, lo, operand.addend[0][at], operand.addend[0][at + 1], d);
  if constexpr (InputOperand<Element, 4>::kAddends == 2) {
    Bf16Mma::mma(d, hi, operand.addend[1][at], operand.addend[1][at + 1], d);
  }
}

// d += operand · (hi + lo), with the fp32 factor as B.
template <class Element>
__device__ __forceinline__ void multiply_right(float (&d)[4], const InputOperand<Element, 4>& operand,
                                               const std::uint32_t (&hi)[2], const std::uint32_t (&lo)[2]) {
  Bf16Mma::mma(d, operand.addend[0], hi[0], hi[1], d);
  Bf16Mma::mma(d, operand.addend[0], lo[0], lo[1], d);
  if constexpr (InputOperand<Element, 4>::kAddends == 2) Bf16Mma::mma(d, operand.addend[1], hi[0], hi[1], d);
}

// Offset of this lane's row for ldmatrix, relative to a tile of 16 × 16 elements: matrices in column-major order
// (down_first) or in row-major order (right_first).
__device__ __forceinline__ std::uint32_t down_first(int lane, int pitch) {
  return static_cast<std::uint32_t>(lane % 16 * pitch + lane / 16 * kVectorElements * kElementBytes);
}
__device__ __forceinline__ std::uint32_t right_first(int lane, int pitch) {
  return static_cast<std::uint32_t>((lane % 8 + lane / 16 * 8) * pitch +
                                    lane / 8 % 2 * kVectorElements * kElementBytes);
}
__device__ __forceinline__ std::uint32_t tile_at(std::uint32_t tile, int row, int column, int pitch) {
  return tile + static_cast<std::uint32_t>(row * pitch + column * kElementBytes);
}

// A warp's position: dims [first_dim, first_dim + 16) of one head's state.
struct WarpCoord {
  int head_index;  // index of the head in the CTA
  int warp;        // index in the head
  int lane;
  int head;
  int first_dim;

  __device__ WarpCoord(const HeadBlock& block, const SsdShape& shape)
      : head_index(static_cast<int>(threadIdx.x) / 32 / shape.warps),
        warp(static_cast<int>(threadIdx.x) / 32 % shape.warps),
        lane(static_cast<int>(threadIdx.x) % 32),
        head(block.first + head_index),
        first_dim(warp * kWarpDims) {}

  __device__ int row() const { return lane / 4; }         // row of an accumulator; also row() + 8
  __device__ int column() const { return lane % 4 * 2; }  // column of an accumulator; also column() + 1
  // Index of the thread among those of the head.
  __device__ int thread() const { return warp * 32 + lane; }
};

// A warp's dims of a state: element [t][e] is dim first_dim + row() + e / 2 · 8, column 8 t + column() + e % 2.
template <int kStates>
struct StateTile {
  float s[kStates / 8][4];

  // Calls visit(pair of elements, offset in the head's state) for the elements within head_dim and state_dim.
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

// S ← fma(decay, S, Σ_j scale_j · x_j ⊗ B_j), j ascending from zero. `state_scale` [64]: see compute_state_scale().
// `decay`: of the chunk.
template <class Element, int kStates>
__device__ __forceinline__ void accumulate_chunk(StateTile<kStates>& state, const WarpCoord& coord, std::uint32_t x,
                                                 int x_pitch, std::uint32_t b, const float* state_scale, float decay) {
  constexpr int kPitch = pitch_of(kStates);
  constexpr int kSteps = kChunk / 16;
  std::uint32_t hi[kSteps][4];
  std::uint32_t lo[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    std::uint32_t raw[4];
    load_matrix_transposed(raw, tile_at(x, 16 * k, coord.first_dim, x_pitch) + right_first(coord.lane, x_pitch));
    const float2 first = *reinterpret_cast<const float2*>(state_scale + 16 * k + coord.column());
    const float2 second = *reinterpret_cast<const float2*>(state_scale + 16 * k + 8 + coord.column());
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 pair = unpack(raw[r], Element());
      const float2 scale = r < 2 ? first : second;
      split_hi_lo(__fmul_rn(pair.x, scale.x), __fmul_rn(pair.y, scale.y), hi[k][r], lo[k][r]);
    }
  }
#pragma unroll
  for (int n = 0; n < kStates / 16; ++n) {
    float added[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      std::uint32_t raw[4];
      load_matrix_transposed(raw, tile_at(b, 16 * k, 16 * n, kPitch) + down_first(coord.lane, kPitch));
      const InputOperand<Element, 4> operand(raw);
      multiply_left(added[0], hi[k], lo[k], operand, 0);
      multiply_left(added[1], hi[k], lo[k], operand, 1);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.s[2 * n + t][e] = __fmaf_rn(decay, state.s[2 * n + t][e], added[t][e]);
    }
  }
}

}  // namespace ringattn::sm80
