// SPDX-License-Identifier: Apache-2.0
// State of rows between KV tiles and between KV splits: saved state in memory, merged splits, and the epilogue with
// normalization and stores. softmax_offsets are running maxima of a split's scores before
// AttentionParams::Softmax::exponent is applied.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/merge_arithmetic.cuh"
#include "kernels/attention/cuda/row_end.cuh"
#include "kernels/attention/sm80/tile_step.cuh"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// The first tile row of the rows that this thread's warp computes, possibly together with other warps.
template <class C>
__device__ __forceinline__ int first_row() {
  return static_cast<int>(threadIdx.x) / 32 / C::kSlices * C::kRowBlocks * 16;
}
// The first of this warp's columns of O.
template <class C>
__device__ __forceinline__ int first_column() {
  return C::kSlices == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % C::kSlices * kWarpColumns<C>;
}

// Calls visit(block, half, tile_row) for each row of which this thread holds columns.
template <class C, class Visit>
__device__ __forceinline__ void for_each_row(Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visit(block, half, first_row<C>() + block * 16 + lane / 4 + 8 * half);
    }
  }
}

__device__ __forceinline__ bool present(const cuda::WorkTile& work_tile, int tile_row) {
  return tile_row >= work_tile.valid_row_begin && tile_row < work_tile.valid_row_end;
}

// The sum over a row's quad of threads, in all of them.
__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

template <class C>
__device__ __forceinline__ void begin_split(AttentionState<C>& state, int block, int half) {
  state.m[block][half] = -INFINITY;
  state.l[block][half] = 0.0F;
#pragma unroll
  for (int n = 0; n < kWarpColumns<C> / 8; ++n) {
    state.o[block][n][2 * half] = 0.0F;
    state.o[block][n][2 * half + 1] = 0.0F;
  }
}

// Returns true if this thread writes the scalars of its rows.
template <class C>
__device__ __forceinline__ bool writes_stats() {
  return threadIdx.x % 4 == 0 && first_column<C>() == 0;
}

// This thread's four values of the warp's columns 16n … 16n + 15 of a row: one vector in memory.
template <class C>
__device__ __forceinline__ float4 thread_columns(const AttentionState<C>& state, int block, int half, int n) {
  return {state.o[block][2 * n][2 * half], state.o[block][2 * n][2 * half + 1], state.o[block][2 * n + 1][2 * half],
          state.o[block][2 * n + 1][2 * half + 1]};
}
template <class C>
__device__ __forceinline__ void set_thread_columns(AttentionState<C>& state, int block, int half, int n,
                                                   const float4& x) {
  state.o[block][2 * n][2 * half] = x.x;
  state.o[block][2 * n][2 * half + 1] = x.y;
  state.o[block][2 * n + 1][2 * half] = x.z;
  state.o[block][2 * n + 1][2 * half + 1] = x.w;
}
__device__ __forceinline__ float4 join(const float4& merged, const float4& current, const MergeStep& step) {
  using Arithmetic = cuda::TensorArithmetic;
  return {Arithmetic::join(merged.x, current.x, step), Arithmetic::join(merged.y, current.y, step),
          Arithmetic::join(merged.z, current.z, step), Arithmetic::join(merged.w, current.w, step)};
}

// Partials that the rows of a CTA hold. Rows of a query tile attend to the same KV tiles, so it is the same for all
// rows.
struct HeldPartials {
  bool current;      // the partial of the current KV split, in registers
  bool merged;       // the partial of the merged splits, in memory
  int scratch_slot;  // index in the scratch memory; −1: none is acquired
};

// Memory of the merged partials if the task neither saves nor resumes a state. Else the state holds them. It has
// C::kCtas slots per multiprocessor, and a CTA holds a slot from its first merge to its end. If a device runs more CTAs
// at a time than there are slots, a CTA waits until another one ends.
template <class C>
struct Scratch {
  float* sums;   // [slots, kQueryTile, kDimV]
  float* stats;  // [slots, kQueryTile, 2]: softmax_offset and sum
  int* taken;    // [slots]: 0 or 1
  int slots;

  __device__ explicit Scratch(const cuda::AttentionParams& p)
      : sums(p.state.scratch), slots(p.schedule.multiprocessors * C::kCtas) {
    stats = sums + static_cast<std::int64_t>(slots) * C::kQueryTile * C::kDimV;
    taken = reinterpret_cast<int*>(stats + slots * C::kQueryTile * 2);
  }
};

__device__ __forceinline__ bool merged_in_state(const cuda::AttentionParams& p) {
  return p.state.save || p.state.resume;
}

template <class C>
struct MergedRow {
  float4* sums;  // at [4 n]: this thread's vector of columns 16n … 16n + 15
  float* stats;  // softmax_offset and sum

  __device__ __forceinline__ MergedRow(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile, int head,
                                       int tile_row, const HeldPartials& held) {
    static_assert(cuda::kMergedSum == cuda::kMergedOffset + 1);
    float* row_sums;
    if (merged_in_state(p)) {
      const cuda::StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, C::kDimV, work_tile.row + tile_row, head);
      row_sums = state_ptrs.merged;
      stats = state_ptrs.stats + cuda::kMergedOffset;
    } else {
      const Scratch<C> scratch(p);
      const std::int64_t row = held.scratch_slot * C::kQueryTile + tile_row;
      row_sums = scratch.sums + row * C::kDimV;
      stats = scratch.stats + row * 2;
    }
    sums = reinterpret_cast<float4*>(row_sums + first_column<C>() + threadIdx.x % 4 * 4);
  }
};

// Acquires a scratch slot. Called by all threads of the CTA.
template <class C>
__device__ __forceinline__ int acquire_scratch(const cuda::AttentionParams& p) {
  __shared__ int taken;
  if (threadIdx.x == 0) {
    const Scratch<C> scratch(p);
    std::uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    int scratch_slot = static_cast<int>(multiprocessor) * C::kCtas % scratch.slots;
    while (atomicCAS(scratch.taken + scratch_slot, 0, 1) != 0)
      scratch_slot = scratch_slot + 1 < scratch.slots ? scratch_slot + 1 : 0;
    __threadfence();  // acquire: the previous owner's writes are visible
    taken = scratch_slot;
  }
  __syncthreads();
  return taken;
}
template <class C>
__device__ __forceinline__ void release_scratch(const cuda::AttentionParams& p, const HeldPartials& held) {
  if (held.scratch_slot < 0) return;
  __syncthreads();  // all threads are done with the slot
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(Scratch<C>(p).taken + held.scratch_slot, 0);
}

// Merges the current KV split into the splits before it, and resets it to the empty partial.
template <class C>
__device__ __forceinline__ void merge_current_split(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile,
                                                    int head, AttentionState<C>& state, HeldPartials& held) {
  if (!merged_in_state(p) && held.scratch_slot < 0) held.scratch_slot = acquire_scratch<C>(p);
  float2 stats[C::kRowBlocks][2] = {};
  if constexpr (C::kSlices > 1) {
    for_each_row<C>([&](int block, int half, int tile_row) {
      if (!held.merged || !present(work_tile, tile_row)) return;
      const MergedRow<C> row(p, work_tile, head, tile_row, held);
      stats[block][half] = {row.stats[0], row.stats[1]};
    });
    __syncthreads();  // every warp has read the stats
  }
  for_each_row<C>([&](int block, int half, int tile_row) {
    float softmax_offset = state.m[block][half];
    float sum = quad_sum(state.l[block][half]);
    if (present(work_tile, tile_row)) {
      const MergedRow<C> row(p, work_tile, head, tile_row, held);
      if (held.merged) {
        // The loads are issued together to overlap their latency.
        float4 before[kWarpColumns<C> / 16];
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) before[n] = __ldcg(row.sums + 4 * n);
        if constexpr (C::kSlices == 1) stats[block][half] = {row.stats[0], row.stats[1]};
        const MergeStep step = cuda::merge_partials(stats[block][half].x, stats[block][half].y, softmax_offset, sum,
                                                    p.softmax.exponent_base2);
        softmax_offset = step.softmax_offset;
        sum = step.sum;
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
          __stcg(row.sums + 4 * n, join(before[n], thread_columns(state, block, half, n), step));
        }
      } else {
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) __stcg(row.sums + 4 * n, thread_columns(state, block, half, n));
      }
      __syncwarp(0xfU << (threadIdx.x % 32 & ~3U));  // the quad has read the stats
      if (writes_stats<C>()) {
        row.stats[0] = softmax_offset;
        row.stats[1] = sum;
      }
    }
    begin_split(state, block, half);
  });
  held.current = false;
  held.merged = true;
}

// Merges the merged splits with the current one, if any, into registers, which then have the rows' final partials.
template <class C>
__device__ __forceinline__ void add_merged(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile, int head,
                                           AttentionState<C>& state, const HeldPartials& held) {
  for_each_row<C>([&](int block, int half, int tile_row) {
    const float sum = quad_sum(state.l[block][half]);
    if (!present(work_tile, tile_row)) return;
    const MergedRow<C> row(p, work_tile, head, tile_row, held);
    MergeStep step{};
    step.softmax_offset = row.stats[0];
    step.sum = row.stats[1];
    if (held.current) {
      step = cuda::merge_partials(step.softmax_offset, step.sum, state.m[block][half], sum, p.softmax.exponent_base2);
    }
    state.m[block][half] = step.softmax_offset;
    state.l[block][half] = threadIdx.x % 4 == 0 ? step.sum : 0.0F;  // as partial sums
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      const float4 x = __ldcg(row.sums + 4 * n);
      set_thread_columns(state, block, half, n,
                         held.current ? join(x, thread_columns(state, block, half, n), step) : x);
    }
  });
}

template <class C>
__device__ __forceinline__ void load_attention_state(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile,
                                                     int head, AttentionState<C>& state, HeldPartials& held) {
  int flags = 0;
  if (p.state.resume) {
    const cuda::StatePtrs first(p.state.memory, p.rows, p.heads, C::kDimV, work_tile.row + work_tile.valid_row_begin,
                                head);
    flags = static_cast<int>(first.stats[cuda::kStateFlags]);
  }
  held = {(flags & cuda::kHasCurrent) != 0, (flags & cuda::kHasMerged) != 0, -1};
  for_each_row<C>([&](int block, int half, int tile_row) {
    begin_split(state, block, half);
    if (!held.current || !present(work_tile, tile_row)) return;
    const cuda::StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, C::kDimV, work_tile.row + tile_row, head);
    state.m[block][half] = state_ptrs.stats[cuda::kCurrentOffset];
    state.l[block][half] = state_ptrs.stats[threadIdx.x % 4];
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      set_thread_columns(
          state, block, half, n,
          reinterpret_cast<const float4*>(state_ptrs.current + first_column<C>())[4 * n + threadIdx.x % 4]);
    }
  });
}

// The merged partial is in the state already.
template <class C>
__device__ __forceinline__ void save_attention_state(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile,
                                                     int head, const AttentionState<C>& state,
                                                     const HeldPartials& held) {
  for_each_row<C>([&](int block, int half, int tile_row) {
    if (!present(work_tile, tile_row)) return;
    const cuda::StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, C::kDimV, work_tile.row + tile_row, head);
    if (writes_stats<C>()) {
      state_ptrs.stats[cuda::kStateFlags] =
          static_cast<float>((held.merged ? cuda::kHasMerged : 0) | (held.current ? cuda::kHasCurrent : 0));
    }
    if (!held.current) return;
    if (first_column<C>() == 0) state_ptrs.stats[threadIdx.x % 4] = state.l[block][half];
    if (writes_stats<C>()) state_ptrs.stats[cuda::kCurrentOffset] = state.m[block][half];
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      reinterpret_cast<float4*>(state_ptrs.current + first_column<C>())[4 * n + threadIdx.x % 4] =
          thread_columns(state, block, half, n);
    }
  });
}

// Normalizes, rounds and writes rows. They are staged in the warp's own rows, or columns, of the Q tile, so that whole
// cache lines are written.
template <class C>
__device__ __forceinline__ void finish_rows(const cuda::AttentionParams& p, const cuda::WorkTile& work_tile, int head,
                                            std::uint32_t q_tile, AttentionState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (C::kSlices > 1) {
    __syncthreads();  // every warp has read Q
  } else {
    __syncwarp();  // the warp has read Q
  }
  const int first_chunk = first_column<C>() / 8;
  for_each_row<C>([&](int block, int half, int tile_row) {
    const cuda::RowEnd end =
        cuda::end_row(__fmul_rn(state.m[block][half], p.softmax.exponent), quad_sum(state.l[block][half]),
                      p.sinks != nullptr ? p.sinks + head : nullptr);
    const float inverse = end.factor();
    if (p.lse.data != nullptr && writes_stats<C>() && present(work_tile, tile_row)) {
      p.lse.data[(work_tile.row + tile_row) * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
    }
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 8; ++n) {
      const int chunk = first_chunk + n;
      const std::uint32_t to = q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                               cuda::swizzled(tile_row, chunk % 8) + static_cast<std::uint32_t>(lane % 4 * 4);
      cuda::store_shared(
          to, cuda::MmaTraits<typename C::Element>::pack(__fmul_rn(state.o[block][n][2 * half], inverse),
                                                         __fmul_rn(state.o[block][n][2 * half + 1], inverse)));
    }
  });
  __syncwarp();
  constexpr int kChunks = kWarpColumns<C> / 8;
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out.token_stride | p.out.head_stride))) &
                        15U) == 0;
  for (int i = lane; i < C::kRowBlocks * 16 * kChunks; i += 32) {
    const int tile_row = first_row<C>() + i / kChunks;
    const int chunk = first_chunk + i % kChunks;
    const uint4 elements =
        cuda::load_shared_16(q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                             cuda::swizzled(tile_row, chunk % 8));
    if (!present(work_tile, tile_row)) continue;
    std::uint16_t* to = out + (work_tile.row + tile_row) * p.out.token_stride + head * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

}  // namespace ringattn::sm80
