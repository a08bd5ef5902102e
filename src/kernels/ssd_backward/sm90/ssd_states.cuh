// SPDX-License-Identifier: Apache-2.0
// States of segments, and gradients of states, on Hopper: the states kernel of sm90_ssd (ssm/sm90/ssd_state.cuh) in
// both directions. With kExpand it starts from the state before the segment, or the gradient after it, and stores that
// of each chunk, rounded to bf16.
#pragma once

#include "kernels/common/cuda/pdl.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/ssd_backward/cuda/ssd_backward_device.cuh"
#include "kernels/ssd_backward/sm90/ssd_rows.hpp"
#include "kernels/ssm/sm90/ssd_state.cuh"

namespace ringattn::sm90 {

struct HopperSsdStates {
  HopperSsd ssd;
  std::int32_t first_segment;  // of the launch
  Bf16* chunk_states;          // SsdStatesParams::chunk_states
};
static_assert(sizeof(HopperSsdStates) <= 4096, "kernel arguments are at most 4 KiB");

// Loads the state before the segment, or the gradient after it.
template <int kStates>
__device__ __forceinline__ void load_state(float (&state)[kStates / 8][4],
                                           const SsdDimBlock<kStates, false>& dim_block) {
  const cuda::SegmentCoord& segment = dim_block.cta_chunks.segment;
  const SsmParams& s = dim_block.p.scan;
  const std::int64_t offset_of_block = dim_block.state_offset();
  const float* const local =
      segment.first_of_super ? nullptr : s.states + segment.index * dim_block.all_states() + offset_of_block;
  const float* const before =
      segment.from_zero ? nullptr : s.super_states + segment.super_segment * dim_block.all_states() + offset_of_block;
  const float log = segment.first_of_super ? 0.0F : s.logs_before[segment.index * s.heads + dim_block.head];
  const float decay = cuda::exp2_approx(log);
  visit_state<kStates>(state, [&](float& first, float& second, int offset) {
    const float2 m = cuda::state_pair(local, offset);
    const float2 t = cuda::state_pair(before, offset);
    first = __fmaf_rn(decay, t.x, m.x);
    second = __fmaf_rn(decay, t.y, m.y);
  });
}

// Shared memory of the kernel. With kExpand a dim block has a tile for the state of a chunk after the layout of
// sm90_ssd.
template <int kStates>
struct ChunkStateTiles {
  static constexpr int kBytes = kDimBlockDims * kStates * 2;
  static constexpr int kFirst = (SsdLayout<kStates, false>::kBytes + 127) / 128 * 128;
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kFirst + kDimBlocksPerCta * kBytes, 1024);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Stores a state, rounded, in the order of cuda::chunk_state_offset(), by TMA from `tile` in shared memory. Each warp
// stores its own 16 dims.
template <int kStates>
__device__ __forceinline__ void store_chunk_state(const float (&state)[kStates / 8][4], std::uint32_t tile,
                                                  Bf16* target) {
  using Mma = cuda::MmaTraits<Bf16>;
  constexpr int kPanelBytes = cuda::panel_bytes(kDimBlockDims);
  constexpr int kWarpBytes = kPanelBytes / 4;
  const int lane = thread_of_warpgroup() % 32;
  const int first = warp_of_warpgroup() * kWarpBytes;  // of the warp in a panel
  if (lane == 0) tma_store_wait_read();                // the tile's last store has read it
  __syncwarp();
  const std::uint32_t row = tile + static_cast<std::uint32_t>(first) + cuda::swizzled(lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kStates / 16; ++k) {
    const float(&left)[4] = state[2 * k];
    const float(&right)[4] = state[2 * k + 1];
    store_matrix((row ^ static_cast<std::uint32_t>(k % 4 << 5)) + static_cast<std::uint32_t>(k / 4 * kPanelBytes),
                 {Mma::pack(left[0], left[1]), Mma::pack(left[2], left[3]), Mma::pack(right[0], right[1]),
                  Mma::pack(right[2], right[3])});
  }
  proxy_fence();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int panel = 0; panel < kStates / 64; ++panel) {
      const int offset = panel * kPanelBytes + first;
      tma_store_bytes(reinterpret_cast<char*>(target) + offset, tile + static_cast<std::uint32_t>(offset), kWarpBytes);
    }
    tma_store_commit();
  }
  __syncwarp();
}

// With a gate, local gradients compute g = dy · silu(z), rounded, and store it for the kernels after them. dy's tile is
// that of x. z's tiles and their barriers follow the layout of sm90_ssd.
template <int kStates>
struct GatedGradientTiles {
  static constexpr int kStages = 2;  // per dim block
  static constexpr int kFirst = (SsdLayout<kStates, false>::kBytes + 1023) / 1024 * 1024;
  static constexpr int kBarriers = kFirst + kDimBlocksPerCta * kStages * kDimBlockTileBytes;
  static constexpr int kBytes = kBarriers + kDimBlocksPerCta * kStages * kBarrierBytes;
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(kSharedBytes <= 227 * 1024 && kStages <= SsdLayout<kStates, false>::kInputStages);
};

// z of a dim block, and g from it.
template <int kStates>
class GatedGradients {
 public:
  using Tiles = GatedGradientTiles<kStates>;
  using DimBlock = SsdDimBlock<kStates, false>;

  __device__ __forceinline__ explicit GatedGradients(const DimBlock& dim_block) : dim_block_(dim_block) {}

  // By one thread.
  __device__ __forceinline__ static void init_barriers(const SsdMemory<kStates, false>& memory) {
    for (int i = 0; i < kDimBlocksPerCta * Tiles::kStages; ++i) barrier_init(barrier(memory, i), 1);
    barrier_init_fence();
  }

  // Issues the load of a chunk's z, after all reads of the z of chunk − kStages. Called by one thread.
  __device__ __forceinline__ void issue_load(int chunk) const {
    const SsdMemory<kStates, false>& memory = dim_block_.memory;
    const int index = dim_block_.index;
    if (chunk >= Tiles::kStages) {
      const int before = chunk - Tiles::kStages;
      barrier_wait(memory.x_empty(index, DimBlock::input_stage(before)), DimBlock::parity(before));
    }
    const std::uint32_t full = barrier(memory, stage(chunk));
    if (!dim_block_.uses_tma(chunk)) {
      barrier_arrive(full);
      return;
    }
    barrier_arrive_expect(full, kDimBlockTileBytes);
    tma_load_box(tile(chunk), &dim_block_.p.c, full, dim_block_.first_dim, dim_block_.head,
                 static_cast<int>(dim_block_.cta_chunks.row(chunk)));
  }

  __device__ __forceinline__ void await(int chunk) const {
    barrier_wait(barrier(dim_block_.memory, stage(chunk)), static_cast<std::uint32_t>(chunk / Tiles::kStages) & 1U);
    if (dim_block_.uses_tma(chunk)) return;
    const SsdChunks& chunks = dim_block_.cta_chunks;
    copy_panels<1>(dim_block_.p.scan.z, chunks.row(chunk), dim_block_.head, dim_block_.first_dim, chunks.tokens(chunk),
                   tile(chunk));
  }

  // Replaces a fragment of dy by the same fragment of g, also in its tile. A warp has its own 16 dims of the tiles.
  __device__ __forceinline__ void transform(std::uint32_t (&x)[4], int chunk, int k) const {
    using Pack = cuda::MmaTraits<Bf16>;
    const std::uint32_t at = DimBlock::matrices_of_lane() + static_cast<std::uint32_t>(k) * DimBlock::kStepRowBytes;
    std::uint32_t z[4];
    cuda::load_matrix_transposed(z, tile(chunk) + at);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 of_y = cuda::unpack(x[r], Bf16());
      const float2 gate = cuda::unpack(z[r], Bf16());
      x[r] = Pack::pack(__fmul_rn(of_y.x, cuda::silu(gate.x)), __fmul_rn(of_y.y, cuda::silu(gate.y)));
    }
    __syncwarp();  // all lanes have read dy
    store_matrix_transposed(x_tile(chunk) + at, x);
  }

  // Stores g. On return the warp may release the tile.
  __device__ __forceinline__ void release(int chunk) const {
    proxy_fence();
    dim_block_.sync();  // g is written
    const SsdChunks& chunks = dim_block_.cta_chunks;
    if (dim_block_.uses_tma(chunk)) {
      if (thread_of_warpgroup() == 0) {
        tma_store_box(&dim_block_.p.y, x_tile(chunk), dim_block_.first_dim, dim_block_.head,
                      static_cast<int>(chunks.row(chunk)));
        tma_store_commit();
        tma_store_wait_read();
      }
    } else {
      const SsmParams& s = dim_block_.p.scan;
      auto* const rows = static_cast<std::uint16_t*>(s.y) + chunks.row(chunk) * s.y_token_stride +
                         dim_block_.head * s.y_head_stride + dim_block_.first_dim;
      constexpr int kVectors = kDimBlockDims / kVectorElements;
#pragma unroll 1
      for (int i = thread_of_warpgroup(); i < chunks.tokens(chunk) * kVectors; i += kWarpgroup) {
        *reinterpret_cast<uint4*>(rows + i / kVectors * s.y_token_stride + i % kVectors * kVectorElements) =
            cuda::load_shared_16(x_tile(chunk) + cuda::swizzled(i / kVectors, i % kVectors));
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static std::uint32_t barrier(const SsdMemory<kStates, false>& memory, int nth) {
    return memory.base + static_cast<std::uint32_t>(Tiles::kBarriers + nth * kBarrierBytes);
  }
  __device__ __forceinline__ int stage(int chunk) const {
    return dim_block_.index * Tiles::kStages + chunk % Tiles::kStages;
  }
  __device__ __forceinline__ std::uint32_t tile(int chunk) const {
    return dim_block_.memory.base + static_cast<std::uint32_t>(Tiles::kFirst + stage(chunk) * kDimBlockTileBytes);
  }
  __device__ __forceinline__ std::uint32_t x_tile(int chunk) const {
    return dim_block_.memory.x(dim_block_.index, DimBlock::input_stage(chunk));
  }

  const DimBlock& dim_block_;
};

// Local gradients with a gate: ssd_states_kernel<kStates, true, false> for g = dy · silu(z). In `p`, x is dy, y is g,
// and the map of C, which this kernel does not read, is the map of z.
template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_gated_gradients_kernel(const __grid_constant__ HopperSsd p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, false> memory(ssd_shared);
  const DimBlockCta cta_work = dim_block_cta(p.scan, p.blocks, static_cast<int>(blockIdx.x));
  SsdChunks cta_chunks(p.scan, cta_work, 0, true);
  cta_chunks.segment = cuda::gradient_coord(p.scan, cta_work.segment);
  if (threadIdx.x == 0) {
    memory.init_barriers(cta_chunks.block.count);
    GatedGradients<kStates>::init_barriers(memory);
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdProducerRegisters>();
    const DimBlockInputs<kStates> inputs(p, memory, cta_chunks);
    const int index = warp_of_warpgroup();
    const SsdDimBlock<kStates, false> dim_block(p, memory, cta_chunks, index);
    const GatedGradients<kStates> gated(dim_block);
    constexpr int kDelay = 2;  // as in ssd_state_kernel
    load_chunks<kDelay>(
        p, memory, cta_chunks, [&](int chunk) { inputs.issue_loads(chunk); },
        [&](int chunk) {
          if (index < cta_chunks.block.count && thread_of_warpgroup() % 32 == 0) gated.issue_load(chunk);
          __syncwarp();
          inputs.compute_scales(chunk);
        });
    return;
  }
  reg_alloc<kSsdDimBlockRegisters>();
  if (warpgroup >= cta_chunks.block.count) return;
  const SsdDimBlock<kStates, false> dim_block(p, memory, cta_chunks, warpgroup);
  accumulate_local_state<kStates>(dim_block, GatedGradients<kStates>(dim_block));
  if (thread_of_warpgroup() == 0) tma_store_wait();
}

template <int kStates, bool kReversed, bool kExpand>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_states_kernel(const __grid_constant__ HopperSsdStates p) {
  extern __shared__ unsigned char ssd_shared[];
  const SsdMemory<kStates, false> memory(ssd_shared);
  // The kernel of the gradients may start, because it does not read the states. It ends after this one, so that the
  // next kernel, which waits for it, finds both done.
  if constexpr (kExpand && !kReversed) cuda::pdl_launch_dependents();
  const DimBlockCta cta_work = dim_block_cta(p.ssd.scan, p.ssd.blocks, static_cast<int>(blockIdx.x));
  SsdChunks cta_chunks(p.ssd.scan, cta_work, p.first_segment, kReversed);
  if (kReversed) cta_chunks.segment = cuda::gradient_coord(p.ssd.scan, p.first_segment + cta_work.segment);
  if (threadIdx.x == 0) memory.init_barriers(cta_chunks.block.count);
  __syncthreads();
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == kDimBlocksPerCta) {
    reg_dealloc<kSsdProducerRegisters>();
    const DimBlockInputs<kStates> inputs(p.ssd, memory, cta_chunks);
    constexpr int kDelay = 2;  // as in ssd_state_kernel
    load_chunks<kDelay>(
        p.ssd, memory, cta_chunks, [&](int chunk) { inputs.issue_loads(chunk); },
        [&](int chunk) { inputs.compute_scales(chunk); });
    if constexpr (kExpand && kReversed) cuda::pdl_wait();
    return;
  }
  reg_alloc<kSsdDimBlockRegisters>();
  if (warpgroup >= cta_chunks.block.count) return;
  const SsdDimBlock<kStates, false> dim_block(p.ssd, memory, cta_chunks, warpgroup);
  if constexpr (kExpand) {
    const SsmParams& s = p.ssd.scan;
    float state[kStates / 8][4] = {};
    const std::uint32_t tile = memory.base + static_cast<std::uint32_t>(ChunkStateTiles<kStates>::kFirst +
                                                                        warpgroup * ChunkStateTiles<kStates>::kBytes);
    load_state<kStates>(state, dim_block);
    accumulate_dim_block<kStates>(state, dim_block, [&](int chunk) {
      const std::int64_t index =
          (cta_work.segment * kChunksOfSegment + cta_chunks.at(chunk)) * s.head_count + dim_block.head - s.first_head;
      store_chunk_state<kStates>(state, tile, p.chunk_states + index * (kDimBlockDims * kStates));
    });
    if (thread_of_warpgroup() % 32 == 0) tma_store_wait();
  } else {
    accumulate_local_state<kStates>(dim_block);
  }
}

}  // namespace ringattn::sm90
