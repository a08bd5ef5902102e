// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_ssd and their launch: tiles of a chunk and MMAs, local states of segments, and outputs y.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"

namespace ringattn::sm80 {

// Tiles of a chunk in shared memory, and MMAs of fp32 factors with 16-bit operands.
//
// Rounding: x, B and C are MMA operands as they are. fp32 factors (scaled x, the state, intra-chunk scores) become a
// bf16 hi/lo pair of 16 bits together, so each term of a sum is within 2^−17 of its fp32 value, over the whole range of
// fp32. fp16 operands are also split into a bf16 pair, which is exact, and lo · lo is omitted. C · Bᵀ is one MMA in the
// input type. All sums are fp32.

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

// Local states of segments (kernels/ssm/ssm.hpp, 1). A CTA processes a segment for some heads of one group, chunk by
// chunk. A warp keeps 16 dims of one head's state in registers. All heads share B of a chunk in shared memory.

// Loads the chunks of a segment to shared memory with cp.async.
template <int kStates>
struct ChunkPipeline {
  const SsdParams& p;
  std::uint32_t memory;
  SegmentCoord coord;
  HeadBlock heads;

  __device__ std::uint32_t b(int stage) const { return memory + p.layout.b + stage * tile_bytes(); }
  __device__ std::uint32_t c(int stage) const { return memory + p.layout.c + stage * tile_bytes(); }
  __device__ std::uint32_t x(int stage, int head_index) const {
    return memory + p.layout.x + (stage * p.shape.heads + head_index) * kChunk * x_pitch();
  }
  // Offset of a head's dA_cumsum [64] and dt [64] in floats of shared memory.
  __device__ int da_cumsum(int stage, int head_index) const {
    return p.layout.da_cumsum / 4 + (stage * p.shape.heads + head_index) * kChunkDaCumsumFloats;
  }
  __device__ int x_pitch() const { return p.layout.x_pitch; }
  __device__ int chunks() const { return (coord.tokens + kChunk - 1) / kChunk; }

  // Issues the copies of a chunk, as one cp.async group per thread.
  __device__ void issue_copies(int chunk, int stage, bool with_c) const {
    const SsmParams& s = p.scan;
    const std::int64_t row = coord.row + chunk * kChunk;
    const int left = coord.tokens - chunk * kChunk;
    const int rows = left < kChunk ? left : kChunk;
    const auto first = [row](const SsmTensor& tensor, int head) {
      return static_cast<const std::uint16_t*>(tensor.data) + row * tensor.token_stride + head * tensor.head_stride;
    };
    constexpr int kVectors = kStates / kVectorElements;
    copy_tile(b(stage), pitch_of(kStates), kVectors, first(s.b, heads.group), s.b.token_stride, rows, s.state_dim,
              s.b.aligned);
    if (with_c) {
      copy_tile(c(stage), pitch_of(kStates), kVectors, first(s.c, heads.group), s.c.token_stride, rows, s.state_dim,
                s.c.aligned);
    }
#pragma unroll 1
    for (int head_index = 0; head_index < heads.count; ++head_index) {
      copy_tile(x(stage, head_index), x_pitch(), p.shape.warps * kWarpDims / kVectorElements,
                first(s.x, heads.first + head_index), s.x.token_stride, rows, s.head_dim, s.x.aligned);
    }
    constexpr int kDaCumsumVectors = kChunkDaCumsumFloats / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < heads.count * kDaCumsumVectors; i += static_cast<int>(blockDim.x)) {
      const int head_index = i / kDaCumsumVectors;
      const std::int64_t from =
          ((coord.index * s.heads + heads.first + head_index) * kChunksOfSegment + chunk) * kChunkDaCumsumFloats +
          i % kDaCumsumVectors * 4;
      cuda::copy_16(memory + static_cast<std::uint32_t>(da_cumsum(stage, head_index) + i % kDaCumsumVectors * 4) * 4,
                    s.da_cumsum + from, true);
    }
    cuda::copy_commit();
  }

  // Calls compute(chunk, stage) for each chunk when it has landed. With two stages, the next chunk is loaded meanwhile.
  template <class Compute>
  __device__ void for_each_chunk(bool with_c, Compute compute) const {
    const int count = chunks();
    const int ahead = p.shape.stages - 1;  // 0 or 1, so & with it is the remainder
#pragma unroll 1
    for (int chunk = -ahead; chunk < count; ++chunk) {
      if (ahead > 0) cuda::copy_wait<0>();
      __syncthreads();  // all reads of the previous chunk are done; with two stages, this chunk has landed
      const int next = chunk + ahead;
      if (next < count) issue_copies(next, next & ahead, with_c);
      if (ahead == 0) {
        cuda::copy_wait<0>();
        __syncthreads();
      }
      if (chunk >= 0) compute(chunk, chunk & ahead);
    }
  }

 private:
  __device__ static constexpr int tile_bytes() { return kChunk * pitch_of(kStates); }
};

// Scales of a chunk's tokens in the state after it: exp2(dA_cumsum[last] − dA_cumsum[j]) · dt[j]. By all threads of a
// head.
__device__ __forceinline__ void compute_state_scale(const float* da_cumsum, float* state_scale, const WarpCoord& coord,
                                                    int warps) {
  const float last = da_cumsum[kChunk - 1];
  for (int j = coord.thread(); j < kChunk; j += warps * 32) {
    state_scale[j] = __fmul_rn(cuda::exp2_approx(__fsub_rn(last, da_cumsum[j])), da_cumsum[kChunk + j]);
  }
}

template <int kStates>
constexpr int state_threads() {
  return kStates <= 128 ? 512 : 256;
}

template <class Element, int kStates>
__global__ void __launch_bounds__(state_threads<kStates>(), 1) ssd_state_kernel(const __grid_constant__ SsdParams p) {
  extern __shared__ __align__(16) float ssd_memory[];
  const HeadBlock heads = block_of_heads(p);
  const ChunkPipeline<kStates> pipeline{p, cuda::shared_address(ssd_memory), segment_of_cta(p), heads};
  const WarpCoord coord(heads, p.shape);
  const bool present = coord.head_index < heads.count;
  float* const state_scale = ssd_memory + p.layout.decays / 4 + (2 * coord.head_index + 1) * kChunk;
  StateTile<kStates> state{};
  pipeline.for_each_chunk(false, [&](int, int stage) {
    if (!present) return head_barrier(coord.head_index, p.shape.warps);  // racecheck requires the barrier of every warp
    const float* const da_cumsum = ssd_memory + pipeline.da_cumsum(stage, coord.head_index);
    compute_state_scale(da_cumsum, state_scale, coord, p.shape.warps);
    head_barrier(coord.head_index, p.shape.warps);
    accumulate_chunk<Element>(state, coord, pipeline.x(stage, coord.head_index), pipeline.x_pitch(), pipeline.b(stage),
                              state_scale, cuda::exp2_approx(da_cumsum[kChunk - 1]));
  });
  if (!present) return;
  float* const target = p.scan.states + (pipeline.coord.index * p.scan.heads + coord.head) *
                                            (std::int64_t{p.scan.head_dim} * p.scan.state_dim);
  state.visit(p.scan, coord, [&](float first, float second, int offset) {
    *reinterpret_cast<float2*>(target + offset) = make_float2(first, second);
  });
}

// Outputs y (kernels/ssm/ssm.hpp, 4). A CTA processes a segment for some heads of one group, chunk by chunk, starting
// from the state before the segment. C · Bᵀ of a chunk is computed once for all heads. Each head scales it by its own
// decays and dt.

// scale · C · Bᵀ on and below the diagonal, in fp32. Blocks of 16 × 16 are distributed over all warps of the CTA.
template <class Element, int kStates>
__device__ __forceinline__ void compute_scores(std::uint32_t c, std::uint32_t b, float scale, float* scores) {
  constexpr int kPitch = pitch_of(kStates);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int block = static_cast<int>(threadIdx.x) / 32; block < kScoreBlocks;
       block += static_cast<int>(blockDim.x) / 32) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int column = block - row * (row + 1) / 2;
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      std::uint32_t left[4];
      std::uint32_t right[4];
      load_matrix(left, tile_at(c, 16 * row, 16 * k, kPitch) + down_first(lane, kPitch));
      load_matrix(right, tile_at(b, 16 * column, 16 * k, kPitch) + right_first(lane, kPitch));
      cuda::MmaTraits<Element>::mma(sum[0], left, right[0], right[1], sum[0]);
      cuda::MmaTraits<Element>::mma(sum[1], left, right[2], right[3], sum[1]);
    }
    float* const target = scores + (16 * row + lane / 4) * kScorePitch + 16 * column + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      *reinterpret_cast<float2*>(target + 8 * t) =
          make_float2(__fmul_rn(sum[t][0], scale), __fmul_rn(sum[t][1], scale));
      *reinterpret_cast<float2*>(target + 8 * kScorePitch + 8 * t) =
          make_float2(__fmul_rn(sum[t][2], scale), __fmul_rn(sum[t][3], scale));
    }
  }
}

// Intra-chunk scores of a head: (C · Bᵀ)[i, j] · exp2(dA_cumsum[i] − dA_cumsum[j]) · dt[j], as hi/lo pairs; 0 above the
// diagonal. Blocks are distributed over the head's warps.
__device__ __forceinline__ void compute_intra_chunk_scores(const float* scores, const float* da_cumsum,
                                                           std::uint32_t intra_chunk_scores, const WarpCoord& coord,
                                                           int warps) {
  for (int block = coord.warp; block < kScoreBlocks; block += warps) {
    const int block_row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int row = 16 * block_row + coord.lane % 16;
    const int column = 16 * (block - block_row * (block_row + 1) / 2) + coord.lane / 16 * 8;
    const float sum = da_cumsum[row];
    float scaled[8];
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const int at = column + 4 * quarter;
      const float4 score = *reinterpret_cast<const float4*>(scores + row * kScorePitch + at);
      const float4 sums = *reinterpret_cast<const float4*>(da_cumsum + at);
      const float4 dt = *reinterpret_cast<const float4*>(da_cumsum + kChunk + at);
      const auto set_scaled = [&](int i, float value, float to, float step) {
        const float decayed = __fmul_rn(value, cuda::exp2_approx(__fsub_rn(sum, to)));
        scaled[4 * quarter + i] = at + i <= row ? __fmul_rn(decayed, step) : 0.0F;
      };
      set_scaled(0, score.x, sums.x, dt.x);
      set_scaled(1, score.y, sums.y, dt.y);
      set_scaled(2, score.z, sums.z, dt.z);
      set_scaled(3, score.w, sums.w, dt.w);
    }
    std::uint32_t hi[4];
    std::uint32_t lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_hi_lo(scaled[2 * i], scaled[2 * i + 1], hi[i], lo[i]);
    const std::uint32_t target = tile_at(intra_chunk_scores, row, column, kIntraChunkPitch);
    cuda::store_shared(target, make_uint4(hi[0], hi[1], hi[2], hi[3]));
    cuda::store_shared(target + kChunk * kIntraChunkPitch, make_uint4(lo[0], lo[1], lo[2], lo[3]));
  }
}

// A warp's outputs of a chunk: element [m][t][e] is token 16 m + row() + e / 2 · 8, dim first_dim + 8 t + column() + e
// % 2.
struct OutputTile {
  float y[kChunk / 16][2][4];
};

// y += C · Sᵀ. The state in registers is the B operand.
template <class Element, int kStates>
__device__ __forceinline__ void multiply_state(OutputTile& rows, const StateTile<kStates>& state, std::uint32_t c,
                                               int lane) {
  constexpr int kPitch = pitch_of(kStates);
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    std::uint32_t hi[2][2];
    std::uint32_t lo[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&s)[4] = state.s[2 * k + half];
        split_hi_lo(s[2 * t], s[2 * t + 1], hi[t][half], lo[t][half]);
      }
    }
#pragma unroll
    for (int m = 0; m < kChunk / 16; ++m) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(c, 16 * m, 16 * k, kPitch) + down_first(lane, kPitch));
      const InputOperand<Element, 4> operand(raw);
      multiply_right<Element>(rows.y[m][0], operand, hi[0], lo[0]);
      multiply_right<Element>(rows.y[m][1], operand, hi[1], lo[1]);
    }
  }
}

// y += intra-chunk scores · x, for blocks on and below the diagonal.
template <class Element>
__device__ __forceinline__ void multiply_scores(OutputTile& rows, const WarpCoord& coord,
                                                std::uint32_t intra_chunk_scores, std::uint32_t x, int x_pitch) {
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    std::uint32_t raw[4];
    load_matrix_transposed(raw, tile_at(x, 16 * k, coord.first_dim, x_pitch) + down_first(coord.lane, x_pitch));
    const InputOperand<Element, 4> operand(raw);
#pragma unroll
    for (int m = k; m < kChunk / 16; ++m) {
      std::uint32_t hi[4];
      std::uint32_t lo[4];
      const std::uint32_t at =
          tile_at(intra_chunk_scores, 16 * m, 16 * k, kIntraChunkPitch) + down_first(coord.lane, kIntraChunkPitch);
      load_matrix(hi, at);
      load_matrix(lo, at + kChunk * kIntraChunkPitch);
      multiply_left(rows.y[m][0], hi, lo, operand, 0);
      multiply_left(rows.y[m][1], hi, lo, operand, 1);
    }
  }
}

// Loads two adjacent elements; `aligned`: as one word.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* at, bool aligned) {
  if (aligned) return __ldg(reinterpret_cast<const std::uint32_t*>(at));
  return at[0] | static_cast<std::uint32_t>(at[1]) << 16;
}

// Adds D · x, applies the gate, rounds and stores. Lanes exchange pairs, so that each stores four adjacent elements.
template <class Element>
__device__ __forceinline__ void store_output(const SsmParams& p, const WarpCoord& coord, const OutputTile& rows,
                                             std::int64_t first_row, int tokens, std::uint32_t x, int x_pitch) {
  constexpr int kStep = 8;  // stride of a lane's rows
  const float skip = p.d != nullptr ? p.d[coord.head] : 0.0F;
  const bool odd = coord.lane % 2 != 0;
  const int dim = coord.first_dim + coord.column();
  const int dim_written = odd ? dim + 8 - 2 : dim;
  const std::int64_t row = first_row + coord.row();
  auto* target = static_cast<std::uint16_t*>(p.y) + row * p.y_token_stride + coord.head * p.y_head_stride + dim_written;
  const auto* z =
      static_cast<const std::uint16_t*>(p.z.data) + row * p.z.token_stride + coord.head * p.z.head_stride + dim;
#pragma unroll
  for (int step = 0; step < kChunk / kStep; ++step) {
    const int i = coord.row() + kStep * step;
    std::uint32_t packed[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float first = rows.y[step / 2][t][step % 2 * 2];
      float second = rows.y[step / 2][t][step % 2 * 2 + 1];
      if (p.d != nullptr) {
        const float2 operand = unpack(
            static_cast<std::uint32_t>(cuda::load_shared_number(tile_at(x, i, dim + 8 * t, x_pitch))), Element());
        first = __fmaf_rn(skip, operand.x, first);
        second = __fmaf_rn(skip, operand.y, second);
      }
      if (p.z.data != nullptr && i < tokens && dim + 8 * t < p.head_dim) {
        const float2 gate = unpack(load_pair(z + 8 * t, p.z.aligned), Element());
        first = __fmul_rn(first, cuda::silu(gate.x));
        second = __fmul_rn(second, cuda::silu(gate.y));
      }
      packed[t] = cuda::MmaTraits<Element>::pack(first, second);
    }
    const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? packed[0] : packed[1], 1);
    const std::uint32_t low = odd ? other : packed[0];
    const std::uint32_t high = odd ? packed[1] : other;
    if (i < tokens && dim_written < p.head_dim) {
      if (p.y_aligned) {
        *reinterpret_cast<uint2*>(target) = make_uint2(low, high);
      } else {
        target[0] = static_cast<std::uint16_t>(low);
        target[1] = static_cast<std::uint16_t>(low >> 16);
        target[2] = static_cast<std::uint16_t>(high);
        target[3] = static_cast<std::uint16_t>(high >> 16);
      }
    }
    target += kStep * p.y_token_stride;
    z += kStep * p.z.token_stride;
  }
}

template <int kStates>
constexpr int finish_threads() {
  return kStates <= 128 ? 384 : 256;
}

template <class Element, int kStates>
__global__ void __launch_bounds__(finish_threads<kStates>(), 1) ssd_finish_kernel(const __grid_constant__ SsdParams p) {
  extern __shared__ __align__(16) float ssd_memory[];
  const HeadBlock heads = block_of_heads(p);
  const ChunkPipeline<kStates> pipeline{p, cuda::shared_address(ssd_memory), segment_of_cta(p), heads};
  const WarpCoord coord(heads, p.shape);
  const bool present = coord.head_index < heads.count;
  float* const scores = ssd_memory + p.layout.scores / 4;
  float* const prefix_decay = ssd_memory + p.layout.decays / 4 + 2 * coord.head_index * kChunk;
  float* const state_scale = prefix_decay + kChunk;
  const std::uint32_t intra_chunk_scores =
      pipeline.memory + p.layout.intra_chunk_scores + coord.head_index * 2 * kChunk * kIntraChunkPitch;

  // Loads the state before the segment.
  StateTile<kStates> state{};
  if (present) {
    const std::int64_t state_floats = std::int64_t{p.scan.head_dim} * p.scan.state_dim;
    const SegmentCoord& segment = pipeline.coord;
    const std::int64_t of_segment = segment.index * p.scan.heads + coord.head;
    const std::int64_t of_super = segment.super_segment * p.scan.heads + coord.head;
    const float* const local = segment.first_of_super ? nullptr : p.scan.states + of_segment * state_floats;
    const float* const before = segment.from_zero ? nullptr : p.scan.super_states + of_super * state_floats;
    const float decay = cuda::exp2_approx(segment.first_of_super ? 0.0F : p.scan.logs_before[of_segment]);
    state.visit(p.scan, coord, [&](float& first, float& second, int offset) {
      const float2 m = cuda::state_pair(local, offset);
      const float2 t = cuda::state_pair(before, offset);
      first = __fmaf_rn(decay, t.x, m.x);
      second = __fmaf_rn(decay, t.y, m.y);
    });
  }

  pipeline.for_each_chunk(true, [&](int chunk, int stage) {
    const std::uint32_t x = pipeline.x(stage, coord.head_index);
    const float* const da_cumsum = ssd_memory + pipeline.da_cumsum(stage, coord.head_index);
    compute_scores<Element, kStates>(pipeline.c(stage), pipeline.b(stage), p.scan.scale, scores);
    OutputTile rows{};
    if (present) {
      for (int i = coord.thread(); i < kChunk; i += p.shape.warps * 32)
        prefix_decay[i] = __fmul_rn(cuda::exp2_approx(da_cumsum[i]), p.scan.scale);
      compute_state_scale(da_cumsum, state_scale, coord, p.shape.warps);
      multiply_state<Element>(rows, state, pipeline.c(stage), coord.lane);
    }
    __syncthreads();                                                     // the scores are written
    if (!present) return head_barrier(coord.head_index, p.shape.warps);  // racecheck requires the barrier of every warp
    compute_intra_chunk_scores(scores, da_cumsum, intra_chunk_scores, coord, p.shape.warps);
#pragma unroll
    for (int m = 0; m < kChunk / 16; ++m) {
      const float above = prefix_decay[16 * m + coord.row()];
      const float below = prefix_decay[16 * m + coord.row() + 8];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        rows.y[m][t][0] = __fmul_rn(rows.y[m][t][0], above);
        rows.y[m][t][1] = __fmul_rn(rows.y[m][t][1], above);
        rows.y[m][t][2] = __fmul_rn(rows.y[m][t][2], below);
        rows.y[m][t][3] = __fmul_rn(rows.y[m][t][3], below);
      }
    }
    head_barrier(coord.head_index, p.shape.warps);  // the intra-chunk scores are written
    multiply_scores<Element>(rows, coord, intra_chunk_scores, x, pipeline.x_pitch());
    store_output<Element>(p.scan, coord, rows, pipeline.coord.row + chunk * kChunk,
                          pipeline.coord.tokens - chunk * kChunk, x, pipeline.x_pitch());
    if (chunk + 1 < pipeline.chunks()) {
      accumulate_chunk<Element>(state, coord, x, pipeline.x_pitch(), pipeline.b(stage), state_scale,
                                cuda::exp2_approx(da_cumsum[kChunk - 1]));
    }
  });
}

// Launches of sm80_ssd for one element type and state_dim. kernels/instances.cmake lists its instantiations.

// Max. dynamic shared memory of a CTA, in bytes.
inline int max_shared(int device) {
  int shared = 0;
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return shared;
}

// Chooses the most heads, then the most stages, that shared memory and max_threads allow. One head and one stage always
// fit: ssd_missing() has checked.
inline SsdShape shape_of(const SsmParams& p, int state_columns, bool with_outputs, int max_threads, int device) {
  const int shared = max_shared(device);
  SsdShape shape;
  shape.warps = (p.head_dim + kWarpDims - 1) / kWarpDims;
  for (int heads = std::min({kMaxHeadsPerCta, p.group_heads, max_threads / 32 / shape.warps}); heads > 0; --heads) {
    for (const int stages : {2, 1}) {
      shape.heads = heads;
      shape.stages = stages;
      if (layout_of(shape, state_columns, with_outputs).total <= shared) return shape;
    }
  }
  return shape;
}

// Loads a kernel onto the current device, and allows it all shared memory that a CTA can have. A launch requests what
// its shape needs.
template <class Kernel>
void load_ssd(Kernel kernel) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared(device)),
             "cudaFuncSetAttribute");
}

template <class Kernel>
void launch_ssd(Kernel kernel, const SsmParams& p, int state_columns, bool with_outputs, int max_threads, int device,
                cudaStream_t stream) {
  SsdParams params{p, shape_of(p, state_columns, with_outputs, max_threads, device), {}, 0};
  const SsdShape& shape = params.shape;
  params.blocks = head_blocks(p, shape.heads);
  params.layout = layout_of(shape, state_columns, with_outputs);
  const int bytes = params.layout.total;
  const auto ctas = static_cast<unsigned>(params.blocks) * static_cast<unsigned>(p.segments);
  kernel<<<ctas, static_cast<unsigned>(shape.heads * shape.warps * 32), static_cast<std::size_t>(bytes), stream>>>(
      params);
  check_cuda(cudaGetLastError(), "sm80_ssd");
}

template <class Element, int kStates>
constexpr SsdLauncher ssd_launcher() {
  return {
      [] {
        load_ssd(ssd_state_kernel<Element, kStates>);
        load_ssd(ssd_finish_kernel<Element, kStates>);
      },
      [](const SsmParams& p, int device, cudaStream_t stream) {
        launch_ssd(ssd_state_kernel<Element, kStates>, p, kStates, false, state_threads<kStates>(), device, stream);
      },
      [](const SsmParams& p, int device, cudaStream_t stream) {
        launch_ssd(ssd_finish_kernel<Element, kStates>, p, kStates, true, finish_threads<kStates>(), device, stream);
      },
      [](int head_dim) {
        return static_cast<std::size_t>(layout_of({1, (head_dim + kWarpDims - 1) / kWarpDims, 1}, kStates, true).total);
      }};
}

}  // namespace ringattn::sm80
