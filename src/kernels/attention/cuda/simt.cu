// SPDX-License-Identifier: Apache-2.0
// sm80_simt: attention in fp32 with fused multiply-adds. A CTA of four warps computes 16 rows of one head, each warp
// four of them. Shared memory holds keys and values of 32 tokens at a time as fp32, with all columns up to head_dim
// 256, else 128 columns at a time. Each 32 keys are one step
//   x  = softcap(S · softmax_scale)         m′ = max(m, max x)      over the keys that the row sees
//   p  = exp(x − m′)                        s  = exp(m − m′)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// A step without keys that the row sees is skipped. Steps begin at multiples of 32 in their sequence, so a row's
// results depend only on the row and its keys. Each KV split begins with an empty partial, which is then merged into
// those before it (kernels/attention/merge.hpp).
#include <utility>

#include "base/cuda.hpp"
#include "kernels/attention/cuda/simt.hpp"
#include "kernels/attention/cuda/simt_rows.cuh"
#include "kernels/attention/cuda/tile_lookup.cuh"
#include "kernels/attention/key_positions.hpp"

namespace ringattn::cuda {

namespace simt {

namespace {

// Loads `rows` rows of K or V as fp32 into shared memory. Rows after the first `keys` become zeros.
__device__ void load_rows(const void* data, int dtype, std::int64_t offset, std::int64_t stride, int rows, int keys,
                          int dim, int pitch, float* target) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * dim; i += kWarps * 32) {
    const int key = i / dim;
    target[key * pitch + i % dim] = key < keys ? element(data, dtype, offset + key * stride + i % dim) : 0.0F;
  }
}

// Loads columns [column, column + dim) of K or V for the keys [begin, begin + kStepKeys) of a tile in page runs. The
// sequence has the first `keys` of them.
template <bool kKeys>
__device__ void load_step(const AttentionParams& p, const TileEntry* page_runs, int kv_head, int begin, int keys,
                          int column, int dim, int pitch, float* target) {
  const int page_run_keys = kSimtKeyTile / p.tables.page_runs;
  const int rows = page_run_keys < kStepKeys ? page_run_keys : kStepKeys;
  for (int first = 0; first < kStepKeys; first += rows) {
    const int left = keys - first;
    float* const to = target + first * pitch;
    if (left <= 0) {  // no keys: the page run may have no entry
      load_rows(nullptr, p.dtype, 0, 0, rows, 0, dim, pitch, to);
      continue;
    }
    const TileEntry& page_run = page_runs[(begin + first) / page_run_keys];
    const std::int64_t row = page_run.row + (begin + first) % page_run_keys;
    const SourceEntry& source = source_of(p.tables, page_run.source);
    if constexpr (kKeys) {
      load_rows(source.k, p.dtype, k_offset(source, row, kv_head) + column, source.k_token_stride, rows, left, dim,
                pitch, to);
    } else {
      load_rows(source.v, p.dtype, v_offset(source, row, kv_head) + column, source.v_token_stride, rows, left, dim,
                pitch, to);
    }
  }
}

// Calls visit.operator()<kBlock>() for each block of V's columns.
template <class C, class Visit>
__device__ __forceinline__ void for_each_column_block(Visit visit) {
  [&]<int... kBlock>(std::integer_sequence<int, kBlock...>) { (visit.template operator()<kBlock>(), ...); }
  (std::make_integer_sequence<int, C::kColumnBlocks>());
}

// The columns of a step whose keys' positions are in `span`. They are contiguous because positions ascend. `position`
// is that of the lane's key.
__device__ ColumnRange columns_within(const PositionSpan& span, std::int32_t position) {
  const unsigned seen = __ballot_sync(kAllLanes, span.has(position));
  return seen == 0 ? ColumnRange{} : ColumnRange{__ffs(static_cast<int>(seen)) - 1, 32 - __clz(static_cast<int>(seen))};
}

template <class C>
__global__ void __launch_bounds__(kWarps * 32, C::kCtas) simt_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ float memory[];
  const Shared<C> shared(memory, p);
  const int k_columns = C::columns(p.head_dim);
  const int v_columns = C::columns(p.head_dim_v);
  const WorkTile work_tile = p.tables.work_tiles[static_cast<int>(blockIdx.x) / p.schedule.entry_heads];
  const int head = work_tile.head + static_cast<int>(blockIdx.x) % p.schedule.entry_heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  SimtRow<C> rows[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int tile_row = warp * kRowsOfWarp + r;
    rows[r].flags = 0;
    rows[r].merged_m = -INFINITY;
    rows[r].merged_l = 0.0F;
    rows[r].merged_o = shared.merged + tile_row * p.head_dim_v;
    begin_split(rows[r]);
    if (p.state.resume && tile_row < work_tile.valid_row_end) load_row(p, work_tile.row + tile_row, head, rows[r]);
  }
  if (work_tile.tiles > 0) {
    for (int i = static_cast<int>(threadIdx.x); i < work_tile.valid_row_end * p.head_dim; i += kWarps * 32) {
      const std::int64_t row = work_tile.row + i / p.head_dim;
      shared.q[i] = element(p.q.data, p.dtype, row * p.q.token_stride + head * p.q.head_stride + i % p.head_dim);
    }
  }

  const Visibility visibility(p.mask, work_tile.key_length);
  for (int t = 0; t < work_tile.tiles; ++t) {
    const auto [tile, page_runs] = tile_of_kv_loop(p.tables, work_tile, t);
    if ((work_tile.split_position + t) % kTilesPerKvSplit == 0) {
      // Consecutive tiles have consecutive indices, so the current partial at a split's first tile belongs to the split
      // before.
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) merge_current_split(p, rows[r]);
    }
    for (int begin = 0; begin < kSimtKeyTile; begin += kStepKeys) {
      const std::int64_t first_key = tile * kSimtKeyTile + begin;
      const std::int64_t left = work_tile.key_length - first_key;
      if (left <= 0) break;
      const int keys = left < kStepKeys ? static_cast<int>(left) : kStepKeys;
      std::int32_t own = kNoPosition;  // position of the lane's key, if keys have explicit positions
      if (p.tables.positions != nullptr) {
        const std::int64_t list =
            (page_runs - p.tables.tiles) / p.tables.page_runs * p.tables.position_lists + work_tile.position_list;
        own = __ldg(p.tables.positions + list * kSimtKeyTile + begin + lane);
      }
      RowStep steps[kRowsOfWarp];
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        steps[r] = {};
        const int tile_row = warp * kRowsOfWarp + r;
        if (tile_row >= work_tile.valid_row_end) continue;
        const std::int64_t position = work_tile.position + tile_row;
        steps[r].seen = p.tables.positions != nullptr
                            ? columns_within(positions_within(visibility.mask_range(position)), own)
                            : columns_of(visibility.keys(position), first_key, kStepKeys);
      }
      const auto load_values = [&](int column) {
        const int dim = p.head_dim_v - column < v_columns ? p.head_dim_v - column : v_columns;
        load_step<false>(p, page_runs, kv_head, begin, keys, column, dim, v_columns, shared.v);
      };
#pragma unroll 1
      for (int column = 0; column < p.head_dim; column += k_columns) {
        const int dim = p.head_dim - column < k_columns ? p.head_dim - column : k_columns;
        __syncthreads();
        load_step<true>(p, page_runs, kv_head, begin, keys, column, dim, k_columns + 1, shared.k);
        if (column == 0) load_values(0);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
          if (!steps[r].sees(lane)) continue;
          steps[r].product = add_qk(steps[r].product, shared.q + (warp * kRowsOfWarp + r) * p.head_dim + column,
                                    shared.k + lane * (k_columns + 1), dim);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        if (!steps[r].seen.empty()) weigh_keys(p, rows[r], steps[r]);
      }
      for_each_column_block<C>([&]<int kBlock>() {
        constexpr int kFirst = kBlock * C::kColumns;
        if constexpr (kFirst > 0) {
          if (kFirst >= p.head_dim_v) return;
          __syncthreads();
          load_values(kFirst);
          __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
          if (!steps[r].seen.empty()) add_values<C, kFirst>(p, rows[r], steps[r], shared.v, v_columns);
        }
      });
    }
  }

#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int tile_row = warp * kRowsOfWarp + r;
    if (tile_row >= work_tile.valid_row_end) continue;
    if (p.state.save) save_row(p, work_tile.row + tile_row, head, rows[r]);
    if (p.finish) finish_row(p, rows[r], work_tile.row + tile_row, head);
  }
}

// Sets the shared memory limit for each kernel's largest head dims.
template <class C>
void prepare() {
  constexpr auto kBytes = static_cast<int>(C::shared_bytes(C::kMax, C::kMax));
  check_cuda(cudaFuncSetAttribute(simt_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
}
void prepare_simt() {
  prepare<NarrowShape>();
  prepare<WideShape>();
}

template <class C>
void launch(const AttentionParams& params, Stream stream) {
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  simt_kernel<C>
      <<<blocks, kWarps * 32, C::shared_bytes(params.head_dim, params.head_dim_v), cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_simt");
}
void launch_simt(const AttentionParams& params, Stream stream) {
  const bool narrow = params.head_dim <= NarrowShape::kMax && params.head_dim_v <= NarrowShape::kMax;
  narrow ? launch<NarrowShape>(params, stream) : launch<WideShape>(params, stream);
}

}  // namespace

}  // namespace simt

constinit const Launcher simt_attention{simt::prepare_simt, simt::launch_simt};

}  // namespace ringattn::cuda
