// SPDX-License-Identifier: Apache-2.0
// The fold in fp32, by fused multiply-adds. A CTA of four warps folds 16 rows of one head, each warp four of them; keys
// and values of 32 tokens at a time lie in shared memory as fp32: all of their columns up to head_dim 256, else 128
// columns at a time. Each 32 keys are one step
//   x  = softcap(S · softmax_scale)         m′ = max(m, max x)      over the keys that the row sees
//   p  = exp(x − m′)                        s  = exp(m − m′)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// and a step in which the row sees no key is left out. Steps begin at multiples of 32 in their sequence, so a row's
// numbers depend on nothing but the row and its keys. Each group of key tiles begins anew, and then joins those before
// it (kernels/merge.hpp).
#include <utility>

#include "base/cuda.hpp"
#include "kernels/cuda/device/simt.hpp"
#include "kernels/cuda/device/simt_rows.cuh"
#include "kernels/cuda/device/tile_lookup.cuh"
#include "kernels/key_positions.hpp"

namespace ringattn::cuda {

namespace plain {

namespace {

// `rows` rows of K or V as fp32 in shared memory; those behind the first `keys` become zeros.
__device__ void load_rows(const void* data, int dtype, std::int64_t offset, std::int64_t stride, int rows, int keys,
                          int dim, int pitch, float* target) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * dim; i += kWarps * 32) {
    const int key = i / dim;
    target[key * pitch + i % dim] = key < keys ? element(data, dtype, offset + key * stride + i % dim) : 0.0F;
  }
}

// Columns [column, column + dim) of K, or of V, of the keys [begin, begin + kStepKeys) of a tile in page_runs. The
// sequence has the first `keys` of them.
template <bool kKeys>
__device__ void load_decode(const AttentionParams& p, const TileEntry* page_runs, int kv_head, int begin, int keys,
                            int column, int dim, int pitch, float* target) {
  const int page_run_keys = kSimtKeyTile / p.tables.page_runs;
  const int rows = page_run_keys < kStepKeys ? page_run_keys : kStepKeys;
  for (int first = 0; first < kStepKeys; first += rows) {
    const int left = keys - first;
    float* const to = target + first * pitch;
    if (left <= 0) {  // the page_run has no entry
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

// Calls visit.operator()<kPiece>() for each page_run of V's columns.
template <class C, class Visit>
__device__ __forceinline__ void for_each_piece(Visit visit) {
  [&]<int... kPiece>(std::integer_sequence<int, kPiece...>) { (visit.template operator()<kPiece>(), ...); }
  (std::make_integer_sequence<int, C::kPieces>());
}

// The columns of a step whose keys stand in `span`: one run, as positions ascend. `position`: of the lane's key.
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

  Row<C> rows[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int tile_row = warp * kRowsOfWarp + r;
    rows[r].parts = 0;
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
      // Rows fold tiles at consecutive places, so what is current when a group begins is another's.
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) merge_current_split(p, rows[r]);
    }
    for (int begin = 0; begin < kSimtKeyTile; begin += kStepKeys) {
      const std::int64_t first_key = tile * kSimtKeyTile + begin;
      const std::int64_t left = work_tile.key_length - first_key;
      if (left <= 0) break;
      const int keys = left < kStepKeys ? static_cast<int>(left) : kStepKeys;
      std::int32_t own = kNoPosition;  // of the lane's key, where keys have positions of their own
      if (p.tables.positions != nullptr) {
        const std::int64_t list =
            (page_runs - p.tables.tiles) / p.tables.page_runs * p.tables.position_lists + work_tile.position_list;
        own = __ldg(p.tables.positions + list * kSimtKeyTile + begin + lane);
      }
      StepOfRow steps[kRowsOfWarp];
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
        load_decode<false>(p, page_runs, kv_head, begin, keys, column, dim, v_columns, shared.v);
      };
#pragma unroll 1
      for (int column = 0; column < p.head_dim; column += k_columns) {
        const int dim = p.head_dim - column < k_columns ? p.head_dim - column : k_columns;
        __syncthreads();
        load_decode<true>(p, page_runs, kv_head, begin, keys, column, dim, k_columns + 1, shared.k);
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
      for_each_piece<C>([&]<int kPiece>() {
        constexpr int kFirst = kPiece * C::kColumns;
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

// Each kernel is made ready for its largest head dims.
template <class C>
void prepare() {
  constexpr auto kBytes = static_cast<int>(C::shared_bytes(C::kMax, C::kMax));
  check_cuda(cudaFuncSetAttribute(simt_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
}
void prepare_simt() {
  prepare<Narrow>();
  prepare<Wide>();
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
  const bool narrow = params.head_dim <= Narrow::kMax && params.head_dim_v <= Narrow::kMax;
  narrow ? launch<Narrow>(params, stream) : launch<Wide>(params, stream);
}

}  // namespace

}  // namespace plain

constinit const Launcher simt_attention{plain::prepare_simt, plain::launch_simt};

}  // namespace ringattn::cuda
