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

// The first slot of the rows that this thread's warp works on, alone or with other warps.
template <class C>
__device__ __forceinline__ int first_slot() {
  return static_cast<int>(threadIdx.x) / 32 / C::kSlices * C::kRowBlocks * 16;
}
// The first of this warp's columns of O.
template <class C>
__device__ __forceinline__ int first_column() {
  return C::kSlices == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % C::kSlices * kWarpColumns<C>;
}

// Calls visit(block, half, slot) for each row that this thread has a share of.
template <class C, class Visit>
__device__ __forceinline__ void for_each_row(Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visit(block, half, first_slot<C>() + block * 16 + lane / 4 + 8 * half);
    }
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
  for (int n = 0; n < kWarpColumns<C> / 8; ++n) {
    state.o[block][n][2 * half] = 0.0F;
    state.o[block][n][2 * half + 1] = 0.0F;
  }
}

// Whether this thread writes what is one number for a whole row.
template <class C>
__device__ __forceinline__ bool writes_numbers() {
  return threadIdx.x % 4 == 0 && first_column<C>() == 0;
}

// A thread's share of the warp's columns 16n … 16n + 15 of a row: one vector in memory.
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

// Which parts the rows of a CTA have. Rows of a query tile fold the same key tiles, so it is the same for all of them.
struct Groups {
  bool open;    // a group is under way, in registers
  bool closed;  // there are groups before it, in memory
  int slot;     // of the scratch memory; −1: none is taken
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

  __device__ __forceinline__ ClosedRow(const cuda::FoldParams& p, const cuda::WorkItem& item, int head, int slot,
                                       const Groups& groups) {
    static_assert(cuda::kClosedSum == cuda::kClosedReference + 1);
    float* of_row;
    if (closed_in_state(p)) {
      const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
      of_row = place.closed;
      numbers = place.numbers + cuda::kClosedReference;
    } else {
      const Scratch<C> scratch(p);
      const std::int64_t row = groups.slot * C::kQueryTile + slot;
      of_row = scratch.sums + row * C::kDimV;
      numbers = scratch.numbers + row * 2;
    }
    sums = reinterpret_cast<float4*>(of_row + first_column<C>() + threadIdx.x % 4 * 4);
  }
};

// All threads of the CTA take a slot together.
template <class C>
__device__ __forceinline__ int take_slot(const cuda::FoldParams& p) {
  __shared__ int taken;
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
  return taken;
}
template <class C>
__device__ __forceinline__ void give_back(const cuda::FoldParams& p, const Groups& groups) {
  if (groups.slot < 0) return;
  __syncthreads();  // everybody is done with it
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(Scratch<C>(p).taken + groups.slot, 0);
}

// The open group joins those before it, and the next one begins.
template <class C>
__device__ __forceinline__ void close_group(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            RowState<C>& state, Groups& groups) {
  if (!closed_in_state(p) && groups.slot < 0) groups.slot = take_slot<C>(p);
  float2 numbers[C::kRowBlocks][2] = {};
  if constexpr (C::kSlices > 1) {
    for_each_row<C>([&](int block, int half, int slot) {
      if (!groups.closed || !present(item, slot)) return;
      const ClosedRow<C> row(p, item, head, slot, groups);
      numbers[block][half] = {row.numbers[0], row.numbers[1]};
    });
    __syncthreads();  // every warp has read the numbers
  }
  for_each_row<C>([&](int block, int half, int slot) {
    float reference = state.m[block][half];
    float sum = over_quad(state.l[block][half]);
    if (present(item, slot)) {
      const ClosedRow<C> row(p, item, head, slot, groups);
      if (groups.closed) {
        // The loads side by side: memory is far.
        float4 before[kWarpColumns<C> / 16];
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) before[n] = __ldcg(row.sums + 4 * n);
        if constexpr (C::kSlices == 1) numbers[block][half] = {row.numbers[0], row.numbers[1]};
        const MergeStep step =
            cuda::merge_rows(numbers[block][half].x, numbers[block][half].y, reference, sum, p.softmax.exponent_base2);
        reference = step.reference;
        sum = step.sum;
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
          __stcg(row.sums + 4 * n, join(before[n], share(state, block, half, n), step));
        }
      } else {
#pragma unroll
        for (int n = 0; n < kWarpColumns<C> / 16; ++n) __stcg(row.sums + 4 * n, share(state, block, half, n));
      }
      __syncwarp(0xfU << (threadIdx.x % 32 & ~3U));  // the quad has read the numbers
      if (writes_numbers<C>()) {
        row.numbers[0] = reference;
        row.numbers[1] = sum;
      }
    }
    begin_group(state, block, half);
  });
  groups.open = false;
  groups.closed = true;
}

// The closed groups join the open one, if there is one, in registers: the rows are whole.
template <class C>
__device__ __forceinline__ void join_closed(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            RowState<C>& state, const Groups& groups) {
  for_each_row<C>([&](int block, int half, int slot) {
    const float sum = over_quad(state.l[block][half]);
    if (!present(item, slot)) return;
    const ClosedRow<C> row(p, item, head, slot, groups);
    MergeStep step{};
    step.reference = row.numbers[0];
    step.sum = row.numbers[1];
    if (groups.open) {
      step = cuda::merge_rows(step.reference, step.sum, state.m[block][half], sum, p.softmax.exponent_base2);
    }
    state.m[block][half] = step.reference;
    state.l[block][half] = threadIdx.x % 4 == 0 ? step.sum : 0.0F;  // as partial sums
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      const float4 x = __ldcg(row.sums + 4 * n);
      set_share(state, block, half, n, groups.open ? join(x, share(state, block, half, n), step) : x);
    }
  });
}

template <class C>
__device__ __forceinline__ void load_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           RowState<C>& state, Groups& groups) {
  int parts = 0;
  if (p.state.resume) {
    const cuda::StatePlace first(p.state.memory, p.rows, p.heads, C::kDimV, item.row + item.slot_begin, head);
    parts = static_cast<int>(first.numbers[cuda::kStateParts]);
  }
  groups = {(parts & cuda::kHasOpen) != 0, (parts & cuda::kHasClosed) != 0, -1};
  for_each_row<C>([&](int block, int half, int slot) {
    begin_group(state, block, half);
    if (!groups.open || !present(item, slot)) return;
    const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
    state.m[block][half] = place.numbers[cuda::kOpenReference];
    state.l[block][half] = place.numbers[threadIdx.x % 4];
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      set_share(state, block, half, n,
                reinterpret_cast<const float4*>(place.open + first_column<C>())[4 * n + threadIdx.x % 4]);
    }
  });
}

// Closed groups are in the state already.
template <class C>
__device__ __forceinline__ void save_state(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                           const RowState<C>& state, const Groups& groups) {
  for_each_row<C>([&](int block, int half, int slot) {
    if (!present(item, slot)) return;
    const cuda::StatePlace place(p.state.memory, p.rows, p.heads, C::kDimV, item.row + slot, head);
    if (writes_numbers<C>()) {
      place.numbers[cuda::kStateParts] =
          static_cast<float>((groups.closed ? cuda::kHasClosed : 0) | (groups.open ? cuda::kHasOpen : 0));
    }
    if (!groups.open) return;
    if (first_column<C>() == 0) place.numbers[threadIdx.x % 4] = state.l[block][half];
    if (writes_numbers<C>()) place.numbers[cuda::kOpenReference] = state.m[block][half];
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      reinterpret_cast<float4*>(place.open + first_column<C>())[4 * n + threadIdx.x % 4] = share(state, block, half, n);
    }
  });
}

// Divides, rounds and writes. Rows go through the warp's own rows, or columns, of the Q tile, so that whole lines are
// written.
template <class C>
__device__ __forceinline__ void finish_rows(const cuda::FoldParams& p, const cuda::WorkItem& item, int head,
                                            std::uint32_t q_tile, RowState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (C::kSlices > 1) {
    __syncthreads();  // Q has been read, by every warp
  } else {
    __syncwarp();  // Q has been read
  }
  const int first_chunk = first_column<C>() / 8;
  for_each_row<C>([&](int block, int half, int slot) {
    const cuda::RowEnd end =
        cuda::end_row(__fmul_rn(state.m[block][half], p.softmax.exponent), over_quad(state.l[block][half]),
                      p.sinks != nullptr ? p.sinks + head : nullptr);
    const float inverse = end.factor();
    if (p.lse.data != nullptr && writes_numbers<C>() && present(item, slot)) {
      p.lse.data[(item.row + slot) * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
    }
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 8; ++n) {
      const int chunk = first_chunk + n;
      const std::uint32_t to = q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                               cuda::swizzled(slot, chunk % 8) + static_cast<std::uint32_t>(lane % 4 * 4);
      cuda::store_shared(
          to, cuda::Products<typename C::Element>::pack(__fmul_rn(state.o[block][n][2 * half], inverse),
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
    const int slot = first_slot<C>() + i / kChunks;
    const int chunk = first_chunk + i % kChunks;
    const uint4 elements =
        cuda::load_shared_16(q_tile + static_cast<std::uint32_t>(chunk / 8 * C::kQueryTile * cuda::kPanelRowBytes) +
                             cuda::swizzled(slot, chunk % 8));
    if (!present(item, slot)) continue;
    std::uint16_t* to = out + (item.row + slot) * p.out.token_stride + head * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

}  // namespace ringattn::sm80
