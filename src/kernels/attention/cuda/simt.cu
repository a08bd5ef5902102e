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
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/cuda.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/attention/cuda/simt.hpp"
#include "kernels/attention/cuda/tile_lookup.cuh"
#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/visibility.hpp"
#include "kernels/common/cuda/elements.cuh"

namespace ringattn::cuda {

namespace simt {

// Row arithmetic: the compiled shapes, and a row's online softmax from its state to its results.

inline constexpr int kStepKeys = 32;  // one key per lane
inline constexpr int kWarps = 4;
inline constexpr int kRowsOfWarp = kSimtTileRows / kWarps;
inline constexpr unsigned kAllLanes = 0xffffffffU;

// exp(x) of a difference of scores.
__device__ inline float weight(float x) { return SimtArithmetic::weight(__fmul_rn(x, kLog2E)); }

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// Shape of a kernel for head dims up to kMax_. The wider shape keeps 128 columns of K and V in shared memory at a time,
// so that it runs on every device from sm_80 on.
template <int kMax_>
struct SimtShape {
  static constexpr int kMax = kMax_;
  static constexpr int kDimsOfLane = kMax / 32;
  static constexpr int kColumns = kMax <= 256 ? kMax : 128;  // maximum columns of K and V in shared memory at a time
  static constexpr int kColumnBlocks = kMax / kColumns;
  static constexpr int kCtas = kMax <= 256 ? 3 : 2;  // resident CTAs per multiprocessor

  __host__ __device__ static constexpr int columns(int dim) { return dim < kColumns ? dim : kColumns; }
  // Bytes of the buffers of Shared.
  static constexpr std::size_t shared_bytes(int head_dim, int head_dim_v) {
    return static_cast<std::size_t>(kSimtTileRows * (head_dim + head_dim_v) +
                                    kStepKeys * (columns(head_dim) + 1 + columns(head_dim_v))) *
           sizeof(float);
  }
};
using NarrowShape = SimtShape<256>;
using WideShape = SimtShape<kSimtMaxHeadDim>;
static_assert(WideShape::shared_bytes(WideShape::kMax, WideShape::kMax) + 256 <= 99 * 1024);

// Buffers in shared memory: q [16, head_dim], k [32, columns + 1], v [32, columns], and the merged outputs of the rows
// [16, head_dim_v]. The extra float keeps a column of k in different banks.
template <class C>
struct Shared {
  float* q;
  float* k;
  float* v;
  float* merged;

  __device__ Shared(float* memory, const AttentionParams& p)
      : q(memory),
        k(q + kSimtTileRows * p.head_dim),
        v(k + kStepKeys * (C::columns(p.head_dim) + 1)),
        merged(v + kStepKeys * C::columns(p.head_dim_v)) {}
};

// A row's state in registers: offsets and sums are in every lane, lane `lane` has outputs [lane + 32 i].
template <class C>
struct SimtRow {
  int flags;  // flags of the partials that are present: kHasCurrent, kHasMerged
  float m;    // of the current KV split: offset (the exact row maximum), sum and outputs
  float l;
  float o[C::kDimsOfLane];
  float merged_m;  // of the merged splits
  float merged_l;
  float* merged_o;  // [head_dim_v] in shared memory; a lane accesses only its own columns
};

// Calls visit(i, dim) for each output of the lane.
template <class C, class Visit>
__device__ __forceinline__ void for_each_output(const AttentionParams& p, Visit visit) {
#pragma unroll
  for (int i = 0; i < C::kDimsOfLane; ++i) {
    const int dim = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    if (dim < p.head_dim_v) visit(i, dim);
  }
}

// Resets the current KV split to the empty partial.
template <class C>
__device__ void begin_split(SimtRow<C>& row) {
  row.m = -INFINITY;
  row.l = 0.0F;
#pragma unroll
  for (int i = 0; i < C::kDimsOfLane; ++i) row.o[i] = 0.0F;
}

// Merges the current KV split into the splits before it.
template <class C>
__device__ void merge_current_split(const AttentionParams& p, SimtRow<C>& row) {
  if ((row.flags & kHasCurrent) == 0) return;
  const bool merges = (row.flags & kHasMerged) != 0;
  MergeStep step{};
  if (merges) step = SimtArithmetic::merge(row.merged_m, row.merged_l, row.m, row.l, kLog2E);
  for_each_output<C>(p, [&](int i, int dim) {
    row.merged_o[dim] = merges ? SimtArithmetic::join(row.merged_o[dim], row.o[i], step) : row.o[i];
  });
  row.merged_m = merges ? step.softmax_offset : row.m;
  row.merged_l = merges ? step.sum : row.l;
  row.flags = kHasMerged;
  begin_split(row);
}

template <class C>
__device__ void load_row(const AttentionParams& p, std::int64_t at, int head, SimtRow<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  row.flags = static_cast<int>(state_ptrs.stats[kStateFlags]);
  if ((row.flags & kHasCurrent) != 0) {
    row.m = state_ptrs.stats[kCurrentOffset];
    row.l = state_ptrs.stats[0];  // the other partial sums are 0
    for_each_output<C>(p, [&](int i, int dim) { row.o[i] = state_ptrs.current[state_column(dim, p.head_dim_v)]; });
  }
  if ((row.flags & kHasMerged) != 0) {
    row.merged_m = state_ptrs.stats[kMergedOffset];
    row.merged_l = state_ptrs.stats[kMergedSum];
    for_each_output<C>(p,
                       [&](int, int dim) { row.merged_o[dim] = state_ptrs.merged[state_column(dim, p.head_dim_v)]; });
  }
}

template <class C>
__device__ void save_row(const AttentionParams& p, std::int64_t at, int head, const SimtRow<C>& row) {
  const StatePtrs state_ptrs(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kCurrentOffset; ++i) state_ptrs.stats[i] = i == 0 ? row.l : 0.0F;
    state_ptrs.stats[kCurrentOffset] = row.m;
    state_ptrs.stats[kMergedOffset] = row.merged_m;
    state_ptrs.stats[kMergedSum] = row.merged_l;
    state_ptrs.stats[kStateFlags] = static_cast<float>(row.flags);
  }
  if ((row.flags & kHasCurrent) != 0) {
    for_each_output<C>(p, [&](int i, int dim) { state_ptrs.current[state_column(dim, p.head_dim_v)] = row.o[i]; });
  }
  if ((row.flags & kHasMerged) != 0) {
    for_each_output<C>(p,
                       [&](int, int dim) { state_ptrs.merged[state_column(dim, p.head_dim_v)] = row.merged_o[dim]; });
  }
}

// A row's softmax of one step of 32 keys.
struct RowStep {
  ColumnRange seen;  // columns of the 32 keys that the row sees; if empty, the step is skipped
  float product;     // q · k of the row and the lane's key
  float weight;      // of the lane's key
  float scale;       // factor of the row's sums so far

  __device__ bool sees(int lane) const { return lane >= seen.begin && lane < seen.end; }
};

// Adds the products of `dims` columns.
__device__ inline float add_qk(float sum, const float* q, const float* k, int dims) {
  for (int dim = 0; dim < dims; ++dim) sum = __fmaf_rn(q[dim], k[dim], sum);
  return sum;
}

__device__ inline float score(const AttentionParams& p, float product) {
  const float s = __fmul_rn(product, p.softmax.scale);
  return p.softmax.cap > 0.0F ? __fmul_rn(p.softmax.cap, tanhf(__fdiv_rn(s, p.softmax.cap))) : s;
}

// Turns scores into weights, and updates the row's offset and sum.
template <class C>
__device__ void weigh_keys(const AttentionParams& p, SimtRow<C>& row, RowStep& step) {
  const float x = step.sees(static_cast<int>(threadIdx.x) % 32) ? score(p, step.product) : -INFINITY;
  const float m = fmaxf(row.m, warp_max(x));               // passes NaN over, but its weight is NaN
  const float softmax_offset = m == -INFINITY ? 0.0F : m;  // if −∞, every score so far is −∞ and weighs 0
  // The difference is taken first, so that an unchanged maximum scales by exactly 1.
  step.scale = weight(__fsub_rn(row.m, softmax_offset));
  step.weight = weight(__fsub_rn(x, softmax_offset));
  row.flags |= kHasCurrent;
  row.m = m;
  row.l = __fmaf_rn(row.l, step.scale, warp_sum(step.weight));
}

// Adds the products with V's columns [kFirst, kFirst + C::kColumns). `v` has rows of `pitch` floats per key.
template <class C, int kFirst>
__device__ void add_values(const AttentionParams& p, SimtRow<C>& row, const RowStep& step, const float* v, int pitch) {
  constexpr int kDims = C::kColumns / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum[kDims] = {};
  for (int key = step.seen.begin; key < step.seen.end; ++key) {
    const float weight_of_key = __shfl_sync(kAllLanes, step.weight, key);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (kFirst + lane + 32 * i < p.head_dim_v) {
        sum[i] = __fmaf_rn(weight_of_key, v[key * pitch + lane + 32 * i], sum[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    float& o = row.o[kFirst / 32 + i];
    o = __fmaf_rn(o, step.scale, __fadd_rn(sum[i], 0.0F));
  }
}

// Merges, normalizes, rounds and writes a row.
template <class C>
__device__ void finish_row(const AttentionParams& p, SimtRow<C>& row, std::int64_t at, int head) {
  const bool merged = (row.flags & kHasMerged) != 0;
  if (merged) merge_current_split(p, row);  // else the current split is the only one, or the row is empty
  const float* const sink = p.sinks != nullptr ? p.sinks + head : nullptr;
  const RowEnd end =
      end_row(merged ? row.merged_m : row.m, merged ? row.merged_l : row.l, sink, [](float x) { return weight(x); });
  const std::int64_t out = at * p.out.token_stride + head * p.out.head_stride;
  for_each_output<C>(p, [&](int i, int dim) {
    const float o = merged ? row.merged_o[dim] : row.o[i];
    store_to(p.out.data, p.dtype, out + dim, __fdiv_rn(__fmul_rn(o, end.weight), end.divisor()));
  });
  if (p.lse.data != nullptr && threadIdx.x % 32 == 0) {
    p.lse.data[at * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
  }
}

namespace {

// Loads `rows` rows of K or V as fp32 into shared memory. Rows after the first `keys` become zeros.
__device__ void load_rows(const void* data, int dtype, std::int64_t offset, std::int64_t stride, int rows, int keys,
                          int dim, int pitch, float* target) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * dim; i += kWarps * 32) {
    const int key = i / dim;
    target[key * pitch + i % dim] = key < keys ? load_from(data, dtype, offset + key * stride + i % dim) : 0.0F;
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
      shared.q[i] = load_from(p.q.data, p.dtype, row * p.q.token_stride + head * p.q.head_stride + i % p.head_dim);
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
void launch_rows(const AttentionParams& params, Stream stream) {
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  simt_kernel<C>
      <<<blocks, kWarps * 32, C::shared_bytes(params.head_dim, params.head_dim_v), cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_simt");
}
void launch_simt(const AttentionParams& params, Stream stream) {
  const bool narrow = params.head_dim <= NarrowShape::kMax && params.head_dim_v <= NarrowShape::kMax;
  narrow ? launch_rows<NarrowShape>(params, stream) : launch_rows<WideShape>(params, stream);
}

}  // namespace

}  // namespace simt

constinit const Launcher simt_attention{simt::prepare_simt, simt::launch_simt};

}  // namespace ringattn::cuda
