// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/cuda/cuda_attention_backward.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention_backward/cuda/row_stats.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::uintptr_t kAlignment = 16;  // bytes
constexpr int kStateSums = 2;              // closed and open
// The most memory for partial sums. Enough for 16 heads of 128 with 2 KV heads at 8k tokens.
constexpr std::int64_t kPartialBytes = std::int64_t{256} << 20;

std::size_t floats_to_bytes(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }

std::size_t ds_bytes(const ChunkLimits& limits) { return static_cast<std::size_t>(limits.ds_tiles) * kDsTileBytes; }
std::size_t sum_bytes(const ChunkLimits& limits) {
  return floats_to_bytes(limits.dq_sum_floats + limits.dkv_sum_floats);
}

StridedRows<const void> rows_of(const TensorView& view) { return {view.data, view.token_stride, view.head_stride}; }

std::int32_t side_of(std::int64_t side) {
  return side < 0 || side >= kUnlimitedSide ? kUnlimitedSide : static_cast<std::int32_t>(side);
}

}  // namespace

BackwardGradient gradient_of(const MutableTensorView* view) {
  if (view == nullptr) return {};
  const std::uintptr_t pair_bytes = 2 * size_of(view->dtype);
  const bool in_pairs = reinterpret_cast<std::uintptr_t>(view->data) % pair_bytes == 0 && view->token_stride % 2 == 0 &&
                        view->head_stride % 2 == 0;
  return {{view->data, view->token_stride, view->head_stride}, view->dtype == Dtype::kF32, in_pairs};
}

CudaAttentionBackward::CudaAttentionBackward(const AttentionBackwardSpec& spec, const BackwardKernelShape& shape,
                                             const CudaBackend& backend)
    : spec_(spec),
      shape_(shape),
      device_(backend.device()),
      multiprocessors_(multiprocessors_of(backend.device())),
      chunker_(spec.forward, shape.key_tile) {}

std::size_t CudaAttentionBackward::dq_state_bytes(std::int64_t rows) const {
  return floats_to_bytes(rows * forward().heads * kStateSums * dq_width());
}

std::size_t CudaAttentionBackward::dkv_state_bytes(std::int64_t rows) const {
  return floats_to_bytes(rows * forward().kv_heads * kStateSums * dkv_width());
}

std::size_t CudaAttentionBackward::scratch_bytes(const BackwardLimits& limits) const {
  const ChunkLimits chunks = limits_of_chunks(limits);
  return kStagingSlots * table_bytes(limits) + scratch_sum_bytes(limits) + tile_stats_bytes(limits) + ds_bytes(chunks) +
         sum_bytes(chunks);
}

void CudaAttentionBackward::reserve(const BackwardLimits& limits) {
  const DeviceGuard guard(device_);
  limits_ = limits;
  ring_.reserve(table_bytes(limits), device_);
  builder_.reserve(limits, group(), std::max(dq_partials(limits), dkv_partials(limits)));
  if (scratch_sum_bytes(limits) > scratch_.bytes()) scratch_ = allocate_device(scratch_sum_bytes(limits), device_);
  if (tile_stats_bytes(limits) > tile_stats_.bytes()) {
    tile_stats_ = allocate_device(tile_stats_bytes(limits), device_);
  }
  chunk_limits_ = limits_of_chunks(limits);
  if (chunk_limits_.ds_tiles > 0) chunker_.reserve(limits);
  if (ds_bytes(chunk_limits_) > ds_.bytes()) ds_ = allocate_device(ds_bytes(chunk_limits_), device_);
  if (sum_bytes(chunk_limits_) > chunk_sums_.bytes()) chunk_sums_ = allocate_device(sum_bytes(chunk_limits_), device_);
  prepare();
  prepare_row_stats();
  prepare_merge_partials();
}

void CudaAttentionBackward::row_stats(const RowStatsTask& task, Stream stream, const Progress& progress) {
  if (progress) progress();
  const DeviceGuard guard(device_);
  compute_row_stats(task, stream);
}

void CudaAttentionBackward::sum_rows(const RowSumsTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  add_rows(task, forward().heads, stream);
}

void CudaAttentionBackward::add_dq(const DqTask& task, Stream stream, const Progress& progress) {
  check_backward_task(spec_, shape_.key_tile, task);
  if (progress) progress();
  if (task.q.tokens == 0 || (task.dq == nullptr && !task.save)) return;
  const DeviceGuard guard(device_);
  enqueue_dq(task, forward(), {}, stream, progress);
}

void CudaAttentionBackward::add_dkv(const DkvTask& task, Stream stream, const Progress& progress) {
  check_backward_task(spec_, task);
  if (progress) progress();
  if (task.k.tokens == 0 || (task.dk == nullptr && !task.save)) return;
  const DeviceGuard guard(device_);
  enqueue_dkv(task, forward(), 0, nullptr, stream, progress);
}

void CudaAttentionBackward::add_dq_and_dkv(const DqTask& dq, const DkvTask& dkv, Stream stream,
                                           const Progress& progress) {
  check_backward_task(spec_, shape_.key_tile, dq);
  check_backward_task(spec_, dkv);
  if (progress) progress();
  const DeviceGuard guard(device_);
  auto* const sums = reinterpret_cast<float*>(chunk_sums_.data());
  const auto run = [&](const BackwardChunk& chunk) {
    AttentionSpec spec = forward();
    spec.kv_heads = chunk.kv_heads;
    spec.heads = chunk.kv_heads * group();
    auto* const ds = reinterpret_cast<char*>(ds_.data());
    const DsSpill spill = enqueue_dkv(chunk.dkv, spec, chunk.first_kv_head * group(), ds, stream, progress);
    enqueue_dq(chunk.dq, spec, spill, stream, progress);
  };
  const bool is_cut =
      can_map_all(dq, dkv) && chunker_.cut(dq, dkv, chunk_limits_, sums, sums + chunk_limits_.dq_sum_floats, run);
  if (!is_cut) AttentionBackwardKernel::add_dq_and_dkv(dq, dkv, stream, progress);
}

void CudaAttentionBackward::enqueue_dq(const DqTask& task, const AttentionSpec& spec, const DsSpill& spill,
                                       Stream stream, const Progress& progress) {
  BackwardCommon common = begin_sources(task.q, task.dout, task.sources.size());
  for (const BackwardKeySource& source : task.sources) add_source(source.k, source.v, nullptr, common);
  common.spill = spill;
  const BackwardSideShape& side = spill.tiles == nullptr ? shape_.dq : shape_.dq_from_ds;
  const BackwardShape shape{BackwardSide::kQueries,
                            shape_.key_tile,
                            kBackwardKvSplit,
                            group(),
                            side.head_tiles,
                            multiprocessors_ * side.ctas,
                            spill.tiles != nullptr ? 0 : dq_partials(limits_),
                            side.swizzle_bytes,
                            (spec.head_dim + spec.head_dim_v) * element_bytes(),
                            spill.tiles != nullptr};
  const auto width = static_cast<std::int32_t>(dq_width());
  const MergedSum sums[] = {{gradient_of(task.dq), width, 0, width, softmax_of(spec).scale}};
  enqueue(task, spec, shape, task.dq != nullptr, sums, common, stream, progress,
          [&](int ctas) { launch_dq(task, common, ctas, stream); });
}

DsSpill CudaAttentionBackward::enqueue_dkv(const DkvTask& task, const AttentionSpec& spec, int first_head, char* ds,
                                           Stream stream, const Progress& progress) {
  BackwardCommon common = begin_sources(task.k, task.v, task.sources.size());
  for (const BackwardQuerySource& source : task.sources) {
    add_source(source.q, source.dout, source.stats + first_head * kRowStats, common);
  }
  common.spill.tiles = ds;
  const BackwardShape shape{BackwardSide::kKeys,
                            kBackwardTile,
                            backward_query_split(spec),
                            1,
                            shape_.dkv.head_tiles,
                            multiprocessors_ * shape_.dkv.ctas,
                            ds != nullptr ? 0 : dkv_partials(limits_),
                            ds != nullptr ? kWithoutSwizzle : shape_.dkv.swizzle_bytes,
                            (spec.head_dim + spec.head_dim_v) * element_bytes() * group(),
                            ds != nullptr};
  const auto width = static_cast<std::int32_t>(dkv_width());
  const MergedSum sums[] = {{gradient_of(task.dk), width, 0, spec.head_dim, softmax_of(spec).scale},
                            {gradient_of(task.dv), width, spec.head_dim, spec.head_dim_v, 1.0F}};
  enqueue(task, spec, shape, task.dk != nullptr, sums, common, stream, progress, [&](int ctas) {
    float* stats = nullptr;
    if (shape_.gathers_stats) {
      stats = reinterpret_cast<float*>(tile_stats_.data());
      gather_row_stats(common.tables.tiles, static_cast<std::int64_t>(task.tiles.size()), forward().heads, spec.heads,
                       stats, stream);
    }
    launch_dkv(task, common, stats, ctas, stream);
  });
  return common.spill;
}

std::size_t CudaAttentionBackward::own_bytes() const {
  const auto floats = [this](const BackwardSideShape& side, std::int64_t width) {
    return std::int64_t{multiprocessors_} * side.ctas * side.head_tiles * kBackwardTile * width;
  };
  return floats_to_bytes(std::max(
      {floats(shape_.dq, dq_width()), floats(shape_.dkv, dkv_width()), floats(shape_.dq_from_ds, dq_width())}));
}

ChunkLimits CudaAttentionBackward::limits_of_chunks(const BackwardLimits& limits) const {
  const bool can_spill = shape_.dq_from_ds.head_tiles > 0 && !softmax_of(forward()).scaled_first;
  return can_spill ? chunk_limits(forward(), limits, multiprocessors_) : ChunkLimits{};
}

// Whether TMA can load all tensors of the tasks.
bool CudaAttentionBackward::can_map_all(const DqTask& dq, const DkvTask& dkv) const {
  const auto can_map = [this](const TensorView& view) { return view.tokens == 0 || can_use_tma(view); };
  return dq.sources.size() <= kInlineSources && dkv.sources.size() <= kInlineSources && can_map(dq.q) &&
         can_map(dq.dout) && can_map(dkv.k) && can_map(dkv.v) &&
         std::ranges::all_of(dq.sources, [&](const auto& source) { return can_map(source.k) && can_map(source.v); }) &&
         std::ranges::all_of(dkv.sources,
                             [&](const auto& source) { return can_map(source.q) && can_map(source.dout); });
}

std::int64_t CudaAttentionBackward::partials_of(const BackwardLimits& limits, const BackwardSideShape& side,
                                                std::int64_t width, int group, std::int64_t tiles_per_split) const {
  // BackwardTableBuilder::share_splits() does not split tasks with many pairs.
  const std::int64_t full_tiles = limits.rows / kBackwardTile * group;
  const std::int64_t ctas = std::int64_t{multiprocessors_} * side.ctas;
  if (!shape_.shares_splits || full_tiles * forward().kv_heads >= 2 * ctas * side.head_tiles) return 0;
  const std::int64_t head_tiles = static_cast<std::int64_t>(row_tile_limit(limits)) * group;
  const std::int64_t splits = limits.tiles / tiles_per_split + 2;
  const std::int64_t bytes =
      static_cast<std::int64_t>(floats_to_bytes(forward().kv_heads * side.head_tiles * kBackwardTile * width));
  return std::min(head_tiles * splits, kPartialBytes / bytes);
}

std::int64_t CudaAttentionBackward::dq_partials(const BackwardLimits& limits) const {
  return partials_of(limits, shape_.dq, dq_width(), group(), kBackwardKvSplit / shape_.key_tile);
}

std::int64_t CudaAttentionBackward::dkv_partials(const BackwardLimits& limits) const {
  return partials_of(limits, shape_.dkv, dkv_width(), 1, backward_query_split(forward()) / kBackwardTile);
}

std::size_t CudaAttentionBackward::table_bytes(const BackwardLimits& limits) const {
  return backward_table_bytes(limits, group(), std::max(dq_partials(limits), dkv_partials(limits)));
}

std::size_t CudaAttentionBackward::scratch_sum_bytes(const BackwardLimits& limits) const {
  const auto bytes = [this](std::int64_t partials, const BackwardSideShape& side, std::int64_t width) {
    return floats_to_bytes(partials * forward().kv_heads * side.head_tiles * kBackwardTile * width);
  };
  return own_bytes() + std::max(bytes(dq_partials(limits), shape_.dq, dq_width()),
                                bytes(dkv_partials(limits), shape_.dkv, dkv_width()));
}

std::size_t CudaAttentionBackward::tile_stats_bytes(const BackwardLimits& limits) const {
  return shape_.gathers_stats ? floats_to_bytes(limits.tiles * forward().heads * kRowStats * kBackwardTile) : 0;
}

// The rows' own tensors, of a task with `count` sources.
BackwardCommon CudaAttentionBackward::begin_sources(const TensorView& first, const TensorView& second,
                                                    std::size_t count) {
  sources_.clear();
  stats_.clear();
  BackwardCommon common{};
  common.own[0] = rows_of(first);
  common.own[1] = rows_of(second);
  common.bulk = count <= kInlineSources && can_use_tma(first) && can_use_tma(second);
  return common;
}

void CudaAttentionBackward::add_source(const TensorView& first, const TensorView& second, const float* stats,
                                       BackwardCommon& common) {
  sources_.push_back({{rows_of(first), rows_of(second)}});
  if (stats != nullptr) stats_.push_back(stats);
  if (first.tokens > 0) common.bulk = common.bulk && can_use_tma(first) && can_use_tma(second);
}

template <class Launch>
void CudaAttentionBackward::enqueue(const BackwardTask& task, const AttentionSpec& spec, const BackwardShape& shape,
                                    bool finish, std::span<const MergedSum> sums, BackwardCommon& common, Stream stream,
                                    const Progress& progress, const Launch& launch) {
  if (reinterpret_cast<std::uintptr_t>(task.state) % kAlignment != 0) {
    fail(ErrorCode::kInternal, "a backward task's state is not aligned",
         fmt::format("its address must be a multiple of {} bytes", kAlignment));
  }
  const std::span<std::byte> memory = ring_.next(progress);
  const BackwardTableLayout layout = builder_.build(spec, task, shape, finish, {sources_, stats_, common.bulk}, memory);
  if (std::int64_t{layout.ds_tiles} * spec.kv_heads > chunk_limits_.ds_tiles) {
    fail(ErrorCode::kInternal, fmt::format("dS of a chunk needs {} tiles a KV head", layout.ds_tiles),
         fmt::format("{} are reserved for {} heads", chunk_limits_.ds_tiles, spec.kv_heads));
  }
  if (shape.rows == BackwardSide::kKeys) common.spill.tiles_of_head = layout.ds_tiles;
  if (layout.pair_count == 0) return;
  const cudaStream_t queue = cuda_stream(stream);
  std::byte* tables = ring_.upload(layout.bytes, queue);
  const Mask& mask = forward().mask;
  const bool of_queries = shape.rows == BackwardSide::kQueries;
  BackwardTables& t = common.tables;
  t.pairs = reinterpret_cast<const RowTilePair*>(tables + layout.pairs);
  t.row_tiles = reinterpret_cast<const RowTile*>(tables + layout.row_tiles);
  t.runs = reinterpret_cast<const TileRun*>(tables + layout.runs);
  t.tiles = reinterpret_cast<const OtherTile*>(tables + layout.tiles);
  t.ds = reinterpret_cast<const DsOfKeys*>(tables + layout.ds);
  if (!common.bulk) t.tile_rows = reinterpret_cast<const TileRows*>(tables + layout.tile_rows);
  t.taken = reinterpret_cast<std::int32_t*>(tables + layout.taken);
  t.merged = reinterpret_cast<const MergedHeadTile*>(tables + layout.merged);
  t.pair_count = layout.pair_count;
  t.merged_count = layout.merged_count;
  t.kv_heads = spec.kv_heads;
  t.group = shape.group;
  t.swizzle_heads = layout.swizzle_heads;
  t.tiles_per_split = static_cast<std::int32_t>(shape.split / shape.other_tile);
  t.left = side_of(of_queries ? mask.left : mask.right);
  t.right = side_of(of_queries ? mask.right : mask.left);
  common.sums = {task.resume || task.save ? static_cast<float*>(task.state) : nullptr, shape.spills ? 1 : kStateSums,
                 reinterpret_cast<float*>(scratch_.data()), task.save, finish};
  common.softmax = softmax_of(forward());
  common.inverse_cap = forward().softcap > 0.0F ? 1.0F / forward().softcap : 0.0F;
  common.heads = spec.heads;
  const auto ctas =
      static_cast<int>(std::min<std::int64_t>(shape.ctas, std::int64_t{layout.pair_count} * spec.kv_heads));
  launch(ctas);
  if (layout.merged_count > 0) {
    for (const MergedSum& sum : sums) {
      merge_partials(common, sum, forward().dtype, ctas, shape.head_tiles, stream);
    }
  }
  ring_.release(queue);
}

}  // namespace ringattn::cuda
