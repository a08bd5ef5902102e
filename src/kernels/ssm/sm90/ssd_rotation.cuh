// SPDX-License-Identifier: Apache-2.0
// RoPE of B and C (k and q of linear attention) in shared memory: a warpgroup without a dim block rotates a chunk's
// tiles after they have landed and before the other warpgroups read them. Angles are loaded while the tiles are on the
// way.
#pragma once

#include "kernels/ssm/cuda/rotate_tile.cuh"
#include "kernels/ssm/sm90/ssd_dim_block.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ bool rotates(const HopperSsd& p) { return p.scan.rotation.angles != nullptr; }

// Rotates B, and with kOutputs also C, of all chunks. By a warpgroup.
template <int kStates, bool kOutputs, cuda::RotationUnit kUnit>
__device__ __forceinline__ void rotate_chunks(const HopperSsd& p, const SsdMemory<kStates, kOutputs>& memory,
                                              const SsdChunks& cta_chunks) {
  constexpr int kUnits = 8;  // of a thread: all of 64 half-split or interleaved pairs
  PackedPipelineState<SsdLayout<kStates, kOutputs>::kStages> ring;
  const int chunks = cta_chunks.chunks();
  const int thread = thread_of_warpgroup();
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
    const std::uint32_t stage = ring.stage();
    const int rows = cta_chunks.whole(chunk) ? kChunk : cta_chunks.tokens(chunk);
    cuda::RotationUnits<kUnits, kUnit> units(p.scan.rotation, cta_chunks.row(chunk), rows, kWarpgroup);
    units.load(thread);
    barrier_wait(memory.landed(stage), ring.parity());
    for (int first = thread;;) {
      const auto rotate = [&](std::uint32_t tile) {
        units.template rotate<__nv_bfloat16>(first, [tile](int row, int column) {
          return tile +
                 static_cast<std::uint32_t>(column / cuda::kPanelColumns * kDimBlockTileBytes +
                                            column % kVectorElements * 2) +
                 cuda::swizzled(row, column % cuda::kPanelColumns / kVectorElements);
        });
      };
      rotate(memory.b(stage));
      if constexpr (kOutputs) rotate(memory.c(stage));
      first += kUnits * kWarpgroup;
      if (first - thread >= units.count()) break;
      units.load(first);
    }
    proxy_fence();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory.full(stage));
  }
}

template <int kStates, bool kOutputs>
__device__ __forceinline__ void rotate_chunks(const HopperSsd& p, const SsdMemory<kStates, kOutputs>& memory,
                                              const SsdChunks& cta_chunks) {
  cuda::visit_rotation_unit(p.scan.rotation, [&](auto unit) {
    rotate_chunks<kStates, kOutputs, decltype(unit)::value>(p, memory, cta_chunks);
  });
}

}  // namespace ringattn::sm90
