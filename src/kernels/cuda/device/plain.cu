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
#include "kernels/cuda/device/plain.hpp"
#include "kernels/cuda/device/plain_rows.cuh"
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

// Columns [column, column + dim) of K, or of V, of the keys [begin, begin + kStepKeys) of a tile in pieces. The
// sequence has the first `keys` of them.
template <bool kKeys>
__device__ void load_step(const FoldParams& p, const TileEntry* pieces, int kv_head, int begin, int keys, int column,
                          int dim, int pitch, float* target) {
  const int piece_keys = kPlainKeyTile / p.tables.pieces;
  const int rows = piece_keys < kStepKeys ? piece_keys : kStepKeys;
  for (int first = 0; first < kStepKeys; first += rows) {
    const int left = keys - first;
    float* const to = target + first * pitch;
    if (left <= 0) {  // the piece has no entry
      load_rows(nullptr, p.dtype, 0, 0, rows, 0, dim, pitch, to);
      continue;
    }
    const TileEntry& piece = pieces[(begin + first) / piece_keys];
    const std::int64_t row = piece.row + (begin + first) % piece_keys;
    const SourceEntry& source = source_of(p.tables, piece.source);
    if constexpr (kKeys) {
      load_rows(source.k, p.dtype, k_offset(source, row, kv_head) + column, source.k_token_stride, rows, left, dim,
                pitch, to);
    } else {
      load_rows(source.v, p.dtype, v_offset(source, row, kv_head) + column, source.v_token_stride, rows, left, dim,
                pitch, to);
    }
  }
}

// Calls visit.operator()<kPiece>() for each piece of V's columns.
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
__global__ void __launch_bounds__(kWarps * 32, C::kCtas) plain_kernel(const __grid_constant__ FoldParams p) {
  extern __shared__ float memory[];
  const Shared<C> shared(memory, p);
  const int k_columns = C::columns(p.head_dim);
  const int v_columns = C::columns(p.head_dim_v);
  const WorkItem item = p.tables.items[static_cast<int>(blockIdx.x) / p.schedule.piece_heads];
  const int head = item.head + static_cast<int>(blockIdx.x) % p.schedule.piece_heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  Row<C> rows[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int slot = warp * kRowsOfWarp + r;
    rows[r].parts = 0;
    rows[r].closed_m = -INFINITY;
    rows[r].closed_l = 0.0F;
    rows[r].closed_o = shared.closed + slot * p.head_dim_v;
    begin_group(rows[r]);
    if (p.state.resume && slot < item.slot_end) load_row(p, item.row + slot, head, rows[r]);
  }
  if (item.tiles > 0) {
    for (int i = static_cast<int>(threadIdx.x); i < item.slot_end * p.head_dim; i += kWarps * 32) {
      const std::int64_t row = item.row + i / p.head_dim;
      shared.q[i] = element(p.q.data, p.dtype, row * p.q.token_stride + head * p.q.head_stride + i % p.head_dim);
    }
  }

  const Visibility visibility(p.mask, item.key_length);
  for (int t = 0; t < item.tiles; ++t) {
    const auto [tile, pieces] = tile_of_walk(p.tables, item, t);
    if ((item.place + t) % kGroupTiles == 0) {
      // Rows fold tiles at consecutive places, so what is open when a group begins is another's.
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) close_group(p, rows[r]);
    }
    for (int begin = 0; begin < kPlainKeyTile; begin += kStepKeys) {
      const std::int64_t first_key = tile * kPlainKeyTile + begin;
      const std::int64_t left = item.key_length - first_key;
      if (left <= 0) break;
      const int keys = left < kStepKeys ? static_cast<int>(left) : kStepKeys;
      std::int32_t own = kNoPosition;  // of the lane's key, where keys have positions of their own
      if (p.tables.positions != nullptr) {
        const std::int64_t list =
            (pieces - p.tables.tiles) / p.tables.pieces * p.tables.position_lists + item.position_list;
        own = __ldg(p.tables.positions + list * kPlainKeyTile + begin + lane);
      }
      StepOfRow steps[kRowsOfWarp];
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        steps[r] = {};
        const int slot = warp * kRowsOfWarp + r;
        if (slot >= item.slot_end) continue;
        const std::int64_t position = item.position + slot;
        steps[r].seen = p.tables.positions != nullptr
                            ? columns_within(positions_within(visibility.reach(position)), own)
                            : columns_of(visibility.keys(position), first_key, kStepKeys);
      }
      const auto load_values = [&](int column) {
        const int dim = p.head_dim_v - column < v_columns ? p.head_dim_v - column : v_columns;
        load_step<false>(p, pieces, kv_head, begin, keys, column, dim, v_columns, shared.v);
      };
#pragma unroll 1
      for (int column = 0; column < p.head_dim; column += k_columns) {
        const int dim = p.head_dim - column < k_columns ? p.head_dim - column : k_columns;
        __syncthreads();
        load_step<true>(p, pieces, kv_head, begin, keys, column, dim, k_columns + 1, shared.k);
        if (column == 0) load_values(0);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
          if (!steps[r].sees(lane)) continue;
          steps[r].product = add_products(steps[r].product, shared.q + (warp * kRowsOfWarp + r) * p.head_dim + column,
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
    const int slot = warp * kRowsOfWarp + r;
    if (slot >= item.slot_end) continue;
    if (p.state.save) save_row(p, item.row + slot, head, rows[r]);
    if (p.finish) finish_row(p, rows[r], item.row + slot, head);
  }
}

// Each kernel is made ready for its largest head dims.
template <class C>
void prepare() {
  constexpr auto kBytes = static_cast<int>(C::shared_bytes(C::kMost, C::kMost));
  check_cuda(cudaFuncSetAttribute(plain_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
}
void prepare_plain() {
  prepare<Narrow>();
  prepare<Wide>();
}

template <class C>
void launch(const FoldParams& params, Stream stream) {
  const auto blocks =
      static_cast<unsigned>(params.tables.item_count) * static_cast<unsigned>(params.schedule.piece_heads);
  plain_kernel<C>
      <<<blocks, kWarps * 32, C::shared_bytes(params.head_dim, params.head_dim_v), cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_plain");
}
void launch_plain(const FoldParams& params, Stream stream) {
  const bool narrow = params.head_dim <= Narrow::kMost && params.head_dim_v <= Narrow::kMost;
  narrow ? launch<Narrow>(params, stream) : launch<Wide>(params, stream);
}

}  // namespace

}  // namespace plain

constinit const Launcher plain_fold{plain::prepare_plain, plain::launch_plain};

}  // namespace ringattn::cuda
