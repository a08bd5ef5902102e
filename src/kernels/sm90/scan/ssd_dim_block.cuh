// SPDX-License-Identifier: Apache-2.0
// What a CTA of sm90_ssd knows of its chunks_of_cta, and how a warpgroup gets x and da_cumsum of its dim_block of a
// head: one of its threads has the copy engine fetch them, chunks ahead; what the copy engine can't read, all of its
// threads copy.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/scan/bf16_pair.cuh"
#include "kernels/cuda/scan/ssm_device.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/threads.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/scan/ssd.hpp"

namespace ringattn::sm90 {

inline constexpr int kPieceElements = 8;  // 16 bytes

// Named barriers.
inline constexpr int kFirstDimBlockBarrier = 1;
inline constexpr int kDimBlockFetchBarrier = kFirstDimBlockBarrier + kDimBlocksPerCta;

// The warp's chunks_of_cta in its warpgroup.
__device__ __forceinline__ int warp_of_warpgroup() {
  return static_cast<int>(of_warp(static_cast<std::uint32_t>(thread_of_warpgroup() / 32)));
}

// A CTA's shared memory by addresses and as numbers.
template <int kStates, bool kOutputs>
struct SsdMemory {
  using Layout = SsdLayout<kStates, kOutputs>;
  unsigned char* bytes;
  std::uint32_t base;

  __device__ __forceinline__ explicit SsdMemory(unsigned char* shared)
      : bytes(shared + (1024U - cuda::shared_address(shared) % 1024U) % 1024U), base(cuda::shared_address(bytes)) {}

  __device__ std::uint32_t b(std::uint32_t stage) const { return at(Layout::kB, stage, Layout::kTileBytes); }
  __device__ std::uint32_t c(std::uint32_t stage) const { return at(Layout::kC, stage, Layout::kTileBytes); }
  __device__ std::uint32_t x(int dim_block, int input) const {
    return at(Layout::kX, static_cast<std::uint32_t>(dim_block * Layout::kInputs + input), kDimBlockTileBytes);
  }
  __device__ std::uint32_t intra_chunk_scores(int dim_block) const {
    return at(Layout::kIntraChunkScores, static_cast<std::uint32_t>(dim_block), kDimBlockTileBytes);
  }
  __device__ std::uint32_t da_cumsum_address(int dim_block, int input) const {
    return at(Layout::kSteps, static_cast<std::uint32_t>(dim_block * Layout::kInputs + input), kDaCumsumBytes);
  }
  // Sums of logarithms of a chunk's tokens, then dt.
  __device__ const float* da_cumsum(int dim_block, int input) const {
    return floats(Layout::kSteps + (dim_block * Layout::kInputs + input) * kDaCumsumBytes);
  }
  __device__ unsigned char* behind(int dim_block, int input) const {
    return bytes + Layout::kBehind + (dim_block * Layout::kInputs + input) * Layout::kBehindBytes;
  }
  // Decays up to tokens.
  __device__ float* up_to(int dim_block, int input) const {
    return floats(Layout::kUpTo + (dim_block * Layout::kInputs + input) * kUpToBytes);
  }
  __device__ float4* scores(std::uint32_t buffer) const {
    return reinterpret_cast<float4*>(bytes + Layout::kScores + static_cast<int>(buffer) * Layout::kScoreBytes);
  }
  // Barriers: B and C of a stage are there; everybody is done with them; the same of scores; x and da_cumsum are there;
  // where others fetch them, the dim_block is done with them; and what follows from da_cumsum is there.
  __device__ std::uint32_t full(std::uint32_t stage) const { return barrier(stage); }
  __device__ std::uint32_t empty(std::uint32_t stage) const { return barrier(Layout::kStages + stage); }
  __device__ std::uint32_t scores_full(std::uint32_t buffer) const { return barrier(2 * Layout::kStages + buffer); }
  __device__ std::uint32_t scores_empty(std::uint32_t buffer) const {
    return barrier(2 * Layout::kStages + 2 + buffer);
  }
  __device__ std::uint32_t x_full(int dim_block, int input) const { return of_input(0, dim_block, input); }
  __device__ std::uint32_t x_empty(int dim_block, int input) const { return of_input(1, dim_block, input); }
  __device__ std::uint32_t behind_full(int dim_block, int input) const { return of_input(2, dim_block, input); }

  // By one thread; `dim_blocks` of heads are computed.
  __device__ void init_barriers(int dim_blocks) const {
    for (std::uint32_t stage = 0; stage < Layout::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4 * dim_blocks);  // their warps
    }
    for (std::uint32_t buffer = 0; buffer < 2; ++buffer) {
      barrier_init(scores_full(buffer), 4);
      barrier_init(scores_empty(buffer), 4 * dim_blocks);
    }
    for (int dim_block = 0; dim_block < kDimBlocksPerCta; ++dim_block) {
      for (int input = 0; input < Layout::kInputs; ++input) {
        barrier_init(x_full(dim_block, input), 1);
        barrier_init(x_empty(dim_block, input), 4);
        barrier_init(behind_full(dim_block, input), 1);
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
                   static_cast<std::uint32_t>((which * kDimBlocksPerCta + dim_block) * Layout::kInputs + input));
  }
  __device__ std::uint32_t barrier(std::uint32_t nth) const { return at(Layout::kBarriers, nth, kBarrierBytes); }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(bytes + offset); }
};

// The chunks that a CTA walks over.
struct SsdChunks {
  cuda::SegmentCoord segment;
  cuda::HeadBlock block;  // of dim_blocks of heads

  __device__ explicit SsdChunks(const HopperSsd& p)
      : SsdChunks(p.scan, dim_block_cta(p.scan, p.blocks, static_cast<int>(blockIdx.x))) {}

  __device__ int chunks() const { return (segment.tokens + kChunk - 1) / kChunk; }
  __device__ std::int64_t row(int chunk) const { return segment.row + chunk * kChunk; }
  // Tokens that there are of a chunk, if not more.
  __device__ int tokens(int chunk) const { return segment.tokens - chunk * kChunk; }
  // Copies of a chunk that ends early would be of rows of another sequence.
  __device__ bool whole(int chunk) const { return tokens(chunk) >= kChunk; }

 private:
  __device__ SsdChunks(const SsmParams& p, const DimBlockCta& unit)
      : segment(cuda::segment_coord(p, unit.segment)), block(unit.block) {}
};

// Copies `rows` rows of kPanels · 64 columns from `column` on into panels of 64 rows, and zeros behind them. By all
// threads of a warpgroup; each waits for its own copies.
template <int kPanels>
__device__ __forceinline__ void copy_panels(const SsmTensor& tensor, std::int64_t row, int head, int column, int rows,
                                            std::uint32_t target) {
  const auto* const source =
      static_cast<const std::uint16_t*>(tensor.data) + row * tensor.token_stride + head * tensor.head_stride + column;
  constexpr int kPieces = cuda::kPanelRowBytes / 16;  // of a panel's row
#pragma unroll 1
  for (int i = thread_of_warpgroup(); i < kChunk * kPanels * kPieces; i += kWarpgroup) {
    const int in_tile = i / (kPanels * kPieces);
    const int piece = i % (kPanels * kPieces);
    const bool present = in_tile < rows;
    const std::uint16_t* const from = source + (present ? in_tile : 0) * tensor.token_stride + piece * kPieceElements;
    cuda::copy_chunk(target + static_cast<std::uint32_t>(piece / kPieces * kDimBlockTileBytes) +
                         cuda::swizzled(in_tile, piece % kPieces),
                     reinterpret_cast<const char*>(from), present, tensor.aligned);
  }
  cuda::copy_commit();
  cuda::copy_wait<0>();
}

// A warpgroup's dim_block of a head, and its inputs.
template <int kStates, bool kOutputs>
struct SsdDimBlock {
  using Memory = SsdMemory<kStates, kOutputs>;
  static constexpr int kInputs = Memory::Layout::kInputs;

  const HopperSsd& p;
  const Memory& memory;
  const SsdChunks& chunks_of_cta;
  int slot;  // of the CTA's dim_blocks
  int head;
  int first_dim;           // of the head
  const float* da_cumsum;  // of the segment and head

  __device__ __forceinline__ SsdDimBlock(const HopperSsd& params, const Memory& shared, const SsdChunks& where, int nth)
      : p(params),
        memory(shared),
        chunks_of_cta(where),
        slot(nth),
        head((where.block.first + nth) >> (params.blocks.dim_blocks - 1)),  // one or two dim_blocks
        first_dim(((where.block.first + nth) & (params.blocks.dim_blocks - 1)) * kDimBlockDims),
        da_cumsum(params.scan.da_cumsum +
                  (where.segment.index * params.scan.heads + head) * (kChunksOfSegment * kChunkDaCumsumFloats)) {}

  __device__ __forceinline__ static int input_of(int chunk) { return chunk % kInputs; }
  __device__ __forceinline__ bool fetched(int chunk) const { return p.maps_x && chunks_of_cta.whole(chunk); }

  // Asks for x and da_cumsum of a chunk. By one thread, once nobody reads those of chunk − kInputs any more.
  __device__ __forceinline__ void fetch(int chunk) const {
    const int input = input_of(chunk);
    const std::uint32_t barrier = memory.x_full(slot, input);
    const bool with_x = fetched(chunk);
    barrier_arrive_expect(barrier, kDaCumsumBytes + (with_x ? kDimBlockTileBytes : 0));
    tma_load_bytes(memory.da_cumsum_address(slot, input), da_cumsum + chunk * kChunkDaCumsumFloats, kDaCumsumBytes,
                   barrier);
    if (with_x) {
      tma_load_box(memory.x(slot, input), &p.x, barrier, first_dim, head, static_cast<int>(chunks_of_cta.row(chunk)));
    }
  }
  __device__ __forceinline__ static std::uint32_t parity(int chunk) {
    return static_cast<std::uint32_t>(chunk / kInputs) & 1U;
  }
  // Until they are there; x of a chunk that isn't fetched is there for other threads behind a barrier of theirs.
  __device__ __forceinline__ void await(int chunk) const {
    const int input = input_of(chunk);
    barrier_wait(memory.x_full(slot, input), parity(chunk));
    if (fetched(chunk)) return;
    copy_panels<1>(p.scan.x, chunks_of_cta.row(chunk), head, first_dim, chunks_of_cta.tokens(chunk),
                   memory.x(slot, input));
  }
  __device__ __forceinline__ void sync() const { named_sync(kFirstDimBlockBarrier + slot, kWarpgroup); }

  // Where this lane's rows begin, relative to 16 tokens of a dim_block's tile, for matrices of 8 × 8 that follow each
  // other first over dims and then over tokens: 16 dims of the warp.
  __device__ __forceinline__ static std::uint32_t matrices_of_lane() {
    const int lane = thread_of_warpgroup() % 32;
    const int piece = thread_of_warpgroup() / 32 * 2 + lane / 8 % 2;
    return cuda::swizzled(lane / 16 * 8 + lane % 8, piece);
  }
  static constexpr std::uint32_t kStepRowBytes = 16 * kDimBlockTileBytes / kChunk;  // of 16 tokens

  // The state's elements [t][e] are dim tile_row_of_thread() + e / 2 · 8 of the dim_block, column 8 t +
  // column_of_thread() + e % 2.
  __device__ __forceinline__ static int column_of_thread() { return thread_of_cta() % 4 * 2; }
  // Where they lie in an array of states [heads, head_dim, state_dim].
  __device__ __forceinline__ std::int64_t state_offset() const {
    return (std::int64_t{head} * p.scan.head_dim + first_dim + tile_row_of_thread()) * kStates + column_of_thread();
  }
  __device__ __forceinline__ std::int64_t all_states() const {
    return std::int64_t{p.scan.heads} * p.scan.head_dim * kStates;
  }
};

// What a pair of a chunk's tokens is weighed with for the state behind the chunk.
__device__ __forceinline__ float2 intra_chunk_offset(const float* da_cumsum, int pair) {
  const float last = da_cumsum[kChunk - 1];
  const float2 sums = reinterpret_cast<const float2*>(da_cumsum)[pair];
  const float2 dt = reinterpret_cast<const float2*>(da_cumsum + kChunk)[pair];
  return make_float2(__fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.x)), dt.x),
                     __fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.y)), dt.y));
}
__device__ __forceinline__ float decay_of_chunk(const float* da_cumsum) {
  return cuda::exp2_approx(da_cumsum[kChunk - 1]);
}

// Issues S += weighed x ⊗ B of tokens [16 · kBegin, 16 · kEnd) of a chunk. `b` is B's tile; `weighed`: left operands of
// 16 tokens each, in parts whose sum they are.
template <int kStates, int kBegin, int kEnd, int kParts>
__device__ __forceinline__ void accumulate_tokens(float (&state)[kStates / 8][4],
                                                  const std::uint32_t (&weighed)[4][kParts][4], std::uint32_t b) {
  const std::uint32_t low = of_warp(descriptor_low(b, kDimBlockTileBytes));
  wgmma_fence();
#pragma unroll
  for (int k = kBegin; k < kEnd; ++k) {
    const std::uint64_t right = descriptor(low + static_cast<std::uint32_t>(k * 16 * cuda::kPanelRowBytes >> 4));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Wgmma<__nv_bfloat16, kStates>::rs(state, weighed[k][part], right, true);
    }
  }
  wgmma_commit();
}

}  // namespace ringattn::sm90
