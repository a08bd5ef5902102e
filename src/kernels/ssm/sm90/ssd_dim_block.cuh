// SPDX-License-Identifier: Apache-2.0
// Shared memory, chunks and dim blocks of a CTA of sm90_ssd, and how a dim block's x and dA_cumsum are loaded: one
// thread issues TMA loads several chunks ahead. What TMA cannot read, the whole warpgroup copies. Used by both kernels.
#pragma once

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/sm90/ssd.hpp"

namespace ringattn::sm90 {

inline constexpr int kVectorElements = 8;  // elements of a 16-byte vector

// Named barriers.
inline constexpr int kFirstDimBlockBarrier = 1;
inline constexpr int kProducerBarrier = kFirstDimBlockBarrier + kDimBlocksPerCta;

// Index of the warp in its warpgroup, as a uniform value.
__device__ __forceinline__ int warp_of_warpgroup() {
  return static_cast<int>(warp_uniform(static_cast<std::uint32_t>(thread_of_warpgroup() / 32)));
}

// A CTA's shared memory, as a pointer and as shared-memory addresses.
template <int kStates, bool kOutputs>
struct SsdMemory {
  using Layout = SsdLayout<kStates, kOutputs>;
  unsigned char* bytes;
  std::uint32_t base;

  __device__ __forceinline__ explicit SsdMemory(unsigned char* shared)
      : bytes(cuda::aligned_shared<1024>(shared)), base(cuda::shared_address(bytes)) {}

  __device__ std::uint32_t b(std::uint32_t stage) const { return at(Layout::kB, stage, Layout::kTileBytes); }
  __device__ std::uint32_t c(std::uint32_t stage) const { return at(Layout::kC, stage, Layout::kTileBytes); }
  __device__ std::uint32_t x(int dim_block, int input) const {
    return at(Layout::kX, static_cast<std::uint32_t>(dim_block * Layout::kInputStages + input), kDimBlockTileBytes);
  }
  __device__ std::uint32_t intra_chunk_scores(int dim_block) const {
    return at(Layout::kIntraChunkScores, static_cast<std::uint32_t>(dim_block), kDimBlockTileBytes);
  }
  __device__ std::uint32_t da_cumsum_address(int dim_block, int input) const {
    return at(Layout::kDaCumsum, static_cast<std::uint32_t>(dim_block * Layout::kInputStages + input), kDaCumsumBytes);
  }
  // fp32 [64] dA_cumsum in log2 units, then [64] dt.
  __device__ const float* da_cumsum(int dim_block, int input) const {
    return floats(Layout::kDaCumsum + (dim_block * Layout::kInputStages + input) * kDaCumsumBytes);
  }
  __device__ unsigned char* state_scale(int dim_block, int input) const {
    return bytes + Layout::kStateScale + (dim_block * Layout::kInputStages + input) * Layout::kStateScaleBytes;
  }
  // exp2(dA_cumsum) of a chunk's tokens.
  __device__ float* prefix_decay(int dim_block, int input) const {
    return floats(Layout::kPrefixDecay + (dim_block * Layout::kInputStages + input) * kPrefixDecayBytes);
  }
  __device__ float4* scores(std::uint32_t buffer) const {
    return reinterpret_cast<float4*>(bytes + Layout::kScores + static_cast<int>(buffer) * Layout::kScoreBytes);
  }
  // Barriers: full and empty of B and C, of the shared scores, and of x and dA_cumsum, and full of the state scales.
  // x_empty is used only where another warpgroup loads x.
  __device__ std::uint32_t full(std::uint32_t stage) const { return barrier(stage); }
  __device__ std::uint32_t empty(std::uint32_t stage) const { return barrier(Layout::kStages + stage); }
  __device__ std::uint32_t scores_full(std::uint32_t buffer) const { return barrier(2 * Layout::kStages + buffer); }
  __device__ std::uint32_t scores_empty(std::uint32_t buffer) const {
    return barrier(2 * Layout::kStages + 2 + buffer);
  }
  __device__ std::uint32_t x_full(int dim_block, int input) const { return of_input(0, dim_block, input); }
  __device__ std::uint32_t x_empty(int dim_block, int input) const { return of_input(1, dim_block, input); }
  __device__ std::uint32_t state_scale_full(int dim_block, int input) const { return of_input(2, dim_block, input); }

  // By one thread. `dim_blocks`: of this CTA.
  __device__ void init_barriers(int dim_blocks) const {
    for (std::uint32_t stage = 0; stage < Layout::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4 * dim_blocks);  // all warps of the dim blocks
    }
    for (std::uint32_t buffer = 0; buffer < 2; ++buffer) {
      barrier_init(scores_full(buffer), 4);
      barrier_init(scores_empty(buffer), 4 * dim_blocks);
    }
    for (int dim_block = 0; dim_block < kDimBlocksPerCta; ++dim_block) {
      for (int input = 0; input < Layout::kInputStages; ++input) {
        barrier_init(x_full(dim_block, input), 1);
        barrier_init(x_empty(dim_block, input), 4);
        barrier_init(state_scale_full(dim_block, input), 1);
      }
    }
    barrier_init_fence();
  }

 private:
  __device__ std::uint32_t at(int offset, std::uint32_t index, int stride) const {
    return base + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(stride);
  }
  __device__ std::uint32_t of_input(int which, int dim_block, int input) const {
    return barrier(2 * Layout::kStages + 4 +
                   static_cast<std::uint32_t>((which * kDimBlocksPerCta + dim_block) * Layout::kInputStages + input));
  }
  __device__ std::uint32_t barrier(std::uint32_t nth) const { return at(Layout::kBarriers, nth, kBarrierBytes); }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(bytes + offset); }
};

// The chunks of a CTA's segment, in the direction of time, or against it for gradients of states
// (kernels/ssd_backward).
struct SsdChunks {
  cuda::SegmentCoord segment;
  cuda::HeadBlock block;  // dim blocks, not heads
  bool reversed;

  __device__ explicit SsdChunks(const HopperSsd& p)
      : SsdChunks(p.scan, dim_block_cta(p.scan, p.blocks, static_cast<int>(blockIdx.x)), 0, false) {}
  __device__ SsdChunks(const SsmParams& p, const DimBlockCta& cta_work, std::int64_t first_segment, bool reversed_)
      : segment(cuda::segment_coord(p, first_segment + cta_work.segment)), block(cta_work.block), reversed(reversed_) {}

  __device__ int chunks() const { return (segment.tokens + kChunk - 1) / kChunk; }
  // Index in the segment of the nth chunk.
  __device__ int at(int nth) const { return reversed ? chunks() - 1 - nth : nth; }
  __device__ std::int64_t row(int nth) const { return segment.row + at(nth) * kChunk; }
  // Number of tokens from the chunk's first one to the end of the segment. May exceed kChunk.
  __device__ int tokens(int nth) const { return segment.tokens - at(nth) * kChunk; }
  // True for a chunk of kChunk tokens. A TMA box of a shorter one would include rows of another sequence.
  __device__ bool whole(int nth) const { return tokens(nth) >= kChunk; }
};

// Copies `rows` rows of kPanels · 64 columns from `column` on into panels of 64 rows, and zero-fills the other rows. By
// all threads of a warpgroup. Each thread waits only for its own copies.
template <int kPanels>
__device__ __forceinline__ void copy_panels(const SsmTensor& tensor, std::int64_t row, int head, int column, int rows,
                                            std::uint32_t target) {
  const auto* const source =
      static_cast<const std::uint16_t*>(tensor.data) + row * tensor.token_stride + head * tensor.head_stride + column;
  constexpr int kVectors = cuda::kPanelRowBytes / 16;  // per row of a panel
#pragma unroll 1
  for (int i = thread_of_warpgroup(); i < kChunk * kPanels * kVectors; i += kWarpgroup) {
    const int in_tile = i / (kPanels * kVectors);
    const int vector = i % (kPanels * kVectors);
    const bool present = in_tile < rows;
    const std::uint16_t* const from = source + (present ? in_tile : 0) * tensor.token_stride + vector * kVectorElements;
    cuda::copy_chunk(target + static_cast<std::uint32_t>(vector / kVectors * kDimBlockTileBytes) +
                         cuda::swizzled(in_tile, vector % kVectors),
                     reinterpret_cast<const char*>(from), present, tensor.aligned);
  }
  cuda::copy_commit();
  cuda::copy_wait<0>();
}

// The dim block of a warpgroup, and its inputs.
template <int kStates, bool kOutputs>
struct SsdDimBlock {
  using Memory = SsdMemory<kStates, kOutputs>;
  static constexpr int kInputStages = Memory::Layout::kInputStages;

  const HopperSsd& p;
  const Memory& memory;
  const SsdChunks& cta_chunks;
  int index;  // index in the CTA
  int head;
  int first_dim;           // in the head
  const float* da_cumsum;  // of the segment and head, [chunks, 2, 64]

  __device__ __forceinline__ SsdDimBlock(const HopperSsd& params, const Memory& shared, const SsdChunks& where, int nth)
      : p(params),
        memory(shared),
        cta_chunks(where),
        index(nth),
        head((where.block.first + nth) >> (params.blocks.dim_blocks - 1)),  // a head has one or two dim blocks
        first_dim(((where.block.first + nth) & (params.blocks.dim_blocks - 1)) * kDimBlockDims),
        da_cumsum(params.scan.da_cumsum +
                  (where.segment.index * params.scan.heads + head) * (kChunksOfSegment * kChunkDaCumsumFloats)) {}

  __device__ __forceinline__ static int input_stage(int chunk) { return chunk % kInputStages; }
  __device__ __forceinline__ bool uses_tma(int chunk) const { return p.maps_x && cta_chunks.whole(chunk); }

  // Issues the loads of x and dA_cumsum of a chunk. By one thread, after all reads of chunk − kInputStages.
  __device__ __forceinline__ void issue_loads(int chunk) const {
    const int input = input_stage(chunk);
    const std::uint32_t barrier = memory.x_full(index, input);
    const bool with_x = uses_tma(chunk);
    barrier_arrive_expect(barrier, kDaCumsumBytes + (with_x ? kDimBlockTileBytes : 0));
    tma_load_bytes(memory.da_cumsum_address(index, input), da_cumsum + cta_chunks.at(chunk) * kChunkDaCumsumFloats,
                   kDaCumsumBytes, barrier);
    if (with_x) {
      tma_load_box(memory.x(index, input), &p.x, barrier, first_dim, head, static_cast<int>(cta_chunks.row(chunk)));
    }
  }
  __device__ __forceinline__ static std::uint32_t parity(int chunk) {
    return static_cast<std::uint32_t>(chunk / kInputStages) & 1U;
  }
  // Waits for x and dA_cumsum. If TMA does not load x, copies it: then a barrier is needed before other threads' x is
  // read.
  __device__ __forceinline__ void await(int chunk) const {
    const int input = input_stage(chunk);
    barrier_wait(memory.x_full(index, input), parity(chunk));
    if (uses_tma(chunk)) return;
    copy_panels<1>(p.scan.x, cta_chunks.row(chunk), head, first_dim, cta_chunks.tokens(chunk), memory.x(index, input));
  }
  __device__ __forceinline__ void sync() const { named_sync(kFirstDimBlockBarrier + index, kWarpgroup); }

  // Address of this lane's row for ldmatrix and stmatrix, relative to 16 tokens of a dim block's tile: matrices of 8 ×
  // 8, first along the warp's 16 dims, then along tokens.
  __device__ __forceinline__ static std::uint32_t matrices_of_lane() {
    const int lane = thread_of_warpgroup() % 32;
    const int vector = thread_of_warpgroup() / 32 * 2 + lane / 8 % 2;
    return cuda::swizzled(lane / 16 * 8 + lane % 8, vector);
  }
  static constexpr std::uint32_t kStepRowBytes = 16 * kDimBlockTileBytes / kChunk;  // bytes of 16 tokens

  // Element [t][e] of the state in registers is dim tile_row_of_thread() + e / 2 · 8 of the dim block and column 8 t +
  // column_of_thread() + e % 2.
  __device__ __forceinline__ static int column_of_thread() { return thread_of_cta() % 4 * 2; }
  // Offset of the state in an array [heads, head_dim, state_dim].
  __device__ __forceinline__ std::int64_t state_offset() const {
    return (std::int64_t{head} * p.scan.head_dim + first_dim + tile_row_of_thread()) * kStates + column_of_thread();
  }
  __device__ __forceinline__ std::int64_t all_states() const {
    return std::int64_t{p.scan.heads} * p.scan.head_dim * kStates;
  }
};

// Scales of two tokens in the state after the chunk: exp2(dA_cumsum[last] − dA_cumsum[i]) · dt[i].
__device__ __forceinline__ float2 state_scale_pair(const float* da_cumsum, int pair) {
  const float last = da_cumsum[kChunk - 1];
  const float2 sums = reinterpret_cast<const float2*>(da_cumsum)[pair];
  const float2 dt = reinterpret_cast<const float2*>(da_cumsum + kChunk)[pair];
  return make_float2(__fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.x)), dt.x),
                     __fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.y)), dt.y));
}
__device__ __forceinline__ float decay_of_chunk(const float* da_cumsum) {
  return cuda::exp2_approx(da_cumsum[kChunk - 1]);
}

// Issues S += scaled x ⊗ B for tokens [16 · kBegin, 16 · kEnd) of a chunk. `b`: address of B's tile. `scaled_x`: A
// fragments of 16 tokens each, as kParts addends.
template <int kStates, int kBegin, int kEnd, int kParts>
__device__ __forceinline__ void accumulate_tokens(float (&state)[kStates / 8][4],
                                                  const std::uint32_t (&scaled_x)[4][kParts][4], std::uint32_t b) {
  const std::uint32_t low = warp_uniform(descriptor_low(b, kDimBlockTileBytes));
  wgmma_fence();
#pragma unroll
  for (int k = kBegin; k < kEnd; ++k) {
    const std::uint64_t right = descriptor(low + static_cast<std::uint32_t>(k * 16 * cuda::kPanelRowBytes >> 4));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Wgmma<__nv_bfloat16, kStates>::rs(state, scaled_x[k][part], right, true);
    }
  }
  wgmma_commit();
}

}  // namespace ringattn::sm90
