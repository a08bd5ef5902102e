// SPDX-License-Identifier: Apache-2.0
// The fold in fp32, by fused multiply-adds. A CTA of four warps folds 16 rows of one head, each warp four of them; keys
// and values of 32 tokens at a time lie in shared memory as fp32. Each 32 keys are one step
//   x  = softcap(S · softmax_scale)         m′ = max(m, max x)      over the keys that the row sees
//   p  = exp(x − m′)                        s  = exp(m − m′)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// and a step in which the row sees no key is left out. Steps begin at multiples of 32 in their sequence, so a row's
// numbers depend on nothing but the row and its keys. Each group of key tiles begins anew, and then joins those before
// it (kernels/merge.hpp).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "base/cuda.hpp"
#include "base/dtype.hpp"
#include "kernels/cuda/device/merge_arithmetic.cuh"
#include "kernels/cuda/device/plain.hpp"
#include "kernels/cuda/device/row_end.cuh"
#include "kernels/cuda/device/tile_lookup.cuh"
#include "kernels/key_positions.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kStepKeys = 32;  // a lane each
constexpr int kWarps = 4;
constexpr int kRowsOfWarp = kPlainItemRows / kWarps;
constexpr int kDimsOfLane = kPlainMaxHeadDim / 32;
constexpr unsigned kAllLanes = 0xffffffffU;

__device__ float element(const void* data, int dtype, std::int64_t index) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      return static_cast<const float*>(data)[index];
    case Dtype::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return __half2float(static_cast<const __half*>(data)[index]);
  }
}
__device__ void store(void* data, int dtype, std::int64_t index, float value) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      static_cast<float*>(data)[index] = value;
      break;
    case Dtype::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

// exp(x) of a difference of scores.
__device__ float weight(float x) { return PlainArithmetic::weight(__fmul_rn(x, kLog2E)); }

__device__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}
__device__ float greatest_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// In shared memory: q [16, head_dim], k [32, head_dim + 1], v [32, head_dim_v]; the extra float keeps a column of k in
// different banks. And of each row the outputs of its closed groups, [16, head_dim_v].
struct Shared {
  float* q;
  float* k;
  float* v;
  float* closed;

  __device__ Shared(float* memory, const FoldParams& p)
      : q(memory),
        k(q + kPlainItemRows * p.head_dim),
        v(k + kStepKeys * (p.head_dim + 1)),
        closed(v + kStepKeys * p.head_dim_v) {}
};
constexpr std::size_t shared_bytes(int head_dim, int head_dim_v) {
  return static_cast<std::size_t>(kPlainItemRows * head_dim + kStepKeys * (head_dim + 1) +
                                  (kStepKeys + kPlainItemRows) * head_dim_v) *
         sizeof(float);
}

// One row on its way: references and sums in every lane, outputs [lane + 32 i] in a lane.
struct Row {
  int parts;  // of the two below, which are there: kHasOpen, kHasClosed
  float m;    // of the open group
  float l;
  float o[kDimsOfLane];
  float closed_m;  // of the groups before it
  float closed_l;
  float* closed_o;  // [head_dim_v] in shared memory, where a lane reads and writes its own only
};

// Calls visit(i, dim) for each output of the lane.
template <class Visit>
__device__ __forceinline__ void for_each_output(const FoldParams& p, Visit visit) {
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) {
    const int dim = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    if (dim < p.head_dim_v) visit(i, dim);
  }
}

// The identity, from which a group begins.
__device__ void begin_group(Row& row) {
  row.m = -INFINITY;
  row.l = 0.0F;
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) row.o[i] = 0.0F;
}

// The open group joins those before it.
__device__ void close_group(const FoldParams& p, Row& row) {
  if ((row.parts & kHasOpen) == 0) return;
  const bool joins = (row.parts & kHasClosed) != 0;
  MergeStep step{};
  if (joins) step = PlainArithmetic::merge(row.closed_m, row.closed_l, row.m, row.l, kLog2E);
  for_each_output(p, [&](int i, int dim) {
    row.closed_o[dim] = joins ? PlainArithmetic::join(row.closed_o[dim], row.o[i], step) : row.o[i];
  });
  row.closed_m = joins ? step.reference : row.m;
  row.closed_l = joins ? step.sum : row.l;
  row.parts = kHasClosed;
  begin_group(row);
}

__device__ void load_row(const FoldParams& p, std::int64_t at, int head, Row& row) {
  const StatePlace place(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  row.parts = static_cast<int>(place.numbers[kStateParts]);
  if ((row.parts & kHasOpen) != 0) {
    row.m = place.numbers[kOpenReference];
    row.l = place.numbers[0];  // the other partial sums are 0
    for_each_output(p, [&](int i, int dim) { row.o[i] = place.open[state_column(dim, p.head_dim_v)]; });
  }
  if ((row.parts & kHasClosed) != 0) {
    row.closed_m = place.numbers[kClosedReference];
    row.closed_l = place.numbers[kClosedSum];
    for_each_output(p, [&](int, int dim) { row.closed_o[dim] = place.closed[state_column(dim, p.head_dim_v)]; });
  }
}

__device__ void save_row(const FoldParams& p, std::int64_t at, int head, const Row& row) {
  const StatePlace place(p.state.memory, p.rows, p.heads, p.head_dim_v, at, head);
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kOpenReference; ++i) place.numbers[i] = i == 0 ? row.l : 0.0F;
    place.numbers[kOpenReference] = row.m;
    place.numbers[kClosedReference] = row.closed_m;
    place.numbers[kClosedSum] = row.closed_l;
    place.numbers[kStateParts] = static_cast<float>(row.parts);
  }
  if ((row.parts & kHasOpen) != 0) {
    for_each_output(p, [&](int i, int dim) { place.open[state_column(dim, p.head_dim_v)] = row.o[i]; });
  }
  if ((row.parts & kHasClosed) != 0) {
    for_each_output(p, [&](int, int dim) { place.closed[state_column(dim, p.head_dim_v)] = row.closed_o[dim]; });
  }
}

__device__ float score(const FoldParams& p, const float* q, const float* k) {
  float s = 0.0F;
  for (int dim = 0; dim < p.head_dim; ++dim) s = __fmaf_rn(q[dim], k[dim], s);
  s = __fmul_rn(s, p.softmax.scale);
  return p.softmax.cap > 0.0F ? __fmul_rn(p.softmax.cap, tanhf(__fdiv_rn(s, p.softmax.cap))) : s;
}

// Folds the keys of one step that the row sees: columns `seen` of the 32, at least one.
__device__ void fold_step(const FoldParams& p, Row& row, const float* q, const Shared& shared,
                          const ColumnRange& seen) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool sees_mine = lane >= seen.begin && lane < seen.end;
  const float x = sees_mine ? score(p, q, shared.k + lane * (p.head_dim + 1)) : -INFINITY;
  const float m = fmaxf(row.m, greatest_of_lanes(x));  // passes NaN over: its weight is NaN
  const float reference = m == -INFINITY ? 0.0F : m;   // every score so far is −∞ and weighs 0
  // The difference first: an unchanged maximum scales by exactly 1.
  const float scale = weight(__fsub_rn(row.m, reference));
  const float mine = weight(__fsub_rn(x, reference));
  row.parts |= kHasOpen;
  row.m = m;
  row.l = __fmaf_rn(row.l, scale, sum_of_lanes(mine));
  float sum[kDimsOfLane] = {};
  for (int key = seen.begin; key < seen.end; ++key) {
    const float weight_of_key = __shfl_sync(kAllLanes, mine, key);
    const float* v = shared.v + key * p.head_dim_v;
#pragma unroll
    for (int i = 0; i < kDimsOfLane; ++i) {
      if (lane + 32 * i < p.head_dim_v) sum[i] = __fmaf_rn(weight_of_key, v[lane + 32 * i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) row.o[i] = __fmaf_rn(row.o[i], scale, __fadd_rn(sum[i], 0.0F));
}

// Merges, divides, rounds and writes.
__device__ void finish_row(const FoldParams& p, Row& row, std::int64_t at, int head) {
  const bool merged = (row.parts & kHasClosed) != 0;
  if (merged) close_group(p, row);  // else the open group is the only one, or the identity
  const float* const sink = p.sinks != nullptr ? p.sinks + head : nullptr;
  const RowEnd end =
      end_row(merged ? row.closed_m : row.m, merged ? row.closed_l : row.l, sink, [](float x) { return weight(x); });
  const std::int64_t out = at * p.out.token_stride + head * p.out.head_stride;
  for_each_output(p, [&](int i, int dim) {
    const float o = merged ? row.closed_o[dim] : row.o[i];
    store(p.out.data, p.dtype, out + dim, __fdiv_rn(__fmul_rn(o, end.weight), end.divisor()));
  });
  if (p.lse.data != nullptr && threadIdx.x % 32 == 0) {
    p.lse.data[at * p.lse.token_stride + head * p.lse.head_stride] = end.lse();
  }
}

// `rows` rows of K or V as fp32 in shared memory; those behind the first `keys` become zeros.
__device__ void load_rows(const void* data, int dtype, std::int64_t offset, std::int64_t stride, int rows, int keys,
                          int dim, int pitch, float* target) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * dim; i += kWarps * 32) {
    const int key = i / dim;
    target[key * pitch + i % dim] = key < keys ? element(data, dtype, offset + key * stride + i % dim) : 0.0F;
  }
}

// Columns [begin, begin + kStepKeys) of a tile in pieces, of which the sequence has the first `keys`.
__device__ void load_step(const FoldParams& p, const TileEntry* pieces, int kv_head, int begin, int keys,
                          const Shared& shared) {
  const int piece_keys = kPlainKeyTile / p.tables.pieces;
  const int rows = piece_keys < kStepKeys ? piece_keys : kStepKeys;
  for (int first = 0; first < kStepKeys; first += rows) {
    const int left = keys - first;
    float* const k = shared.k + first * (p.head_dim + 1);
    float* const v = shared.v + first * p.head_dim_v;
    if (left <= 0) {  // nobody may look where the piece lies
      load_rows(nullptr, p.dtype, 0, 0, rows, 0, p.head_dim, p.head_dim + 1, k);
      load_rows(nullptr, p.dtype, 0, 0, rows, 0, p.head_dim_v, p.head_dim_v, v);
      continue;
    }
    const TileEntry& piece = pieces[(begin + first) / piece_keys];
    const std::int64_t row = piece.row + (begin + first) % piece_keys;
    const SourceEntry& source = source_of(p.tables, piece.source);
    load_rows(source.k, p.dtype, k_offset(source, row, kv_head), source.k_token_stride, rows, left, p.head_dim,
              p.head_dim + 1, k);
    load_rows(source.v, p.dtype, v_offset(source, row, kv_head), source.v_token_stride, rows, left, p.head_dim_v,
              p.head_dim_v, v);
  }
}

// The columns of a step whose keys stand in `span`: one run, as positions ascend. `position`: of the lane's key.
__device__ ColumnRange columns_within(const PositionSpan& span, std::int32_t position) {
  const unsigned seen = __ballot_sync(kAllLanes, span.has(position));
  return seen == 0 ? ColumnRange{} : ColumnRange{__ffs(static_cast<int>(seen)) - 1, 32 - __clz(static_cast<int>(seen))};
}

__global__ void __launch_bounds__(kWarps * 32, 3) plain_kernel(const __grid_constant__ FoldParams p) {
  extern __shared__ float memory[];
  const Shared shared(memory, p);
  const WorkItem item = p.tables.items[static_cast<int>(blockIdx.x) / p.schedule.piece_heads];
  const int head = item.head + static_cast<int>(blockIdx.x) % p.schedule.piece_heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;

  Row rows[kRowsOfWarp];
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
      __syncthreads();
      load_step(p, pieces, kv_head, begin, keys, shared);
      __syncthreads();
      std::int32_t own = kNoPosition;  // of the lane's key, where keys have positions of their own
      if (p.tables.positions != nullptr) {
        const std::int64_t list =
            (pieces - p.tables.tiles) / p.tables.pieces * p.tables.position_lists + item.position_list;
        own = __ldg(p.tables.positions + list * kPlainKeyTile + begin + static_cast<int>(threadIdx.x) % 32);
      }
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const int slot = warp * kRowsOfWarp + r;
        if (slot >= item.slot_end) continue;
        const std::int64_t position = item.position + slot;
        const ColumnRange seen = p.tables.positions != nullptr
                                     ? columns_within(positions_within(visibility.reach(position)), own)
                                     : columns_of(visibility.keys(position), first_key, kStepKeys);
        if (!seen.empty()) fold_step(p, rows[r], shared.q + slot * p.head_dim, shared, seen);
      }
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

// One kernel serves all head dims, so it is made ready for the largest.
void prepare_plain() {
  constexpr auto kMost = static_cast<int>(shared_bytes(kPlainMaxHeadDim, kPlainMaxHeadDim));
  check_cuda(cudaFuncSetAttribute(plain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost),
             "cudaFuncSetAttribute");
}

void launch_plain(const FoldParams& params, Stream stream) {
  const std::size_t shared = shared_bytes(params.head_dim, params.head_dim_v);
  const auto blocks =
      static_cast<unsigned>(params.tables.item_count) * static_cast<unsigned>(params.schedule.piece_heads);
  plain_kernel<<<blocks, kWarps * 32, shared, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_plain");
}

}  // namespace

constinit const Launcher plain_fold{prepare_plain, launch_plain};

}  // namespace ringattn::cuda
