// SPDX-License-Identifier: Apache-2.0
// Local states of segments (kernels/ssm.hpp, 1): a CTA folds a segment for some heads of one group, chunk by chunk. A
// warp keeps 16 dims of one head's state in registers; B of a chunk is fetched once for all of them.
#pragma once

#include "kernels/sm80/scan/ssd_tiles.cuh"

namespace ringattn::sm80 {

// What the chunks of a segment are fetched from.
template <int kStates>
struct ChunkSource {
  const SsdParams& p;
  std::uint32_t memory;
  SegmentCoord coord;
  HeadBlock heads;

  __device__ std::uint32_t b(int stage) const { return memory + p.layout.b + stage * tile_bytes(); }
  __device__ std::uint32_t c(int stage) const { return memory + p.layout.c + stage * tile_bytes(); }
  __device__ std::uint32_t x(int stage, int slot) const {
    return memory + p.layout.x + (stage * p.shape.heads + slot) * kChunk * x_pitch();
  }
  // Where the da_cumsum of a head lie, in floats of shared memory: sums, then dt.
  __device__ int da_cumsum(int stage, int slot) const {
    return p.layout.da_cumsum / 4 + (stage * p.shape.heads + slot) * kChunkDaCumsumFloats;
  }
  __device__ int x_pitch() const { return p.layout.x_pitch; }
  __device__ int chunks() const { return (coord.tokens + kChunk - 1) / kChunk; }

  // Enqueues the copies of a chunk, as one group of each thread.
  __device__ void fetch(int chunk, int stage, bool with_c) const {
    const SsmParams& s = p.scan;
    const std::int64_t row = coord.row + chunk * kChunk;
    const int left = coord.tokens - chunk * kChunk;
    const int rows = left < kChunk ? left : kChunk;
    const auto first = [row](const SsmTensor& tensor, int head) {
      return static_cast<const std::uint16_t*>(tensor.data) + row * tensor.token_stride + head * tensor.head_stride;
    };
    constexpr int kPieces = kStates / kPieceElements;
    fetch_tile(b(stage), pitch_of(kStates), kPieces, first(s.b, heads.group), s.b.token_stride, rows, s.state_dim,
               s.b.aligned);
    if (with_c) {
      fetch_tile(c(stage), pitch_of(kStates), kPieces, first(s.c, heads.group), s.c.token_stride, rows, s.state_dim,
                 s.c.aligned);
    }
#pragma unroll 1
    for (int slot = 0; slot < heads.count; ++slot) {
      fetch_tile(x(stage, slot), x_pitch(), p.shape.warps * kWarpDims / kPieceElements, first(s.x, heads.first + slot),
                 s.x.token_stride, rows, s.head_dim, s.x.aligned);
    }
    constexpr int kStepPieces = kChunkDaCumsumFloats / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < heads.count * kStepPieces; i += static_cast<int>(blockDim.x)) {
      const int slot = i / kStepPieces;
      const std::int64_t from =
          ((coord.index * s.heads + heads.first + slot) * kChunksOfSegment + chunk) * kChunkDaCumsumFloats +
          i % kStepPieces * 4;
      cuda::copy_16(memory + static_cast<std::uint32_t>(da_cumsum(stage, slot) + i % kStepPieces * 4) * 4,
                    s.da_cumsum + from, true);
    }
    cuda::copy_commit();
  }

  // Calls compute(chunk, stage) for every chunk, when it has arrived. The next one is fetched meanwhile where there are
  // two stages.
  template <class Compute>
  __device__ void walk(bool with_c, Compute compute) const {
    const int count = chunks();
    const int ahead = p.shape.stages - 1;  // 0 or 1: & with it is the remainder
#pragma unroll 1
    for (int chunk = -ahead; chunk < count; ++chunk) {
      if (ahead > 0) cuda::copy_wait<0>();
      __syncthreads();  // nobody reads the chunk before any more; with two stages, this one is there
      const int next = chunk + ahead;
      if (next < count) fetch(next, next & ahead, with_c);
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

// The intra_chunk_scores of a chunk's tokens in its state: decays behind them times dt. All threads of a head make
// them.
__device__ __forceinline__ void make_behind(const float* da_cumsum, float* behind, const WarpCoord& coord, int warps) {
  const float last = da_cumsum[kChunk - 1];
  for (int j = coord.thread(); j < kChunk; j += warps * 32) {
    behind[j] = __fmul_rn(cuda::exp2_approx(__fsub_rn(last, da_cumsum[j])), da_cumsum[kChunk + j]);
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
  const ChunkSource<kStates> source{p, cuda::shared_address(ssd_memory), segment_of_cta(p), heads};
  const WarpCoord coord(heads, p.shape);
  const bool present = coord.slot < heads.count;
  float* const behind = ssd_memory + p.layout.factors / 4 + (2 * coord.slot + 1) * kChunk;
  StateTile<kStates> state{};
  source.walk(false, [&](int, int stage) {
    if (!present) return head_barrier(coord.slot, p.shape.warps);  // racecheck wants as many of every warp
    const float* const da_cumsum = ssd_memory + source.da_cumsum(stage, coord.slot);
    make_behind(da_cumsum, behind, coord, p.shape.warps);
    head_barrier(coord.slot, p.shape.warps);
    accumulate_chunk<Element>(state, coord, source.x(stage, coord.slot), source.x_pitch(), source.b(stage), behind,
                              cuda::exp2_approx(da_cumsum[kChunk - 1]));
  });
  if (!present) return;
  float* const target = p.scan.states + (source.coord.index * p.scan.heads + coord.head) *
                                            (std::int64_t{p.scan.head_dim} * p.scan.state_dim);
  state.visit(p.scan, coord, [&](float first, float second, int offset) {
    *reinterpret_cast<float2*>(target + offset) = make_float2(first, second);
  });
}

}  // namespace ringattn::sm80
