// SPDX-License-Identifier: Apache-2.0
// Sums of splits in global memory, and the gradient's store.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention_backward/sm90/work.cuh"

namespace ringattn::sm90 {

// Where a thread's two rows of one sum are. In a row, the four threads of a quad have 16 bytes each in turn, so that a
// thread reads what it wrote.
struct SumRows {
  float* row[2];  // the thread's first 16 bytes; null for a row that is not the rank's

  static constexpr int kFloats = 4;                // of a thread in a turn
  static constexpr int kTurnFloats = 4 * kFloats;  // of a quad
};

// The rows of a consumer's sum of `width` floats; a part of it begins at `part`. `heads` and `head` are the state's.
__device__ __forceinline__ SumRows sum_rows(const cuda::BackwardSums& sums, const RowTile& tile, int consumer,
                                            int heads, int head, int width, int part, bool open) {
  SumRows rows;
  const int lane = thread_of_cta() % 4 * SumRows::kFloats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = tile_row_of_thread() + 8 * half;
    const std::int64_t index = sums.state != nullptr
                                   ? ((tile.row + slot) * heads + head) * 2 + (open ? 1 : 0)
                                   : (std::int64_t{blockIdx.x} * kBackwardConsumers + consumer) * kBackwardTile + slot;
    float* memory = sums.state != nullptr ? sums.state : sums.scratch;
    rows.row[half] = slot >= tile.valid_begin && slot < tile.valid_end ? memory + index * width + part + lane : nullptr;
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
__device__ __forceinline__ void load_floats(const float* from, float (&x)[SumRows::kFloats]) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from)
               : "memory");
}

// Stores a sum where `first`, and adds it to the stored one otherwise.
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
// Sets the accumulators to an open sum, or to zero if there is none. Without branches: ptxas serialises wgmma where
// accumulators come from different paths.
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

// What end_rows() does with a sum: a uniform decision of the warp.
struct SumEnd {
  bool any_open, any_closed;  // the sums that exist
  bool stays_open;            // the open split goes on in a later task
  bool save;
};

// Writes columns `at`, at + 1, at + 8 and at + 9 of a gradient, rounded once.
template <class Element>
__device__ __forceinline__ void write_columns(const cuda::BackwardGradient& gradient, std::int64_t at,
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
    const std::uint32_t elements = cuda::MmaTraits<Element>::pack(x[2 * pair], x[2 * pair + 1]);
    if (gradient.in_pairs) {
      *reinterpret_cast<std::uint32_t*>(row + pair * 8) = elements;
    } else {
      row[pair * 8] = static_cast<std::uint16_t>(elements);
      row[pair * 8 + 1] = static_cast<std::uint16_t>(elements >> 16);
    }
  }
}

// Finishes rows: adds the closed sum to the last split, with the rounding of red.add, saves the result where the state
// is kept, and writes it, multiplied by `factor` and rounded once. d is only read: ptxas serialises wgmma if other
// instructions write accumulators.
template <class Element, int kBlocks>
__device__ __forceinline__ void finish_sum(const SumRows& closed, const SumEnd& end,
                                           const cuda::BackwardGradient& gradient, const RowTile& tile, int head,
                                           const float (&d)[kBlocks][4], float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (closed.row[half] == nullptr) continue;
    const std::int64_t at = (tile.row + tile_row_of_thread() + 8 * half) * gradient.rows.token_stride +
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

}  // namespace ringattn::sm90
