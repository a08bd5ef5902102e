// SPDX-License-Identifier: Apache-2.0
// Sums of splits in global memory, and the store of gradients.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention_backward/cuda/backward_work.cuh"

namespace ringattn::cuda {

// Addresses of a thread's two rows of one sum. In a row, the four threads of a quad have 16 bytes each, in turn, so
// that a thread reads only what it wrote.
struct SumRows {
  float* row[2];  // the thread's first 16 bytes; null for a row that is not the rank's

  static constexpr int kFloats = 4;                // of a thread in a turn
  static constexpr int kTurnFloats = 4 * kFloats;  // of a quad
};

// The thread's rows `slot` and slot + 8 of a row tile's sum of `width` floats; a part of it begins at `part`. `heads`
// and `head` are the state's. BackwardSums::scratch has the tile at `scratch_tile`.
__device__ __forceinline__ SumRows sum_rows(const BackwardSums& sums, const RowTile& tile, int scratch_tile, int slot,
                                            int heads, int head, int width, int part, bool open) {
  SumRows rows;
  const int lane = thread_of_cta() % 4 * SumRows::kFloats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = slot + 8 * half;
    const std::int64_t index = sums.state != nullptr
                                   ? ((tile.row + row) * heads + head) * sums.sums_of_row + (open ? 1 : 0)
                                   : std::int64_t{scratch_tile * kBackwardTile + row};
    float* memory = sums.state != nullptr ? sums.state : sums.scratch;
    rows.row[half] = row >= tile.valid_begin && row < tile.valid_end ? memory + index * width + part + lane : nullptr;
  }
  return rows;
}

__device__ __forceinline__ void store_floats(float* to, const float (&x)[SumRows::kFloats]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
// Rounds to nearest and flushes subnormals.
__device__ __forceinline__ void add_floats(float* to, const float (&x)[SumRows::kFloats]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
// The same for two floats.
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}
__device__ __forceinline__ void load_floats(const float* from, float (&x)[SumRows::kFloats]) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from)
               : "memory");
}

// Stores a sum if `first`, and otherwise adds it to the stored one.
template <int kBlocks>
__device__ __forceinline__ void add_sum(const SumRows& rows, const float (&d)[kBlocks][4], bool first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.row[half] == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      const float x[SumRows::kFloats] = {d[j][2 * half], d[j][2 * half + 1], d[j + 1][2 * half],
                                         d[j + 1][2 * half + 1]};
      float* const to = rows.row[half] + j / 2 * SumRows::kTurnFloats;
      if (first) {
        store_floats(to, x);
      } else {
        add_floats(to, x);
      }
    }
  }
}
// Sets the accumulators to an open sum, or to zero if there is none. It has no branches, because ptxas serialises wgmma
// if accumulators come from different paths.
template <int kBlocks>
__device__ __forceinline__ void load_sum(const SumRows& rows, bool any, float (&d)[kBlocks][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int loads = any && rows.row[half] != nullptr ? 1 : 0;
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      asm volatile(
          "{\n"
          ".reg .pred loads;\n"
          "setp.ne.s32 loads, %5, 0;\n"
          "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
          "@loads ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
          "}"
          : "=&f"(d[j][2 * half]), "=&f"(d[j][2 * half + 1]), "=&f"(d[j + 1][2 * half]), "=&f"(d[j + 1][2 * half + 1])
          : "l"(rows.row[half] + j / 2 * SumRows::kTurnFloats), "r"(loads)
          : "memory");
    }
  }
}

// add_sum() and load_sum() for accumulators of mma.sync. They access pairs of floats, as an instruction's four
// accumulators are aligned registers: with accesses of four floats from two of them, ptxas copies all accumulators in
// the main loop.
template <int kBlocks>
__device__ __forceinline__ void add_sum_in_pairs(const SumRows& rows, const float (&d)[kBlocks][4], bool first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.row[half] == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float* const to = rows.row[half] + j / 2 * SumRows::kTurnFloats + j % 2 * 2;
      if (first) {
        store_pair(to, d[j][2 * half], d[j][2 * half + 1]);
      } else {
        add_pair(to, d[j][2 * half], d[j][2 * half + 1]);
      }
    }
  }
}
template <int kBlocks>
__device__ __forceinline__ void load_sum_in_pairs(const SumRows& rows, bool any, float (&d)[kBlocks][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool loads = any && rows.row[half] != nullptr;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float2 pair{0.0F, 0.0F};
      if (loads) {
        asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                     : "=f"(pair.x), "=f"(pair.y)
                     : "l"(rows.row[half] + j / 2 * SumRows::kTurnFloats + j % 2 * 2)
                     : "memory");
      }
      d[j][2 * half] = pair.x;
      d[j][2 * half + 1] = pair.y;
    }
  }
}

// What end_rows() does with a sum: a uniform decision of the warp.
struct SumEnd {
  bool any_open, any_closed;  // the sums that exist
  bool stays_open;            // the open split goes on in a later task
  bool save;
};

// Writes columns `at`, at + 1, at + 8 and at + 9 of a gradient, rounded once.
template <class Element>
__device__ __forceinline__ void write_columns(const BackwardGradient& gradient, std::int64_t at,
                                              const float (&x)[SumRows::kFloats]) {
  if (gradient.is_f32) {
    float* row = static_cast<float*>(gradient.rows.data) + at;
    if (gradient.in_pairs) {
      *reinterpret_cast<float2*>(row) = make_float2(x[0], x[1]);
      *reinterpret_cast<float2*>(row + 8) = make_float2(x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < SumRows::kFloats; ++i) row[i / 2 * 8 + i % 2] = x[i];
    }
    return;
  }
  auto* row = static_cast<std::uint16_t*>(gradient.rows.data) + at;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const std::uint32_t elements = MmaTraits<Element>::pack(x[2 * pair], x[2 * pair + 1]);
    if (gradient.in_pairs) {
      *reinterpret_cast<std::uint32_t*>(row + pair * 8) = elements;
    } else {
      row[pair * 8] = static_cast<std::uint16_t>(elements);
      row[pair * 8 + 1] = static_cast<std::uint16_t>(elements >> 16);
    }
  }
}

// Finishes rows `slot` and slot + 8 of a row tile: adds the closed sum to the last split, with the rounding of red.add,
// stores the result in the state if that is saved, multiplies it by `factor`, rounds it once and writes it. d is only
// read: ptxas serialises wgmma if other instructions write accumulators.
template <class Element, int kBlocks>
__device__ __forceinline__ void finish_sum(const SumRows& closed, const SumEnd& end, const BackwardGradient& gradient,
                                           const RowTile& tile, int slot, int head, const float (&d)[kBlocks][4],
                                           float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (closed.row[half] == nullptr) continue;
    const std::int64_t at = (tile.row + slot + 8 * half) * gradient.rows.token_stride +
                            head * gradient.rows.head_stride + first_column_of_thread();
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      float x[SumRows::kFloats];
      float before[SumRows::kFloats] = {0.0F, 0.0F, 0.0F, 0.0F};
      float* const sum = closed.row[half] + j / 2 * SumRows::kTurnFloats;
      if (end.any_closed) load_floats(sum, before);
#pragma unroll
      for (int i = 0; i < SumRows::kFloats; ++i) {
        const float last = d[j + i / 2][2 * half + i % 2];
        float total;
        asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(total) : "f"(before[i]), "f"(last));
        x[i] = !end.any_open ? before[i] : !end.any_closed ? last : total;
      }
      if (end.save && end.any_open && !end.stays_open) store_floats(sum, x);
#pragma unroll
      for (int i = 0; i < SumRows::kFloats; ++i) x[i] = __fmul_rn(x[i], factor);
      write_columns<Element>(gradient, at + j * 8, x);
    }
  }
}

}  // namespace ringattn::cuda
