// SPDX-License-Identifier: Apache-2.0
// The state of rows between tiles and tasks: loading and saving it, merging KV splits, and the epilogue.
// attention/cuda/attention_state.cuh has the layout of a saved state.
#pragma once

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/attention/sm90/tile_step.cuh"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ bool present(const HeadWorkTile& head_tile, int tile_row) {
  return tile_row >= head_tile.valid_row_begin() && tile_row < head_tile.valid_row_end();
}

template <class C>
__device__ __forceinline__ cuda::StatePtrs state_of(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                                    int half) {
  return {p.state.memory,        p.rows, p.heads, C::kDimV, head_tile.row() + tile_row_of_thread() + 8 * half,
          head_tile.query_head()};
}

// acc of a row's merged splits: in its state if the task has one, else in its warpgroup's global scratch. This thread's
// share of columns 16n … 16n + 15 is at [4 n].
__device__ __forceinline__ bool task_has_state(const cuda::AttentionParams& p) {
  return p.state.save || p.state.resume;
}
template <class C>
__device__ __forceinline__ float4* merged_outputs(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                                  int half) {
  const int columns = thread_of_cta() % 4 * 4;
  if (task_has_state(p)) return reinterpret_cast<float4*>(state_of<C>(p, head_tile, half).merged + columns);
  const std::int64_t warpgroup = std::int64_t{blockIdx.x} * C::kHeadTiles + thread_of_cta() / kWarpgroup - 1;
  const int tile_row = tile_row_of_thread() + 8 * half;
  return reinterpret_cast<float4*>(p.state.scratch + warpgroup * C::kScratchFloats + tile_row * C::kDimV + columns);
}
// softmax_offset and sum of the merged splits, in shared memory.
template <class C>
__device__ __forceinline__ std::uint32_t merged_stats(int half) {
  return SharedMap<C>().merged(thread_of_cta() / kWarpgroup, tile_row_of_thread() + 8 * half);
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
__device__ __forceinline__ void begin_rows(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                           AttentionState<C>& rows) {
  const int tile_row = tile_row_of_thread();
  rows.flags |= AttentionState<C>::kSpecial;
  if (!p.state.resume) rows.flags |= AttentionState<C>::kOverwriteAcc;
  if (p.state.resume || head_tile.end() == head_tile.begin()) clear(rows.o);  // else the first tile clears them
  rows.shift[0] = 0.0F;
  rows.shift[1] = 0.0F;
  rows.l[0] = 0.0F;
  rows.l[1] = 0.0F;
  if (!p.state.resume) return;
  float softmax_offsets[2] = {-INFINITY, -INFINITY};
  float state_flags[2] = {};
  float2 merged[2] = {};
#pragma unroll
  // issues the loads of both rows before using either
  for (int half = 0; half < 2; ++half) {
    if (!present(head_tile, tile_row + 8 * half)) continue;
    const float* const stats = state_of<C>(p, head_tile, half).stats;
    rows.l[half] = stats[threadIdx.x % 4];
    softmax_offsets[half] = stats[cuda::kCurrentOffset];
    state_flags[half] = stats[cuda::kStateFlags];
    merged[half] = {stats[cuda::kMergedOffset], stats[cuda::kMergedSum]};
  }
  bool current = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float softmax_offset = softmax_offsets[half];
    const int has = static_cast<int>(state_flags[half]);
    const bool seen = softmax_offset != -INFINITY;
    rows.shift[half] = seen ? -softmax_offset : 0.0F;
    rows.flags |= (seen ? AttentionState<C>::kOffsetSet << half : 0U) |
                  ((has & cuda::kHasMerged) != 0 ? AttentionState<C>::kMerged << half : 0U);
    if (threadIdx.x % 4 == 0) store_pair(merged_stats<C>(half), merged[half].x, merged[half].y);
    if ((has & cuda::kHasCurrent) == 0) continue;
    current = true;
    const float* const outputs = state_of<C>(p, head_tile, half).current + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x = reinterpret_cast<const float4*>(outputs)[4 * n];
      rows.o[2 * n][2 * half] = x.x;
      rows.o[2 * n][2 * half + 1] = x.y;
      rows.o[2 * n + 1][2 * half] = x.z;
      rows.o[2 * n + 1][2 * half + 1] = x.w;
    }
  }
  // All rows of a head work tile attend to the same tiles, so those with a state decide for those without: the warps
  // must branch alike.
  if (named_any(thread_of_cta() / kWarpgroup, kWarpgroup, current)) rows.flags |= AttentionState<C>::kCurrent;
}

// The softmax_offset of a row's merged splits has moved, so their acc is rescaled. This is rare, so it is not inlined.
template <class C>
__device__ __noinline__ void rescale_merged(float4* outputs, float kept) {
#pragma unroll 1
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    __stcg(outputs + 4 * n, float4{cuda::multiply_flushed(x.x, kept), cuda::multiply_flushed(x.y, kept),
                                   cuda::multiply_flushed(x.z, kept), cuda::multiply_flushed(x.w, kept)});
  }
}

// Completes the current split: merges its partial into the splits before it (kernels/attention/merge.hpp). This happens
// when a tile of the next split is about to come, or before the state is saved. At the end of a row finish_rows() does
// the same in registers. So the bits do not depend on where a task ends. The acc is added in global memory by
// reductions that nothing waits for.
template <class C>
__device__ __forceinline__ void merge_current_split(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                                    AttentionState<C>& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = !task_has_state(p) || present(head_tile, tile_row_of_thread() + 8 * half);
    float4* const outputs = merged_outputs<C>(p, head_tile, half);
    const std::uint32_t stats = merged_stats<C>(half);
    float softmax_offset = offset_of(rows, half);
    float sum = sum_of_quad(rows.l[half]);
    float factor = 1.0F;
    if (rows.has_merged(half)) {
      const float2 merged = load_pair(stats);
      const MergeStep step = cuda::merge_partials(merged.x, merged.y, softmax_offset, sum, kOffsetLog2Factor);
      factor = step.partial_scale;
      softmax_offset = step.softmax_offset;
      sum = step.sum;
      if (step.rescales) rescale_merged<C>(outputs, step.state_scale);
    }
    __syncwarp();  // the row's other threads have read the stats
    if (thread_of_cta() % 4 == 0) store_pair(stats, softmax_offset, sum);
    rows.l[half] = 0.0F;
    rows.shift[half] = 0.0F;
    if (!exists) continue;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      const float4 x{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                     rows.o[2 * n + 1][2 * half + 1]};
      if (rows.has_merged(half)) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(outputs + 4 * n),
                     "f"(cuda::multiply_flushed(x.x, factor)), "f"(cuda::multiply_flushed(x.y, factor)),
                     "f"(cuda::multiply_flushed(x.z, factor)), "f"(cuda::multiply_flushed(x.w, factor))
                     : "memory");
      } else {
        __stcg(outputs + 4 * n, x);
      }
    }
    rows.flags |= AttentionState<C>::kMerged << half;
  }
  rows.flags &= ~(AttentionState<C>::kCurrent | AttentionState<C>::kSplitComplete | AttentionState<C>::kOffsetSet |
                  AttentionState<C>::kOffsetSet << 1);
  rows.flags |= AttentionState<C>::kSpecial |
                // the next split's first tile sets its softmax_offset
                AttentionState<C>::kOverwriteAcc;
  __syncwarp();  // the stats are visible to all threads of the warp
}

template <class C>
__device__ __forceinline__ void save_rows(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                          const AttentionState<C>& rows) {
  const int tile_row = tile_row_of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!present(head_tile, tile_row + 8 * half)) continue;
    const cuda::StatePtrs state_ptrs = state_of<C>(p, head_tile, half);
    state_ptrs.stats[threadIdx.x % 4] = rows.l[half];
    if (threadIdx.x % 4 == 0) {
      state_ptrs.stats[cuda::kCurrentOffset] = offset_of(rows, half);
      state_ptrs.stats[cuda::kStateFlags] =
          static_cast<float>((rows.has_merged(half) ? cuda::kHasMerged : 0) |
                             (rows.has(AttentionState<C>::kCurrent) ? cuda::kHasCurrent : 0));
      const float2 merged = load_pair(merged_stats<C>(half));
      state_ptrs.stats[cuda::kMergedOffset] = merged.x;
      state_ptrs.stats[cuda::kMergedSum] = merged.y;
    }
    if (!rows.has(AttentionState<C>::kCurrent)) continue;
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; ++n) {
      reinterpret_cast<float4*>(state_ptrs.current + threadIdx.x % 4 * 4)[4 * n] =
          float4{rows.o[2 * n][2 * half], rows.o[2 * n][2 * half + 1], rows.o[2 * n + 1][2 * half],
                 rows.o[2 * n + 1][2 * half + 1]};
    }
  }
}

// Copies a warp's rows from shared memory to the output where some are not valid, or TMA can't store them.
template <class C>
__device__ __noinline__ void write_rows(const cuda::AttentionParams& p, HeadWorkTile head_tile, std::uint32_t staging) {
  constexpr int kChunks = C::kDimV / 8;
  auto* const out = static_cast<std::uint16_t*>(p.out.data);
  const bool aligned = ((reinterpret_cast<std::uint64_t>(out) |
                         static_cast<std::uint64_t>(2 * (p.out.token_stride | p.out.head_stride))) &
                        15U) == 0;
  const int first = thread_of_warpgroup() / 32 * 16;
#pragma unroll 1
  for (int i = thread_of_cta() % 32; i < 16 * kChunks; i += 32) {
    const int tile_row = first + i / kChunks;
    const int chunk = i % kChunks;
    if (!present(head_tile, tile_row)) continue;
    const uint4 elements = cuda::load_shared_16(
        staging + static_cast<std::uint32_t>(chunk / 8 * SharedMap<C>::kQPanel) + cuda::swizzled(tile_row, chunk % 8));
    std::uint16_t* to = out + (head_tile.row() + tile_row) * p.out.token_stride +
                        head_tile.query_head() * p.out.head_stride + chunk * 8;
    cuda::store_elements(to, elements, aligned);
  }
}

// Scale factors of a thread's two rows at the end, from their softmax_offsets and sums over all keys. Also writes LSE.
__device__ __forceinline__ void end_softmax(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                            const float (&softmax_offsets)[2], const float (&sums)[2],
                                            float (&inverse)[2]) {
  const int head = head_tile.query_head();
  const float* const sink = p.sinks == nullptr ? nullptr : p.sinks + head;
  const cuda::RowEnd ends[2] = {cuda::end_row(__fmul_rn(softmax_offsets[0], kLn2), sums[0], sink),
                                cuda::end_row(__fmul_rn(softmax_offsets[1], kLn2), sums[1], sink)};
  inverse[0] = ends[0].factor();
  inverse[1] = ends[1].factor();
  const int half = thread_of_cta() % 4;
  if (p.lse.data == nullptr || half > 1) return;  // two of a row's four threads write, one for each half
  const int at = tile_row_of_thread() + 8 * half;
  if (!present(head_tile, at)) return;
  p.lse.data[(head_tile.row() + at) * p.lse.token_stride + head * p.lse.head_stride] = __fadd_rn(
      half == 0 ? ends[0].softmax_offset : ends[1].softmax_offset, logf(half == 0 ? ends[0].sum : ends[1].sum));
}

template <class C>
__device__ __forceinline__ void stage_rows(const AttentionState<C>& rows, const float (&inverse)[2],
                                           std::uint32_t staging) {
  const int lane = thread_of_cta() % 32;
  const std::uint32_t to = staging + cuda::swizzled(thread_of_warpgroup() / 32 * 16 + lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::kDimV / 8; n += 2) {
    const auto pair = [&](int block, int half) {
      return cuda::MmaTraits<typename C::Element>::pack(
          cuda::scale_flushed(rows.o[block][2 * half], inverse[half]),
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

// Issues the TMA store of a warp's rows.
template <class C>
__device__ __forceinline__ void send_rows(const HopperParams& params, const HeadWorkTile& head_tile,
                                          std::uint32_t staging) {
  if (thread_of_cta() % 32 != 0) return;
  const int first = thread_of_warpgroup() / 32 * 16;
#pragma unroll
  for (int panel = 0; panel < C::kPanelsV; ++panel) {
    tma_store_box(&params.out,
                  staging + static_cast<std::uint32_t>(panel * SharedMap<C>::kQPanel + first * kPanelRowBytes),
                  panel * kPanelColumns, head_tile.query_head(), static_cast<int>(head_tile.row()) + first);
  }
  tma_store_commit();
}

// Calls visit(merged acc element, the thread's own acc element) for each of the thread's elements of a row.
template <class C, class Visit>
__device__ __forceinline__ void with_merged_outputs(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                                    int half, AttentionState<C>& rows, Visit visit) {
  const float4* const outputs = merged_outputs<C>(p, head_tile, half);
#pragma unroll
  for (int n = 0; n < C::kDimV / 16; ++n) {
    const float4 x = __ldcg(outputs + 4 * n);
    visit(x.x, rows.o[2 * n][2 * half]);
    visit(x.y, rows.o[2 * n][2 * half + 1]);
    visit(x.z, rows.o[2 * n + 1][2 * half]);
    visit(x.w, rows.o[2 * n + 1][2 * half + 1]);
  }
}

// Merges a row's current split, if there is one, with the merged ones in registers, as merge_current_split() does in
// memory.
template <class C>
__device__ __forceinline__ void merge_into_current(const cuda::AttentionParams& p, const HeadWorkTile& head_tile,
                                                   int half, AttentionState<C>& rows, float& softmax_offset,
                                                   float& sum) {
  const float2 merged = load_pair(merged_stats<C>(half));
  // A branch around each loop: a select for each element spills hundreds of bytes at 256 dims.
  if (!rows.has(AttentionState<C>::kCurrent)) {
    softmax_offset = merged.x;
    sum = merged.y;
    with_merged_outputs<C>(p, head_tile, half, rows, [](float before, float& o) { o = before; });
    return;
  }
  const MergeStep step = cuda::merge_partials(merged.x, merged.y, softmax_offset, sum, kOffsetLog2Factor);
  softmax_offset = step.softmax_offset;
  sum = step.sum;
  with_merged_outputs<C>(p, head_tile, half, rows,
                         [&](float before, float& o) { o = cuda::TensorArithmetic::join(before, o, step); });
}

// Epilogue: divides, writes LSE, rounds and stores the rows, 16 for each warp.
template <class C>
__device__ __forceinline__ void finish_rows(const HopperParams& params, const HeadWorkTile& head_tile,
                                            std::uint32_t staging, AttentionState<C>& rows) {
  const cuda::AttentionParams& p = params.attention;
  const int first = thread_of_warpgroup() / 32 * 16;
  const int valid_row_begin = head_tile.valid_row_begin();
  const int valid_row_end = head_tile.valid_row_end();
  if (valid_row_begin >= first + 16 || valid_row_end <= first) return;  // none of the warp's rows is valid
  float softmax_offsets[2];
  float totals[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    softmax_offsets[half] = offset_of(rows, half);
    totals[half] = sum_of_quad(rows.l[half]);
    if (rows.has_merged(half)) merge_into_current<C>(p, head_tile, half, rows, softmax_offsets[half], totals[half]);
  }
  float inverse[2];
  end_softmax(p, head_tile, softmax_offsets, totals, inverse);
  stage_rows<C>(rows, inverse, staging);
  if (!params.bulk_out || valid_row_begin > first || valid_row_end < first + 16) {
    write_rows<C>(p, head_tile, staging);
  } else {
    send_rows<C>(params, head_tile, staging);
  }
}

}  // namespace ringattn::sm90
