// SPDX-License-Identifier: Apache-2.0
// Rows between tiles and between groups of tiles: their state in memory, closed groups, and, at the end, the division
// and the way out. References are running maxima of a group's scores before FoldParams::Softmax::exponent is applied.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/cuda/fold_params.hpp"
#include "kernels/sm80/tile_step.cuh"

namespace ringattn::sm80 {

// Calls visit(block, half, slot) for each row that this thread has a share of.
template <class C, class Visit>
__device__ __forceinline__ void for_each_row(Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) visit(block, half, (warp * C::kRowBlocks + block) * 16 + lane / 4 + 8 * half);
  }
}

__device__ __forceinline__ bool present(const cuda::WorkItem& item, int slot) {
  return slot >= item.slot_begin && slot < item.slot_end;
}

// The sum over a row's quad of threads, in all of them.
__device__ __forceinline__ float over_quad(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

template <class C>
__device__ __forceinline__ void begin_group(RowState<C>& state, int block, int half) {
  state.m[block][half] = -INFINITY;
  state.l[block][half] = 0.0F;
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; ++n) {
    state.o[block][n][2 * half] = 0.0F;
    state.o[block][n][2 * half + 1] = 0.0F;
  }
}

// A thread's share of columns 16n … 16n + 15 of a row: one vector in memory.
template <class C>
__device__ __forceinline__ float4 share(const RowState<C>& state, int block, int half, int n) {
  return {state.o[block][2 * n][2 * half], state.o[block][2 * n][2 * half + 1], state.o[block][2 * n + 1][2 * half],
          state.o[block][2 * n + 1][2 * half + 1]};
}
template <class C>
__device__ __forceinline__ void set_share(RowState<C>& state, int block, int half, int n, const float4& x) {
  state.o[block][2 * n][2 * half] = x.x;
  state.o[block][2 * n][2 * half + 1] = x.y;
  state.o[block][2 * n + 1][2 * half] = x.z;
  state.o[block][2 * n + 1][2 * half + 1] = x.w;
}
__device__ __forceinline__ float4 join(const float4& closed, const float4& open, const MergeStep& step) {
  using Arithmetic = cuda::TensorArithmetic;
  return {Arithmetic::join(closed.x, open.x, step), Arithmetic::join(closed.y, open.y, step),
          Arithmetic::join(closed.z, open.z, step), Arithmetic::join(closed.w, open.w, step)};
}

// Which groups the rows of a CTA have, in shared memory: the tile loop leaves no register free. Rows of a query tile
// fold the same key tiles, so it is the same for all of them. Written once; what changes follows from the tile.
struct Groups {
  std::int32_t first_close;    // the first of the item's tiles at which a group is closed; then every kGroupTiles-th
  std::int32_t begins_open;    // whether the work goes on with a group, which is in registers
  std::int32_t begins_closed;  // and with groups before it, in memory

  // By an explicit instruction: what the compiler reads ahead of the loop, it spills.
  __device__ __forceinline__ bool closes_at(int tile) const {
    const int behind = tile - cuda::load_shared_number(cuda::shared_address(&first_close));
    return behind >= 0 && behind % kGroupTiles == 0;
  }
  // Whether there are closed groups when the item comes to this tile; a group that it closes is not one of them.
  __device__ __forceinline__ bool closed(int tile) const { return begins_closed != 0 || first_close < tile; }
  // Whether a group is open behind the last of the item's tiles.
  __device__ __forceinline__ bool open(int tiles) const { return begins_open != 0 || tiles > 0; }
};

// Where closed groups lie: in the rows' state, where the task has one; else in scratch memory. That is cut into slots,
// C::kCtas for each multiprocessor, and a CTA holds one from its first closed group to its end. Where a device runs
// more CTAs at a time than there are slots, one waits for another's end.
template <class C>
struct Scratch {
  float* sums;     // [slots, kQueryTile, kDimV]
  float* numbers;  // [slots, kQueryTile, 2]: reference and sum
  int* taken;      // [slots]: 0 or 1
  int slots;

  __device__ explicit Scratch(const cuda::FoldParams& p)
      : sums(p.state.scratch), slots(p.schedule.multiprocessors * C::kCtas) {
    numbers = sums + static_cast<std::int64_t>(slots) * C::kQueryTile * C::kDimV;
    taken = reinterpret_cast<int*>(numbers + slots * C::kQueryTile * 2);
  }
};

__device__ __forceinline__ bool closed_in_state(const cuda::FoldParams& p) { return p.state.save || p.state.resume; }

template <class C>
struct ClosedRow {
  float4* sums;    // of this thread's share, which is at [4 n]
  float* numbers;  // reference and sum

  // `scratch_slot`: of the CTA, where closed groups lie in scratch memory.
  __device__ __forceinline__ ClosedRow(const cuda::FoldParams& p, const cuda::WorkItem& item, int head, int slot,
                                       int scratch_slot) {
    static_assert(cuda::kClosedSum == cuda::kClosedReference + 1);
    float* of_row;
    if (closed_in_state(p)) {
      const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
      of_row = place.closed;
      numbers = place.numbers + cuda::kClosedReference;
    } else {
      const Scratch<C> scratch(p);
      const std::int64_t row = scratch_slot * C::kQueryTile + slot;
      of_row = scratch.sums + row * C::kDimV;
      numbers = scratch.numbers + row * 2;
    }
    sums = reinterpret_cast<float4*>(of_row + threadIdx.x % 4 * 4);
  }
};

// All threads of the CTA take a slot together, into shared memory.
template <class C>
__device__ __forceinline__ void take_slot(const cuda::FoldParams& p, int& taken) {
  if (threadIdx.x == 0) {
    const Scratch<C> scratch(p);
    std::uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    int slot = static_cast<int>(multiprocessor) * C::kCtas % scratch.slots;
    while (atomicCAS(scratch.taken + slot, 0, 1) != 0) slot = slot + 1 < scratch.slots ? slot + 1 : 0;
    __threadfence();  // what its last owner wrote came before
    taken = slot;
  }
  __syncthreads();
}
template <class C>
__device__ __forceinline__ void give_back(const cuda::FoldParams& p, int slot) {
  __syncthreads();  // everybody is done with it
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(Scratch<C>(p).taken + slot, 0);
}

// The open group joins those before it, if there are any, and the next one begins.
template <class C>
__device__ __forceinline__ void close_group(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            RowState<C>& state, bool first, int& scratch_slot) {
  if (first && !closed_in_state(p)) take_slot<C>(p, scratch_slot);
  for_each_row<C>([&](int block, int half, int slot) {
    float reference = state.m[block][half];
    float sum = over_quad(state.l[block][half]);
    if (present(item, slot)) {
      const ClosedRow<C> row(p, item, head, slot, scratch_slot);
      if (!first) {
        // The loads side by side: memory is far.
        float4 before[C::kDimV / 16];
#pragma unroll
        for (int n = 0; n < C::kDimV / 16; ++n) before[n] = __ldcg(row.sums + 4 * n);
        const MergeStep step =
            cuda::merge_rows(row.numbers[0], row.numbers[1], reference, sum, p.softmax.exponent_base2);
        reference = step.reference;
        sum = step.sum;
#pragma unroll
        for (int n = 0; n < C::kDimV / 16; ++n) {
          __stcg(row.sums + 4 * n, join(before[n], share(state, block, half, n), step));
        }
      } else {
#pragma unroll
        for (int n = 0; n < C::kDimV / 16; ++n) __stcg(row.sums + 4 * n, share(state, block, half, n));
      }
      __syncwarp(0xfU << (threadIdx.x % 32 & ~3U));  // the quad has read the numbers
      if (threadIdx.x % 4 == 0) {
        row.numbers[0] = reference;
        row.numbers[1] = sum;
      }
    }
    begin_group(state, block, half);
  });
}

// The closed groups join the open one, if there is one, in registers: the rows are whole.
template <class C>
__device__ __forceinline__ void join_closed(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            RowState<C>& state, bool open, int scratch_slot) {
  for_each_row<C>([&](int block, int half, int slot) {
    const float sum = over_quad(state.l[block][half]);
    if (!present(item, slot)) return;
    const ClosedRow<C> row(p, item, head, slot, scratch_slot);
    MergeStep step{};
    step.reference = row.numbers[0];
    step.sum = row.numbers[1];
    if (open) {
      step = cuda::merge_rows(step.reference, step.sum, state.m[block][half], sum, p.softmax.exponent_base2);
    }
    state.m[block][half] = step.reference;
    state.l[block][half] = threadIdx.x % 4 == 0 ? step.sum : 0.0F;  // as partial sums
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = __ldcg(row.sums + 4 * n);
      set_share(state, block, half, n, open ? join(x, share(state, block, half, n), step) : x);
    }
  });
}

template <class C>
__device__ __forceinline__ Groups groups_of(const cuda::FoldParams& p, const cuda::WorkItem& item, int head) {
  int parts = 0;
  if (p.state.resume) {
    const cuda::StatePlace first(p.state.memory, p.rows, p.heads, C::kDimV, item.row + item.slot_begin, head);
    parts = static_cast<int>(first.numbers[cuda::kStateParts]);
  }
  const bool open = (parts & cuda::kHasOpen) != 0;
  const int of_group = static_cast<int>(item.place % kGroupTiles);
  return {of_group == 0 && open ? 0 : kGroupTiles - of_group, open, (parts & cuda::kHasClosed) != 0};
}

template <class C>
__device__ __forceinline__ void load_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           RowState<C>& state, bool open) {
  for_each_row<C>([&](int block, int half, int slot) {
    begin_group(state, block, half);
    if (!open || !present(item, slot)) return;
    const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
    state.m[block][half] = place.numbers[cuda::kOpenReference];
    state.l[block][half] = place.numbers[threadIdx.x % 4];
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      set_share(state, block, half, n, reinterpret_cast<const float4*>(place.open)[4 * n + threadIdx.x % 4]);
    }
  });
}

// Closed groups are in the state already.
template <class C>
__device__ __forceinline__ void save_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           const RowState<C>& state, bool open, bool closed) {
  for_each_row<C>([&](int block, int half, int slot) {
    if (!present(item, slot)) return;
    const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
    if (threadIdx.x % 4 == 0) {
      place.numbers[cuda::kStateParts] =
          static_cast<float>((closed ? cuda::kHasClosed : 0) | (open ? cuda::kHasOpen : 0));
    }
    if (!open) return;
    place.numbers[threadIdx.x % 4] = state.l[block][half];
    if (threadIdx.x % 4 == 0) place.numbers[cuda::kOpenReference] = state.m[block][half];
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      reinterpret_cast<float4*>(place.open)[4 * n + threadIdx.x % 4] = share(state, block, half, n);
    }
  });
}

// Divides, rounds and writes. Rows go through the warp's own rows of the Q tile, so that whole lines are written.
template <class C>
__device__ __forceinline__ void finish_rows(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            std::uint32_t q_tile, RowState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // Q has been read
  for_each_row<C>([&](int block, int half, int slot) {
    const cuda::RowEnd end =
        cuda::end_row(__fmul_rn(state.m[block][half], p.softmax.exponent), over_quad(state.l[block][half]),
                      p.sinks != nullptr ? p.sinks + head : nullptr);
    const float inverse = end.factor();
    if (p.lse.data != nullptr && lane % 4 == 0 && present(item, slot)) {
      p.lse.data[(item.row + slot) * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
    }
#pragma unroll
    for (int n = 0; n < C::kDimV / 8; ++n) {
      const std::uint32_t to = q_tile + static_cast<std::uint32_t>(n / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                               cuda::swizzled(slot, n % 8) + static_cast<std::uint32_t>(lane % 4 * 4);
      cuda::store_shared(
          to, cuda::Products<typename C::Element>::pack(__fmul_rn(state.o[block][n][2 * half], inverse),
                                                        __fmul_rn(state.o[block][n][2 * half + 1], inverse)));
    }
  });
  __syncwarp();
  constexpr int kChunks = C::kDimV / 8;
  const int first_slot = static_cast<int>(threadIdx.x) / 32 * C::kRowBlocks * 16;
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out.token_stride | p.out.head_stride))) &
                        15U) == 0;
  for (int i = lane; i < C::kRowBlocks * 16 * kChunks; i += 32) {
    const int slot = first_slot + i / kChunks;
    const int chunk = i % kChunks;
    const uint4 elements =
        cuda::load_shared_16(q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                             cuda::swizzled(slot, chunk % 8));
    if (!present(item, slot)) continue;
    std::uint16_t* to = out + (item.row + slot) * p.out.token_stride + head * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

}  // namespace ringattn::sm80
