// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/attention_backward/cuda/row_stats.hpp"
#include "kernels/common/cuda/elements.cuh"
#include "kernels/common/cuda/load_kernel.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kRowLanes = 16;  // threads of a row and head
constexpr int kStatsThreads = 256;
constexpr int kRowsOfCta = kStatsThreads / kRowLanes;
constexpr int kAlignedBytes = 16;
constexpr std::int64_t kMaxStatsCtas = std::int64_t{1} << 30;

struct RowStatsParams {
  StridedRows<const void> out, dout;
  StridedRows<const float> lse, dlse;
  const float* sinks;
  float* stats;
  float* sink_terms;
  std::int64_t count;  // rows · heads
  std::int32_t heads, head_dim_v;
  bool aligned;  // rows of out and dout, to kAlignedBytes
};

template <class Element>
__global__ void __launch_bounds__(kStatsThreads) row_stats_kernel(const RowStatsParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  for (std::int64_t n = blockIdx.x * std::int64_t{kRowsOfCta} + threadIdx.x / kRowLanes; n < p.count;
       n += std::int64_t{gridDim.x} * kRowsOfCta) {
    const std::int64_t row = n / p.heads;
    const std::int64_t head = n % p.heads;
    const auto* out = static_cast<const char*>(p.out.data) +
                      (row * p.out.token_stride + head * p.out.head_stride) * std::int64_t{sizeof(Element)};
    const auto* dout = static_cast<const char*>(p.dout.data) +
                       (row * p.dout.token_stride + head * p.dout.head_stride) * std::int64_t{sizeof(Element)};
    constexpr int kPieceBytes = kPieceElements * static_cast<int>(sizeof(Element));
    float sum = 0.0F;
    for (int piece = lane; piece < p.head_dim_v / kPieceElements; piece += kRowLanes) {
      float a[kPieceElements], b[kPieceElements];
      load_piece<Element>(out + piece * kPieceBytes, p.aligned, a);
      load_piece<Element>(dout + piece * kPieceBytes, p.aligned, b);
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) sum = __fmaf_rn(a[i], b[i], sum);
    }
    // the lanes of a row leave the loop together, but lanes of other rows may leave earlier or later
    const unsigned lanes = 0xFFFFU << (threadIdx.x % 32 / kRowLanes * kRowLanes);
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(lanes, sum, step));
    if (lane != 0) continue;
    const float lse = p.lse.data[row * p.lse.token_stride + head * p.lse.head_stride];
    const float dlse =
        p.dlse.data == nullptr ? 0.0F : p.dlse.data[row * p.dlse.token_stride + head * p.dlse.head_stride];
    const float delta = __fsub_rn(sum, dlse);
    const bool sees_any = lse != -INFINITY;
    p.stats[n * kRowStats] = sees_any ? __fmul_rn(lse, kLog2E) : 0.0F;
    p.stats[n * kRowStats + 1] = delta;
    if (p.sink_terms != nullptr) p.sink_terms[n] = sees_any ? -expf(p.sinks[head] - lse) * delta : 0.0F;
  }
}

__global__ void __launch_bounds__(kStatsThreads)
    gather_stats_kernel(const OtherTile* tiles, std::int64_t count, int row_heads, int heads, float* stats) {
  for (std::int64_t n = blockIdx.x * std::int64_t{kStatsThreads} + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * kStatsThreads) {
    const auto row = static_cast<int>(n % kBackwardTile);
    const std::int64_t head_tile = n / kBackwardTile;
    const OtherTile& tile = tiles[head_tile / heads];
    float2 pair{0.0F, 0.0F};
    if (row >= tile.begin && row < tile.end) {
      pair = reinterpret_cast<const float2*>(tile.stats)[(tile.row + row) * row_heads + head_tile % heads];
    }
    float* const to = stats + head_tile * kRowStats * kBackwardTile + row;
    to[0] = pair.x;
    to[kBackwardTile] = pair.y;
  }
}

// A thread adds the rows of a sum, for one head. Loads don't wait for the additions before them.
__global__ void __launch_bounds__(kStatsThreads) row_sums_kernel(const RowSumsTask task, int heads) {
  for (std::int64_t n = blockIdx.x * std::int64_t{kStatsThreads} + threadIdx.x; n < task.count * heads;
       n += std::int64_t{gridDim.x} * kStatsThreads) {
    const std::int64_t head = n % heads;
    const auto term = [&](std::int64_t at) {
      return task.rows[(task.order == nullptr ? at : task.order[at]) * heads + head];
    };
    std::int64_t at = task.begins[n / heads];
    const std::int64_t end = task.begins[n / heads + 1];
    float sum = at < end ? term(at++) : 0.0F;
#pragma unroll 8
    for (; at < end; ++at) sum = __fadd_rn(sum, term(at));
    task.sums[n] = sum;
  }
}

unsigned ctas_of(std::int64_t count, std::int64_t of_cta) {
  return static_cast<unsigned>(std::min((count + of_cta - 1) / of_cta, kMaxStatsCtas));
}

bool are_rows_aligned(const TensorView& view) {
  const auto is_multiple = [](std::int64_t bytes) { return bytes % kAlignedBytes == 0; };
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  return is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data))) &&
         is_multiple(view.token_stride * element) && is_multiple(view.head_stride * element);
}

}  // namespace

void prepare_row_stats() {
  load_kernel(&row_stats_kernel<__nv_bfloat16>);
  load_kernel(&row_stats_kernel<__half>);
  load_kernel(&row_stats_kernel<float>);
  load_kernel(&gather_stats_kernel);
  load_kernel(&row_sums_kernel);
}

void gather_row_stats(const OtherTile* tiles, std::int64_t tile_count, int row_heads, int heads, float* stats,
                      Stream stream) {
  const std::int64_t count = tile_count * heads * kBackwardTile;
  if (count == 0) return;
  gather_stats_kernel<<<ctas_of(count, kStatsThreads), kStatsThreads, 0, cuda_stream(stream)>>>(tiles, count, row_heads,
                                                                                                heads, stats);
  check_cuda(cudaGetLastError(), "row stats of tiles");
}

void add_rows(const RowSumsTask& task, int heads, Stream stream) {
  const std::int64_t count = task.count * heads;
  if (count == 0) return;
  row_sums_kernel<<<ctas_of(count, kStatsThreads), kStatsThreads, 0, cuda_stream(stream)>>>(task, heads);
  check_cuda(cudaGetLastError(), "sums of rows");
}

void compute_row_stats(const RowStatsTask& task, Stream stream) {
  const std::int64_t count = task.out.tokens * task.out.heads;
  if (count == 0) return;
  const auto rows_of = [](const TensorView& view) {
    return StridedRows<const void>{view.data, view.token_stride, view.head_stride};
  };
  const auto floats_of = [](const RowView& view) {
    return StridedRows<const float>{view.data, view.token_stride, view.head_stride};
  };
  const RowStatsParams params{rows_of(task.out),
                              rows_of(task.dout),
                              floats_of(task.lse),
                              floats_of(task.dlse),
                              task.sinks,
                              task.stats,
                              task.sink_terms,
                              count,
                              static_cast<std::int32_t>(task.out.heads),
                              static_cast<std::int32_t>(task.out.dim),
                              are_rows_aligned(task.out) && are_rows_aligned(task.dout)};
  const auto kernel = task.out.dtype == Dtype::kBf16  ? &row_stats_kernel<__nv_bfloat16>
                      : task.out.dtype == Dtype::kF16 ? &row_stats_kernel<__half>
                                                      : &row_stats_kernel<float>;
  kernel<<<ctas_of(count, kRowsOfCta), kStatsThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "row stats");
}

}  // namespace ringattn::cuda
