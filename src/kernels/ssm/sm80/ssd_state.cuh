// SPDX-License-Identifier: Apache-2.0
// Local states of segments (kernels/ssm/ssm.hpp, 1). A CTA processes a segment for some heads of one group, chunk by
// chunk. A warp keeps 16 dims of one head's state in registers. All heads share B of a chunk in shared memory.
#pragma once

#include "kernels/ssm/sm80/ssd_tiles.cuh"

namespace ringattn::sm80 {

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

}  // namespace ringattn::sm80
