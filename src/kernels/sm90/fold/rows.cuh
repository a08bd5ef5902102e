// SPDX-License-Identifier: Apache-2.0
// Rows between tiles: their state in memory, the groups of tiles that are closed, and, at the end, the division and the
// way out. The state's layout is cuda/device/fold_state.cuh's.
#pragma once

#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/threads.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ bool present(const Unit& unit, int slot) {
  return slot >= unit.slot_begin() && slot < unit.slot_end();
}

template <class C>
__device__ __forceinline__ cuda::StatePlace state_of(const cuda::FoldParams& p, const Unit& unit, int half) {
  return {p.state.memory, p.rows, p.heads, C::kDimV, unit.row() + slot_of_thread() + 8 * half, unit.query_head()};
}

// B, the outputs of a row's closed groups: in its state, where the task has one; else in its warpgroup's scratch
// memory. This thread's share of columns 16n … 16n + 15 is at [4 n].
__device__ __forceinline__ bool task_has_state(const cuda::FoldParams& p) { return p.state.save || p.state.resume; }
template <class C>
__device__ __forceinline__ float4* closed_outputs(const cuda::FoldParams& p, const Unit& unit, int half) {
  const int columns = thread_of_cta() % 4 * 4;
  if (task_has_state(p)) return reinterpret_cast<float4*>(state_of<C>(p, unit, half).closed + columns);
  const std::int64_t warpgroup = std::int64_t{blockIdx.x} * C::kUnits + thread_of_cta() / kWarpgroup - 1;
  const int slot = slot_of_thread() + 8 * half;
  return reinterpret_cast<float4*>(p.state.scratch + warpgroup * C::kScratchFloats + slot * C::kDimV + columns);
}
// Their R and L, in shared memory.
template <class C>
__device__ __forceinline__ std::uint32_t closed_numbers(int half) {
  return SharedMap<C>().closed(thread_of_cta() / kWarpgroup, slot_of_thread() + 8 * half);
}

template <int kBlocks>
__device__ __forceinline__ void clear(float (&o)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] = 0.0F;
  }
}

template <class C>
__device__ __forceinline__ void begin_rows(const cuda::FoldParams& p, const Unit& unit, Rows<C>& rows) {
  const int slot = slot_of_thread();
  rows.flags |= Rows<C>::kSpecial;
  if (!p.state.resume) rows.flags |= Rows<C>::kFresh;
  if (p.state.resume || unit.end() == unit.begin()) clear(rows.o);  // else the first tile does it
  rows.shift[0] = 0.0F;
  rows.shift[1] = 0.0F;
  rows.l[0] = 0.0F;
  rows.l[1] = 0.0F;
  if (!p.state.resume) return;
  float references[2] = {-INFINITY, -INFINITY};
  float parts[2] = {};
  float2 closed[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of both rows at once: memory is far
    if (!present(unit, slot + 8 * half)) continue;
    const float* const numbers = state_of<C>(p, unit, half).numbers;
    rows.l[half] = numbers[threadIdx.x % 4];
    references[half] = numbers[cuda::kOpenReference];
    parts[half] = numbers[cuda::kStateParts];
    closed[half] = {numbers[cuda::kClosedReference], numbers[cuda::kClosedSum]};
  }
  bool open = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = references[half];
    const int has = static_cast<int>(parts[half]);
    const bool seen = reference != -INFINITY;
    rows.shift[half] = seen ? -reference : 0.0F;
    rows.flags |=
        (seen ? Rows<C>::kSeen << half : 0U) | ((has & cuda::kHasClosed) != 0 ? Rows<C>::kSummed << half : 0U);
    if (threadIdx.x % 4 == 0) store_pair(closed_numbers<C>(half), closed[half].x, closed[half].y);
    if ((has & cuda::kHasOpen) == 0) continue;
    open = true;
    const float* const outputs = state_of<C>(p, unit, half).open + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = reinterpret_cast<const float4*>(outputs)[4 * n];
      rows.o[2 * n][2 * half] = x.x;
      rows.o[2 * n][2 * half + 1] = x.y;
      rows.o[2 * n + 1][2 * half] = x.z;
      rows.o[2 * n + 1][2 * half + 1] = x.w;
    }
  }
  // Rows of a unit fold the same tiles, so one that is there speaks for those that are not: the warps go the same way.
  if (named_any(thread_of_cta() / kWarpgroup, kWarpgroup, open)) rows.flags |= Rows<C>::kOpen;
}

// The reference of a row has moved: the outputs of its closed groups move with it. Seldom, so a function of its own.
template <class C>
__device__ __noinline__ void move_closed(float4* outputs, float kept) {
#pragma unroll 1
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    __stcg(outputs + 4 * n, float4{cuda::multiply_flushed(x.x, kept), cuda::multiply_flushed(x.y, kept),
                                   cuda::multiply_flushed(x.z, kept), cuda::multiply_flushed(x.w, kept)});
  }
}

// Closes the open group: merges its partial into the groups before it (kernels/merge.hpp). This is done when a tile of
// the next group is known to come, or else when the state is saved; at the end of a row finish_rows() does the same in
// registers. So it does not matter where a task ends. The outputs are added in memory, and nobody waits for them.
template <class C>
__device__ __forceinline__ void close_group(const cuda::FoldParams& p, const Unit& unit, Rows<C>& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = !task_has_state(p) || present(unit, slot_of_thread() + 8 * half);
    float4* const outputs = closed_outputs<C>(p, unit, half);
    const std::uint32_t numbers = closed_numbers<C>(half);
    float reference = reference_of(rows, half);
    float sum = sum_of_quad(rows.l[half]);
    float factor = 1.0F;
    if (rows.summed(half)) {
      const float2 closed = load_pair(numbers);
      const MergeStep step = cuda::merge_rows(closed.x, closed.y, reference, sum, kReferenceUnit);
      factor = step.factor;
      reference = step.reference;
      sum = step.sum;
      if (step.moves) move_closed<C>(outputs, step.kept);
    }
    __syncwarp();  // the row's other threads have read
    if (thread_of_cta() % 4 == 0) store_pair(numbers, reference, sum);
    rows.l[half] = 0.0F;
    rows.shift[half] = 0.0F;
    if (!exists) continue;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                     rows.o[2 * n + 1][2 * half + 1]};
      if (rows.summed(half)) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(outputs + 4 * n),
                     "f"(cuda::multiply_flushed(x.x, factor)), "f"(cuda::multiply_flushed(x.y, factor)),
                     "f"(cuda::multiply_flushed(x.z, factor)), "f"(cuda::multiply_flushed(x.w, factor))
                     : "memory");
      } else {
        __stcg(outputs + 4 * n, x);
      }
    }
    rows.flags |= Rows<C>::kSummed << half;
  }
  rows.flags &= ~(Rows<C>::kOpen | Rows<C>::kFull | Rows<C>::kSeen | Rows<C>::kSeen << 1);
  rows.flags |= Rows<C>::kSpecial | Rows<C>::kFresh;  // the next group's first tile sets its references
  __syncwarp();                                       // the numbers are there for all threads
}

template <class C>
__device__ __forceinline__ void save_rows(const cuda::FoldParams& p, const Unit& unit, const Rows<C>& rows) {
  const int slot = slot_of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!present(unit, slot + 8 * half)) continue;
    const cuda::StatePlace place = state_of<C>(p, unit, half);
    place.numbers[threadIdx.x % 4] = rows.l[half];
    if (threadIdx.x % 4 == 0) {
      place.numbers[cuda::kOpenReference] = reference_of(rows, half);
      place.numbers[cuda::kStateParts] = static_cast<float>((rows.summed(half) ? cuda::kHasClosed : 0) |
                                                            (rows.has(Rows<C>::kOpen) ? cuda::kHasOpen : 0));
      const float2 closed = load_pair(closed_numbers<C>(half));
      place.numbers[cuda::kClosedReference] = closed.x;
      place.numbers[cuda::kClosedSum] = closed.y;
    }
    if (!rows.has(Rows<C>::kOpen)) continue;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      reinterpret_cast<float4*>(place.open + threadIdx.x % 4 * 4)[4 * n] =
          float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                 rows.o[2 * n + 1][2 * half + 1]};
    }
  }
}

// The rows that a warp has left in shared memory: where some are absent, or the copy engine can't write them.
template <class C>
__device__ __noinline__ void write_rows(const cuda::FoldParams& p, Unit unit, std::uint32_t staging) {
  constexpr int kChunks = C::kDimV / 8;
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out.token_stride | p.out.head_stride))) &
                        15U) == 0;
  const int first = thread_of_warpgroup() / 32 * 16;
#pragma unroll 1
  for (int i = thread_of_cta() % 32; i < 16 * kChunks; i += 32) {
    const int slot = first + i / kChunks;
    const int chunk = i % kChunks;
    if (!present(unit, slot)) continue;
    const uint4 elements = cuda::load_shared_16(
        staging + static_cast<std::uint32_t>(chunk / 8 * SharedMap<C>::kQPanel) + cuda::swizzled(slot, chunk % 8));
    std::uint16_t* to =
        out + (unit.row() + slot) * p.out.token_stride + unit.query_head() * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

// What a thread's two rows are scaled by at the end, from their references and their sums over all keys. LSE is written
// on the way.
__device__ __forceinline__ void end_softmax(const cuda::FoldParams& p, const Unit& unit, const float (&references)[2],
                                            const float (&sums)[2], float (&inverse)[2]) {
  const int head = unit.query_head();
  const float* const sink = p.sinks == nullptr ? nullptr : p.sinks + head;
  const cuda::RowEnd ends[2] = {cuda::end_row(__fmul_rn(references[0], kLn2), sums[0], sink),
                                cuda::end_row(__fmul_rn(references[1], kLn2), sums[1], sink)};
  inverse[0] = ends[0].factor();
  inverse[1] = ends[1].factor();
  const int half = thread_of_cta() % 4;
  if (p.lse.data == nullptr || half > 1) return;  // of a row's four threads, one; the next one for the other half
  const int at = slot_of_thread() + 8 * half;
  if (!present(unit, at)) return;
  p.lse.data[(unit.row() + at) * p.lse.token_stride + head * p.lse.head_stride] =
      __fadd_rn(half == 0 ? ends[0].reference : ends[1].reference, logf(half == 0 ? ends[0].sum : ends[1].sum));
}

template <class C>
__device__ __forceinline__ void stage_rows(const Rows<C>& rows, const float (&inverse)[2], std::uint32_t staging) {
  const int lane = thread_of_cta() % 32;
  const std::uint32_t to = staging + cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; n += 2) {
    const auto pair = [&](int block, int half) {
      return cuda::Products<typename C::Element>::pack(cuda::scale_flushed(rows.o[block][2 * half], inverse[half]),
                                                       cuda::scale_flushed(rows.o[block][2 * half + 1], inverse[half]));
    };
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     cuda::at_columns<kQueryTile>(to, n / 2)),
                 "r"(pair(n, 0)), "r"(pair(n, 1)), "r"(pair(n + 1, 0)), "r"(pair(n + 1, 1))
                 : "memory");
  }
  proxy_fence();
  __syncwarp();
}

// The copy engine writes a warp's rows.
template <class C>
__device__ __forceinline__ void send_rows(const HopperParams& params, const Unit& unit, std::uint32_t staging) {
  if (thread_of_cta() % 32 != 0) return;
  const int first = thread_of_warpgroup() / 32 * 16;
#pragma unroll
  for (int panel = 0; panel < C::kPanelsV; ++panel) {
    store_box(&params.out, staging + static_cast<std::uint32_t>(panel * SharedMap<C>::kQPanel + first * kPanelRowBytes),
              panel * kPanelColumns, unit.query_head(), static_cast<int>(unit.row()) + first);
  }
  store_commit();
}

// Calls take(closed output, the thread's output at its place) for each of the thread's outputs of a row.
template <class C, class Take>
__device__ __forceinline__ void with_closed_outputs(const cuda::FoldParams& p, const Unit& unit, int half,
                                                    Rows<C>& rows, Take take) {
  const float4* const outputs = closed_outputs<C>(p, unit, half);
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    take(x.x, rows.o[2 * n][2 * half]);
    take(x.y, rows.o[2 * n][2 * half + 1]);
    take(x.z, rows.o[2 * n + 1][2 * half]);
    take(x.w, rows.o[2 * n + 1][2 * half + 1]);
  }
}

// Merges a row's open group, if there is one, with the closed ones, as close_group() does, into registers.
template <class C>
__device__ __forceinline__ void merge_closed(const cuda::FoldParams& p, const Unit& unit, int half, Rows<C>& rows,
                                             float& reference, float& sum) {
  const float2 closed = load_pair(closed_numbers<C>(half));
  // A branch around each loop: a choice for each output spills hundreds of bytes at 256 dims.
  if (!rows.has(Rows<C>::kOpen)) {
    reference = closed.x;
    sum = closed.y;
    with_closed_outputs<C>(p, unit, half, rows, [](float before, float& o) { o = before; });
    return;
  }
  const MergeStep step = cuda::merge_rows(closed.x, closed.y, reference, sum, kReferenceUnit);
  reference = step.reference;
  sum = step.sum;
  with_closed_outputs<C>(p, unit, half, rows,
                         [&](float before, float& o) { o = cuda::TensorArithmetic::join(before, o, step); });
}

// Divides, writes LSE, and sends the rounded rows out, a warp its 16.
template <class C>
__device__ __forceinline__ void finish_rows(const HopperParams& params, const Unit& unit, std::uint32_t staging,
                                            Rows<C>& rows) {
  const cuda::FoldParams& p = params.fold;
  const int first = thread_of_warpgroup() / 32 * 16;
  const int slot_begin = unit.slot_begin();
  const int slot_end = unit.slot_end();
  if (slot_begin >= first + 16 || slot_end <= first) return;  // none of the warp's rows is present
  float references[2];
  float totals[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    references[half] = reference_of(rows, half);
    totals[half] = sum_of_quad(rows.l[half]);
    if (rows.summed(half)) merge_closed<C>(p, unit, half, rows, references[half], totals[half]);
  }
  float inverse[2];
  end_softmax(p, unit, references, totals, inverse);
  stage_rows<C>(rows, inverse, staging);
  if (!params.bulk_out || slot_begin > first || slot_end < first + 16) {
    write_rows<C>(p, unit, staging);
  } else {
    send_rows<C>(params, unit, staging);
  }
}

}  // namespace ringattn::sm90
