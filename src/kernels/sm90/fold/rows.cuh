// SPDX-License-Identifier: Apache-2.0
// Rows between tiles: their state in memory, sums of full groups, and, at the end, the division and the way out.
//
// State: O of the open group [heads, rows, head_dim_v], then for each (head, row) l0 l1 l2 l3 r and what is there (1:
// full groups, 2: an open one) and two floats of padding, then the full groups' O as the first. O is in the order of
// fragments, as sm80_fold's.
#pragma once

#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/fold/tile_step.cuh"
#include "kernels/sm90/ptx/threads.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringattn::sm90 {

inline constexpr int kHasSums = 1;
inline constexpr int kHasOpen = 2;

template <class C>
struct StateMemory {
  float* open;  // of this thread's share
  float* sums;
  float* row;

  __device__ StateMemory(const cuda::FoldParams& p, std::int64_t row_of_q, int head) {
    const std::int64_t index = head * p.rows + row_of_q;
    const std::int64_t all = p.rows * p.heads;
    open = p.state + index * C::kDimV + threadIdx.x % 4 * 4;
    sums = open + all * (C::kDimV + 8);
    row = p.state + all * C::kDimV + index * 8;
  }
};

__device__ __forceinline__ bool present(const Unit& unit, int slot) {
  return slot >= unit.slot_begin() && slot < unit.slot_end();
}

// The sums of a row's full groups: in its state, where the task has one; else in its warpgroup's scratch memory. The
// thread's share of columns 16n … 16n + 15 is at [4 n].
__device__ __forceinline__ bool sums_in_state(const cuda::FoldParams& p) { return p.save || p.resume; }
template <class C>
__device__ __forceinline__ float4* sums_of(const cuda::FoldParams& p, const Unit& unit, int half) {
  const int slot = slot_of_thread() + 8 * half;
  if (sums_in_state(p)) {
    return reinterpret_cast<float4*>(StateMemory<C>(p, unit.row() + slot, unit.query_head()).sums);
  }
  const std::int64_t warpgroup = std::int64_t{blockIdx.x} * C::kUnits + thread_of_cta() / kWarpgroup - 1;
  return reinterpret_cast<float4*>(p.scratch + (warpgroup * kQueryTile + slot) * C::kDimV + thread_of_cta() % 4 * 4);
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
  if (p.resume || unit.end() == unit.begin()) clear(rows.o);  // else the first tile does it
  rows.shift[0] = 0.0F;
  rows.shift[1] = 0.0F;
  rows.l[0] = 0.0F;
  rows.l[1] = 0.0F;
  if (!p.resume) return;
  float references[2] = {-INFINITY, -INFINITY};
  float parts[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of both rows at once: memory is far
    if (!present(unit, slot + 8 * half)) continue;
    const StateMemory<C> memory(p, unit.row() + slot + 8 * half, unit.query_head());
    rows.l[half] = memory.row[threadIdx.x % 4];
    references[half] = memory.row[4];
    parts[half] = memory.row[5];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = references[half];
    const int has = static_cast<int>(parts[half]);
    const bool seen = reference != -INFINITY;
    rows.shift[half] = seen ? -reference : 0.0F;
    rows.flags |= (seen ? Rows<C>::kSeen << half : 0U) | ((has & kHasSums) != 0 ? Rows<C>::kSummed << half : 0U);
    if ((has & kHasOpen) == 0) continue;
    rows.flags |= Rows<C>::kOpen;
    const StateMemory<C> memory(p, unit.row() + slot + 8 * half, unit.query_head());
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = reinterpret_cast<const float4*>(memory.open)[4 * n];
      rows.o[2 * n][2 * half] = x.x;
      rows.o[2 * n][2 * half + 1] = x.y;
      rows.o[2 * n + 1][2 * half] = x.z;
      rows.o[2 * n + 1][2 * half + 1] = x.w;
    }
  }
}

// The open group is full, and a tile of the next one comes: its sum joins those before it. This is done when that tile
// is known to come, or else the state is saved, so that it doesn't depend on where a task ends; it is the same addition
// as at the end (add_flushed), in memory, and nobody waits for it.
template <class C>
__device__ __forceinline__ void close_group(const cuda::FoldParams& p, const Unit& unit, Rows<C>& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (sums_in_state(p) && !present(unit, slot_of_thread() + 8 * half)) continue;
    float4* const sums = sums_of<C>(p, unit, half);
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                     rows.o[2 * n + 1][2 * half + 1]};
      if (rows.summed(half)) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + 4 * n), "f"(x.x),
                     "f"(x.y), "f"(x.z), "f"(x.w)
                     : "memory");
      } else {
        __stcg(sums + 4 * n, x);
      }
    }
    rows.flags |= Rows<C>::kSummed << half;
  }
  clear(rows.o);
  rows.flags &= ~(Rows<C>::kOpen | Rows<C>::kFull);
}

template <class C>
__device__ __forceinline__ void save_rows(const cuda::FoldParams& p, const Unit& unit, const Rows<C>& rows) {
  const int slot = slot_of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!present(unit, slot + 8 * half)) continue;
    const StateMemory<C> memory(p, unit.row() + slot + 8 * half, unit.query_head());
    memory.row[threadIdx.x % 4] = rows.l[half];
    if (threadIdx.x % 4 == 0) {
      memory.row[4] = rows.seen(half) ? -rows.shift[half] : -INFINITY;
      memory.row[5] =
          static_cast<float>((rows.summed(half) ? kHasSums : 0) | (rows.has(Rows<C>::kOpen) ? kHasOpen : 0));
    }
    if (!rows.has(Rows<C>::kOpen)) continue;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      reinterpret_cast<float4*>(memory.open)[4 * n] =
          float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                 rows.o[2 * n + 1][2 * half + 1]};
    }
  }
}

// As `red` adds: what is smaller than the normal numbers is zero.
__device__ __forceinline__ float add_flushed(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
// Scales what add_flushed() has added, or what had nothing to be added to: a · b is the same whether a came from 0 + a,
// also for −0 and subnormal numbers. A subnormal b counts as 0.
__device__ __forceinline__ float scale_flushed(float a, float b) {
  float product;
  asm("fma.rn.ftz.f32 %0, %1, %2, 0f00000000;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// The rows that a warp has left in shared memory: where some are absent, or the copy engine can't write them.
template <class C>
__device__ __noinline__ void write_rows(const cuda::FoldParams& p, Unit unit, std::uint32_t staging) {
  constexpr int kChunks = C::kDimV / 8;
  auto* const out = static_cast<std::uint16_t*>(p.out);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out_token_stride | p.out_head_stride))) &
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
        out + (unit.row() + slot) * p.out_token_stride + unit.query_head() * p.out_head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

// What a thread's two rows are scaled by at the end. LSE is written on the way.
template <class C>
__device__ __forceinline__ void end_softmax(const cuda::FoldParams& p, const Unit& unit, const Rows<C>& rows,
                                            float (&inverse)[2]) {
  const int slot = slot_of_thread();
  const int lane = thread_of_cta() % 32;
  const int head = unit.query_head();
  float total[2];
  float reference[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& l = total[half];
    l = rows.l[half];
    l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 1));
    l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 2));
    const float m = rows.seen(half) ? __fmul_rn(-rows.shift[half], kLn2) : -INFINITY;
    reference[half] = m;
    float weight = 1.0F;
    if (p.sinks != nullptr) {
      // One more score, without a value.
      const float sink = p.sinks[head];
      reference[half] = sink > m || sink != sink ? sink : m;
      const float finite = reference[half] == -INFINITY ? 0.0F : reference[half];
      weight = expf(__fsub_rn(m, finite));
      l = __fmaf_rn(l, weight, expf(__fsub_rn(sink, finite)));
    }
    // Nothing was seen: O is 0, and log 0 is −∞.
    inverse[half] = __fmul_rn(weight, __frcp_rn(l == 0.0F ? 1.0F : l));
  }
  if (p.lse != nullptr && lane % 4 < 2) {  // of a row's four threads, one; the next one for the other half
    const int half = lane % 4;
    const int at = slot + 8 * half;
    if (at >= unit.slot_begin() && at < unit.slot_end()) {
      p.lse[(unit.row() + at) * p.lse_token_stride + head * p.lse_head_stride] =
          __fadd_rn(half == 0 ? reference[0] : reference[1], logf(half == 0 ? total[0] : total[1]));
    }
  }
}

// Scales a warp's 16 rows and leaves them, rounded, in the shared memory where their Q was: a product of the whole
// warpgroup has come behind the last one that read Q.
template <class C>
__device__ __forceinline__ void stage_rows(const Rows<C>& rows, const float (&inverse)[2], std::uint32_t staging) {
  const int lane = thread_of_cta() % 32;
  const std::uint32_t to = staging + cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; n += 2) {
    const auto pair = [&](int block, int half) {
      return cuda::Products<typename C::Element>::pack(scale_flushed(rows.o[block][2 * half], inverse[half]),
                                                       scale_flushed(rows.o[block][2 * half + 1], inverse[half]));
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

// Divides, writes LSE, and sends the rounded rows out, a warp its 16.
template <class C>
__device__ __forceinline__ void finish_rows(const HopperParams& params, const Unit& unit, std::uint32_t staging,
                                            Rows<C>& rows) {
  const cuda::FoldParams& p = params.fold;
  const int first = thread_of_warpgroup() / 32 * 16;
  const int slot_begin = unit.slot_begin();
  const int slot_end = unit.slot_end();
  if (slot_begin >= first + 16 || slot_end <= first) return;  // none of the warp's rows is present
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rows.summed(half)) continue;
    const float4* const sums = sums_of<C>(p, unit, half);
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = __ldcg(sums + 4 * n);
      rows.o[2 * n][2 * half] = add_flushed(x.x, rows.o[2 * n][2 * half]);
      rows.o[2 * n][2 * half + 1] = add_flushed(x.y, rows.o[2 * n][2 * half + 1]);
      rows.o[2 * n + 1][2 * half] = add_flushed(x.z, rows.o[2 * n + 1][2 * half]);
      rows.o[2 * n + 1][2 * half + 1] = add_flushed(x.w, rows.o[2 * n + 1][2 * half + 1]);
    }
  }
  float inverse[2];
  end_softmax<C>(p, unit, rows, inverse);
  stage_rows<C>(rows, inverse, staging);
  if (!params.bulk_out || slot_begin > first || slot_end < first + 16) {
    write_rows<C>(p, unit, staging);
  } else {
    send_rows<C>(params, unit, staging);
  }
}

}  // namespace ringattn::sm90
