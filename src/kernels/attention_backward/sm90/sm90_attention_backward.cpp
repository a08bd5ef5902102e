// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/sm90/sm90_attention_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/attention_backward/cuda/backward_tables.hpp"
#include "kernels/attention_backward/cuda/row_stats.hpp"
#include "kernels/attention_backward/sm90/backward_params.hpp"
#include "kernels/attention_backward/sm90/config.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/staging_ring.hpp"

namespace ringattn::sm90 {

namespace {

using cuda::BackwardGradient;
using cuda::BackwardShape;
using cuda::BackwardSide;

constexpr std::uintptr_t kAlignment = 16;  // bytes
constexpr std::int64_t kElementBytes = 2;
constexpr int kStateSums = 2;  // closed and open
// The other side's tensors of an L2 swizzle group, by speed on an H200. dK and dV are as fast with all heads.
constexpr std::int64_t kDqSwizzleBytes = std::int64_t{64} << 20;
constexpr std::int64_t kDkvSwizzleBytes = std::int64_t{1} << 40;

struct CompiledBackward {
  Dtype dtype;
  int head_dim;
  const BackwardLauncher* launcher;
};
constexpr CompiledBackward kCompiled[] = {
    {Dtype::kBf16, 64, &attention_backward_bf16_64},   {Dtype::kBf16, 96, &attention_backward_bf16_96},
    {Dtype::kBf16, 128, &attention_backward_bf16_128}, {Dtype::kF16, 64, &attention_backward_fp16_64},
    {Dtype::kF16, 96, &attention_backward_fp16_96},    {Dtype::kF16, 128, &attention_backward_fp16_128},
};

const BackwardLauncher& launcher_of(const AttentionBackwardSpec& spec, bool configured) {
  for (const CompiledBackward& entry : kCompiled) {
    if (configured && entry.dtype == spec.forward.dtype && entry.head_dim == spec.forward.head_dim) {
      return *entry.launcher;
    }
  }
  fail(ErrorCode::kInternal, "sm90_attention_backward was made for " + describe(spec), "it can't do that");
}

MappedTensor mapped(const TensorView& view) {
  return {view.data, view.tokens, view.heads, view.dim, view.token_stride, view.head_stride};
}

CUtensorMap map_of(const TensorView& view, int box_rows) {
  return map_tensor(mapped(view), view.dtype, box_rows, BackwardConfig::box_columns(static_cast<int>(view.dim)));
}

cuda::StridedRows<const void> rows_of(const TensorView& view) {
  return {view.data, view.token_stride, view.head_stride};
}

BackwardGradient gradient_of(const MutableTensorView* view) {
  if (view == nullptr) return {};
  const std::uintptr_t pair_bytes = 2 * size_of(view->dtype);
  const bool in_pairs = reinterpret_cast<std::uintptr_t>(view->data) % pair_bytes == 0 && view->token_stride % 2 == 0 &&
                        view->head_stride % 2 == 0;
  return {{view->data, view->token_stride, view->head_stride}, view->dtype == Dtype::kF32, in_pairs};
}

std::int32_t side_of(std::int64_t side) {
  return side < 0 || side >= cuda::kUnlimitedSide ? cuda::kUnlimitedSide : static_cast<std::int32_t>(side);
}

class HopperAttentionBackward final : public AttentionBackwardKernel {
 public:
  HopperAttentionBackward(const AttentionBackwardSpec& spec, const BackwardConfig& config,
                          const BackwardLauncher& launcher, const cuda::CudaBackend& backend)
      : spec_(spec),
        config_(config),
        launcher_(launcher),
        device_(backend.device()),
        multiprocessors_(cuda::multiprocessors_of(backend.device())) {}

  // The tile of dQ. dK and dV have tiles of half as many keys, which skip queries that none of these sees.
  int key_tile() const override { return config_.dq_key_tile; }
  std::size_t dq_state_bytes(std::int64_t rows) const override {
    return floats_to_bytes(rows * forward().heads * kStateSums * dq_width());
  }
  std::size_t dkv_state_bytes(std::int64_t rows) const override {
    return floats_to_bytes(rows * forward().kv_heads * kStateSums * dkv_width());
  }
  std::size_t scratch_bytes(const BackwardLimits& limits) const override {
    return cuda::kStagingSlots * cuda::backward_table_bytes(limits, group()) + own_bytes() + tile_stats_bytes(limits);
  }
  void reserve(const BackwardLimits& limits) override {
    const DeviceGuard guard(device_);
    ring_.reserve(cuda::backward_table_bytes(limits, group()), device_);
    builder_.reserve(limits, group());
    if (own_bytes() > scratch_.bytes()) scratch_ = allocate_device(own_bytes(), device_);
    if (tile_stats_bytes(limits) > tile_stats_.bytes()) {
      tile_stats_ = allocate_device(tile_stats_bytes(limits), device_);
    }
    launcher_.prepare();
    cuda::prepare_row_stats();
  }

  void row_stats(const RowStatsTask& task, Stream stream, const Progress& progress) override {
    if (progress) progress();
    const DeviceGuard guard(device_);
    cuda::compute_row_stats(task, stream);
  }

  void add_dq(const DqTask& task, Stream stream, const Progress& progress) override {
    check_backward_task(spec_, config_.dq_key_tile, task);
    const bool finish = task.dq != nullptr;
    if (progress) progress();
    if (task.q.tokens == 0 || (!finish && !task.save)) return;
    const DeviceGuard guard(device_);
    DqParams p{};
    begin_sources(task.q, task.dout, task.sources.size(), p.common);
    for (const BackwardKeySource& source : task.sources) add_source(source.k, source.v, nullptr, p.common);
    if (p.common.bulk) {
      p.q = map_of(task.q, kBackwardTile);
      p.dout = map_of(task.dout, kBackwardTile);
      for (std::size_t i = 0; i < task.sources.size(); ++i) {
        if (task.sources[i].k.tokens == 0) continue;  // an empty source has no map
        p.k[i] = map_of(task.sources[i].k, config_.dq_key_tile);
        p.v[i] = map_of(task.sources[i].v, config_.dq_key_tile);
      }
    }
    p.stats = task.stats;
    p.dq = gradient_of(task.dq);
    const BackwardShape shape{BackwardSide::kQueries, config_.dq_key_tile,
                              kBackwardKvSplit,       group(),
                              kDqSwizzleBytes,        (forward().head_dim + forward().head_dim_v) * kElementBytes};
    enqueue(task, shape, finish, p.common, stream, progress, [&](int ctas) { launcher_.dq(p, ctas, stream); });
  }

  void add_dkv(const DkvTask& task, Stream stream, const Progress& progress) override {
    check_backward_task(spec_, task);
    const bool finish = task.dk != nullptr;
    if (progress) progress();
    if (task.k.tokens == 0 || (!finish && !task.save)) return;
    const DeviceGuard guard(device_);
    DkvParams p{};
    begin_sources(task.k, task.v, task.sources.size(), p.common);
    for (const BackwardQuerySource& source : task.sources) add_source(source.q, source.dout, source.stats, p.common);
    if (p.common.bulk) {
      p.k = map_of(task.k, kBackwardTile);
      p.v = map_of(task.v, kBackwardTile);
      for (std::size_t i = 0; i < task.sources.size(); ++i) {
        if (task.sources[i].q.tokens == 0) continue;  // an empty source has no map
        p.q[i] = map_of(task.sources[i].q, kBackwardTile);
        p.dout[i] = map_of(task.sources[i].dout, kBackwardTile);
      }
    }
    p.dk = gradient_of(task.dk);
    p.dv = gradient_of(task.dv);
    const BackwardShape shape{BackwardSide::kKeys,
                              kBackwardTile,
                              backward_query_split(forward()),
                              1,
                              kDkvSwizzleBytes,
                              (forward().head_dim + forward().head_dim_v) * kElementBytes * group()};
    enqueue(task, shape, finish, p.common, stream, progress, [&](int ctas) {
      float* stats = reinterpret_cast<float*>(tile_stats_.data());
      cuda::gather_row_stats(p.common.tables.tiles, static_cast<std::int64_t>(task.tiles.size()), forward().heads,
                             stats, stream);
      p.stats = stats;
      launcher_.dkv(p, ctas, stream);
    });
  }

 private:
  const AttentionSpec& forward() const { return spec_.forward; }
  int group() const { return forward().heads / forward().kv_heads; }
  std::int64_t dq_width() const { return forward().head_dim; }
  std::int64_t dkv_width() const { return forward().head_dim + forward().head_dim_v; }
  static std::size_t floats_to_bytes(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }
  // Closed sums of a CTA's head tiles, for tasks without a state.
  std::size_t own_bytes() const {
    return floats_to_bytes(std::int64_t{multiprocessors_} * kBackwardConsumers * kBackwardTile * dkv_width());
  }
  std::size_t tile_stats_bytes(const BackwardLimits& limits) const {
    return floats_to_bytes(limits.tiles * forward().heads * kRowStats * kBackwardTile);
  }

  // The rows' own tensors and `count` sources: whether TMA can load them, and where they are if it can't.
  void begin_sources(const TensorView& first, const TensorView& second, std::size_t count, BackwardCommon& common) {
    sources_.clear();
    stats_.clear();
    common.own[0] = rows_of(first);
    common.own[1] = rows_of(second);
    common.bulk = count <= kInlineSources && can_map(mapped(first)) && can_map(mapped(second));
  }
  void add_source(const TensorView& first, const TensorView& second, const float* stats, BackwardCommon& common) {
    sources_.push_back({{rows_of(first), rows_of(second)}});
    if (stats != nullptr) stats_.push_back(stats);
    if (first.tokens > 0) common.bulk = common.bulk && can_map(mapped(first)) && can_map(mapped(second));
  }

  // Builds and uploads the task's tables, completes `common` and calls `launch` with the number of CTAs.
  template <class Launch>
  void enqueue(const BackwardTask& task, const BackwardShape& shape, bool finish, BackwardCommon& common, Stream stream,
               const Progress& progress, const Launch& launch) {
    if (reinterpret_cast<std::uintptr_t>(task.state) % kAlignment != 0) {
      fail(ErrorCode::kInternal, "a backward task's state is not aligned",
           fmt::format("it must lie at a multiple of {} bytes", kAlignment));
    }
    const std::span<std::byte> memory = ring_.next(progress);
    const cuda::BackwardTableLayout layout =
        builder_.build(forward(), task, shape, finish, {sources_, stats_, common.bulk}, memory);
    if (layout.pair_count == 0) return;
    const cudaStream_t queue = cuda_stream(stream);
    std::byte* tables = ring_.upload(layout.bytes, queue);
    const Mask& mask = forward().mask;
    const bool of_queries = shape.rows == BackwardSide::kQueries;
    cuda::BackwardTables& t = common.tables;
    t.pairs = reinterpret_cast<const cuda::RowTilePair*>(tables + layout.pairs);
    t.row_tiles = reinterpret_cast<const cuda::RowTile*>(tables + layout.row_tiles);
    t.runs = reinterpret_cast<const cuda::TileRun*>(tables + layout.runs);
    t.tiles = reinterpret_cast<const cuda::OtherTile*>(tables + layout.tiles);
    if (!common.bulk) t.tile_rows = reinterpret_cast<const cuda::TileRows*>(tables + layout.tile_rows);
    t.taken = reinterpret_cast<std::int32_t*>(tables + layout.taken);
    t.pair_count = layout.pair_count;
    t.kv_heads = forward().kv_heads;
    t.group = shape.group;
    t.swizzle_heads = layout.swizzle_heads;
    t.tiles_per_split = static_cast<std::int32_t>(shape.split / shape.other_tile);
    t.left = side_of(of_queries ? mask.left : mask.right);
    t.right = side_of(of_queries ? mask.right : mask.left);
    common.sums = {task.resume || task.save ? static_cast<float*>(task.state) : nullptr,
                   reinterpret_cast<float*>(scratch_.data()), task.save, finish};
    common.softmax = cuda::softmax_of(forward());
    common.inverse_cap = forward().softcap > 0.0F ? 1.0F / forward().softcap : 0.0F;
    common.heads = forward().heads;
    launch(static_cast<int>(
        std::min<std::int64_t>(multiprocessors_, std::int64_t{layout.pair_count} * forward().kv_heads)));
    ring_.release(queue);
  }

  AttentionBackwardSpec spec_;
  BackwardConfig config_;
  const BackwardLauncher& launcher_;
  int device_;
  int multiprocessors_;
  cuda::StagingRing ring_;
  cuda::BackwardTableBuilder builder_;
  std::vector<cuda::TileRows> sources_;  // of the current task
  std::vector<const float*> stats_;      // of its sources
  Buffer tile_stats_;                    // gathered for dK and dV
  Buffer scratch_;
};

}  // namespace

std::unique_ptr<AttentionBackwardKernel> make_attention_backward(const AttentionBackwardSpec& spec, Backend& backend) {
  const auto config = choose_config(spec);
  const BackwardLauncher& launcher = launcher_of(spec, config.has_value());
  return std::make_unique<HopperAttentionBackward>(spec, *config, launcher,
                                                   static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm90
