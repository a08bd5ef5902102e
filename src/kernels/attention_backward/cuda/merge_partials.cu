// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/attention_backward/cuda/merge_partials.hpp"
#include "kernels/attention_backward/cuda/sums.cuh"
#include "kernels/common/cuda/load_kernel.hpp"

namespace ringattn::cuda {

namespace {

// A thread has the two rows and the columns of a thread of the warpgroup that computed a head tile.
constexpr int kMergeThreads = 128;
constexpr int kColumnsOfCta = 32;
constexpr int kTurns = kColumnsOfCta / SumRows::kTurnFloats;

struct MergeParams {
  BackwardTables tables;
  BackwardSums sums;
  MergedSum sum;
  std::int32_t first_tile;  // of the partial sums in BackwardSums::scratch
  std::int32_t head_tiles;  // of a CTA that computed them
};

template <class Element>
__global__ void __launch_bounds__(kMergeThreads) merge_partials_kernel(const __grid_constant__ MergeParams p) {
  const MergedHeadTile& merged = p.tables.merged[blockIdx.x];
  const auto kv_head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.z) * kColumnsOfCta;
  const RowTile tile = p.tables.row_tiles[merged.row_tile];
  const int head = kv_head * p.tables.group + merged.head;
  const int slot = thread_of_cta() / 32 * 16 + thread_of_cta() % 32 / 4;
  float x[2][kTurns][SumRows::kFloats] = {};
  for (int n = 0; n < merged.splits; ++n) {
    const int pair = (merged.partial + n) * p.tables.kv_heads + kv_head;
    const SumRows rows = sum_rows(p.sums, tile, p.first_tile + pair * p.head_tiles + merged.head_tile, slot, 0, 0,
                                  p.sum.width, p.sum.part + column, false);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.row[half] == nullptr) continue;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        float split[SumRows::kFloats];
        load_floats(rows.row[half] + turn * SumRows::kTurnFloats, split);
#pragma unroll
        for (int i = 0; i < SumRows::kFloats; ++i) {
          float total;
          asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(total) : "f"(x[half][turn][i]), "f"(split[i]));
          x[half][turn][i] = n == 0 ? split[i] : total;
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = slot + 8 * half;
    if (row < tile.valid_begin || row >= tile.valid_end) continue;
    const StridedRows<void>& to = p.sum.gradient.rows;
    const std::int64_t at =
        (tile.row + row) * to.token_stride + head * to.head_stride + column + first_column_of_thread();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (float& value : x[half][turn]) value = __fmul_rn(value, p.sum.factor);
      write_columns<Element>(p.sum.gradient, at + turn * SumRows::kTurnFloats, x[half][turn]);
    }
  }
}

}  // namespace

void prepare_merge_partials() {
  load_kernel(&merge_partials_kernel<__nv_bfloat16>);
  load_kernel(&merge_partials_kernel<__half>);
}

void merge_partials(const BackwardCommon& common, const MergedSum& sum, Dtype dtype, int ctas, int head_tiles,
                    Stream stream) {
  const dim3 grid(static_cast<unsigned>(common.tables.merged_count), static_cast<unsigned>(common.tables.kv_heads),
                  static_cast<unsigned>(sum.columns / kColumnsOfCta));
  const auto kernel = dtype == Dtype::kBf16 ? &merge_partials_kernel<__nv_bfloat16> : &merge_partials_kernel<__half>;
  kernel<<<grid, kMergeThreads, 0, cuda_stream(stream)>>>(
      {common.tables, common.sums, sum, ctas * head_tiles, head_tiles});
  check_cuda(cudaGetLastError(), "partial sums of a backward pass");
}

}  // namespace ringattn::cuda
