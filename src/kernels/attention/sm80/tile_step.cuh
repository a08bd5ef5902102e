// SPDX-License-Identifier: Apache-2.0
// The tile step of sm80_attention, online softmax of one KV tile within a KV split, and the state of rows between KV
// tiles and KV splits. Prefill and decode use both.
//
// The tile step is (m, l, O) ← attend((m, l, O), tile), in registers:
//   x  = S, −∞ where masked                 m′ = max(m, max x)
//   p  = exp2(x · c − m′ · c)               s  = exp2((m − m′) · c)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// S is Q Kᵀ, and c = softmax_scale · log₂ e. With a soft-cap, or a scale that is not positive, S is capped and scaled
// first and c = log₂ e. The tensor cores accumulate Σ p · v of a tile from zero, with truncation. The fp32 units add
// tiles, rounded to nearest.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/attention/key_positions.hpp"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// Columns of O that a warp holds: all columns of its rows, or a slice of them.
template <class C>
inline constexpr int kWarpColumns = C::kDimV / C::kSlices;

// The accumulators of a warp's rows in mma.sync's fragment layout. Thread t of a quad holds columns 8n + 2t and
// 8n + 2t + 1 of row r (elements 0, 1) and of row r + 8 (elements 2, 3). Warps that share rows all hold the same m and
// l.
template <class C>
struct AttentionState {
  float o[C::kRowBlocks][kWarpColumns<C> / 8][4];
  float m[C::kRowBlocks][2];
  float l[C::kRowBlocks][2];
};

// Scales, and caps, scores before their maximum is taken, if AttentionParams::Softmax::scaled_first is set.
__device__ __forceinline__ void scale_scores(const cuda::AttentionParams::Softmax& softmax, float (&s)[4]) {
  // cap · tanh(x / cap) = cap − 2 cap / (e^(2x / cap) + 1). The absolute error is a few 2⁻²³ of the cap.
  const float inner = softmax.cap > 0.0F ? 2.88539008F * softmax.scale / softmax.cap : 0.0F;
  const float outer = -2.0F * softmax.cap;
#pragma unroll
  for (float& x : s) {
    x = softmax.cap > 0.0F
            ? __fmaf_rn(outer, cuda::reciprocal_approx(__fadd_rn(cuda::exp2_approx(__fmul_rn(x, inner)), 1.0F)),
                        softmax.cap)
            : __fmul_rn(x, softmax.scale);
  }
}

// `Rows` has the rows' positions: key_length(), and positions(tile_row, first_key), which returns a function from an
// offset to the position of row tile_row + offset, relative to first_key. If C::kPositions, keys have explicit
// positions.
template <class C, class Rows>
class TileStep {
 public:
  using Element = typename C::Element;
  static_assert(C::kSlices == 1);

  __device__ TileStep(const cuda::AttentionParams& p, const Rows& rows, std::uint32_t q_tile)
      : p_(p), rows_(rows), q_tile_(q_tile) {}

  // k_tile and v_tile are addresses in shared memory. first_key() returns the tile's first key, or the address of its
  // keys' positions, and is called only if the tile is masked. `between` is called after K has been read.
  template <class FirstKey, class Between>
  __device__ __forceinline__ void attend(AttentionState<C>& state, std::uint32_t k_tile, std::uint32_t v_tile,
                                         bool masked, FirstKey&& first_key, Between&& between) const {
    float s[C::kRowBlocks][C::kKeyTile / 8][4];
    qk_gemm(s, k_tile);
    between();
    if (p_.softmax.scaled_first) {
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) scale_scores(p_.softmax, s[b][n]);
      }
    }
    if (masked) {
      if constexpr (C::kPositions) {
        mask_by_positions(s, reinterpret_cast<const std::int32_t*>(first_key()));
      } else {
        mask_scores(s, first_key());
      }
    }

    std::uint32_t probability[C::kRowBlocks][C::kKeyTile / 16][4];
    float scale[C::kRowBlocks][2];
    exponentiate(state, s, probability, scale);
    // Never taken. It ends the basic block. If softmax and P V are one basic block and registers are scarce, ptxas
    // (13.0) serializes P V's MMAs two at a time. Other configurations are faster without it.
    if (C::kEndBasicBlock && p_.heads == 0) __trap();
    pv_gemm(state, probability, scale, v_tile);
  }

 private:
  using Scores = float[C::kRowBlocks][C::kKeyTile / 8][4];
  using Probabilities = std::uint32_t[C::kRowBlocks][C::kKeyTile / 16][4];

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }

  __device__ __forceinline__ void qk_gemm(Scores& s, std::uint32_t k_tile) const {
    const std::uint32_t q_at = q_tile_ + cuda::swizzled(warp() * C::kRowBlocks * 16 + lane() % 16, lane() / 16);
    const std::uint32_t k_at = k_tile + cuda::swizzled(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      std::uint32_t a[C::kRowBlocks][4];
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
        cuda::load_matrix(a[b], cuda::at_columns<C::kQueryTile>(q_at, step) +
                                    static_cast<std::uint32_t>(b * 16 * cuda::kPanelRowBytes));
      }
#pragma unroll
      for (int n = 0; n < C::kKeyTile / 16; ++n) {
        std::uint32_t k[4];
        cuda::load_matrix(
            k, cuda::at_columns<C::kKeyTile>(k_at, step) + static_cast<std::uint32_t>(n * 16 * cuda::kPanelRowBytes));
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b) {
          cuda::multiply<Element>(s[b][2 * n], a[b], k[0], k[1], step == 0);
          cuda::multiply<Element>(s[b][2 * n + 1], a[b], k[2], k[3], step == 0);
        }
      }
    }
  }

  __device__ __forceinline__ void mask_scores(Scores& s, std::int64_t first_key) const {
    // Positions are relative to the tile's first key, to save registers.
    const Visibility visibility(p_.mask, rows_.key_length() - first_key);
    const auto position = rows_.positions(warp() * C::kRowBlocks * 16 + lane() / 4, first_key);
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const ColumnRange seen = columns_of(visibility.keys(position(16 * b + 8 * half)), 0, C::kKeyTile);
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + lane() % 4 * 2 + i;
            if (key < seen.begin || key >= seen.end) s[b][n][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }

  // positions: [kKeyTile] in global memory, kNoPosition if the sequence has no such key.
  __device__ __forceinline__ void mask_by_positions(Scores& s, const std::int32_t* positions) const {
    const auto position = rows_.positions(warp() * C::kRowBlocks * 16 + lane() / 4, 0);
    PositionSpan seen[C::kRowBlocks][2];
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seen[b][half] = positions_within(Visibility(p_.mask, 0).mask_range(position(16 * b + 8 * half)));
      }
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTile / 8; ++n) {
      const int2 keys = __ldg(reinterpret_cast<const int2*>(positions + n * 8 + lane() % 4 * 2));
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!seen[b][half].has(keys.x)) s[b][n][2 * half] = -INFINITY;
          if (!seen[b][half].has(keys.y)) s[b][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Turns scores into probabilities, and updates m and l. fmaxf passes NaN over, but its p is NaN.
  __device__ __forceinline__ void exponentiate(AttentionState<C>& state, Scores& s, Probabilities& probability,
                                               float (&scale)[C::kRowBlocks][2]) const {
    const float c = p_.softmax.exponent_base2;
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = s[b][0][2 * half];
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) maximum = fmaxf(maximum, s[b][n][2 * half + i]);
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
        const float m_old = state.m[b][half];
        const float m_new = fmaxf(m_old, maximum);
        // If m_new is −∞, every score so far is −∞, and exp2(−∞) = 0.
        const float softmax_offset = m_new == -INFINITY ? 0.0F : m_new;
        state.m[b][half] = m_new;
        // The difference is taken first, so that an unchanged maximum scales by exactly 1.
        scale[b][half] = cuda::exp2_approx(__fmul_rn(__fsub_rn(m_old, softmax_offset), c));
        const float shift = __fmul_rn(-softmax_offset, c);
        float sum = 0.0F;
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[b][n][2 * half + i];
            x = cuda::exp2_approx(__fmaf_rn(x, c, shift));
            sum = __fadd_rn(sum, x);
          }
        }
        state.l[b][half] = __fmaf_rn(state.l[b][half], scale[b][half], sum);
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n) {
          probability[b][n / 2][2 * (n % 2) + half] =
              cuda::MmaTraits<Element>::pack(s[b][n][2 * half], s[b][n][2 * half + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void pv_gemm(AttentionState<C>& state, const Probabilities& probability,
                                          const float (&scale)[C::kRowBlocks][2], std::uint32_t v_tile) const {
    const std::uint32_t v_at = v_tile + cuda::swizzled(lane() % 16, lane() / 16);
    constexpr int kColumns = C::kColumnsAtOnce;  // blocks of 16 columns accumulated concurrently
#pragma unroll
    for (int n = 0; n < C::kDimV / 16; n += kColumns) {
      float sum[kColumns][C::kRowBlocks][2][4];
#pragma unroll
      for (int k = 0; k < C::kKeyTile / 16; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          std::uint32_t v[4];
          cuda::load_matrix_transposed(v, cuda::at_columns<C::kKeyTile>(v_at, n + c) +
                                              static_cast<std::uint32_t>(k * 16 * cuda::kPanelRowBytes));
#pragma unroll
          for (int b = 0; b < C::kRowBlocks; ++b) {
            cuda::multiply<Element>(sum[c][b][0], probability[b][k], v[0], v[1], k == 0);
            cuda::multiply<Element>(sum[c][b][1], probability[b][k], v[2], v[3], k == 0);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& o = state.o[b][2 * (n + c) + h][i];
              o = __fmaf_rn(o, scale[b][i / 2], sum[c][b][h][i]);
            }
          }
        }
      }
    }
  }

  const cuda::AttentionParams& p_;
  const Rows rows_;
  std::uint32_t q_tile_;
};

// State of rows between KV tiles and between KV splits: saved state in memory, merged splits, and the epilogue with
// normalization and stores. softmax_offsets are running maxima of a split's scores before
// AttentionParams::Softmax::exponent is applied.

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
