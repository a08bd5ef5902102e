// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cuda/cuda_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/cuda.hpp"
#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/attention/attention_task.hpp"
#include "kernels/attention/cuda/task_geometry.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/staging_ring.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::uintptr_t kStateAlignment = 16;

// L2 bytes for the K and V of one swizzle group: three eighths, because the group before may still be running.
std::int64_t cache_for_keys(int device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  return std::int64_t{bytes} / 8 * 3;
}

// Parameters that don't change from task to task.
AttentionParams params_of(const AttentionSpec& spec) {
  AttentionParams p{};
  p.mask = spec.mask;
  p.heads = spec.heads;
  p.kv_heads = spec.kv_heads;
  p.head_dim = spec.head_dim;
  p.head_dim_v = spec.head_dim_v;
  p.dtype = static_cast<std::int32_t>(spec.dtype);
  p.softmax = softmax_of(spec);
  return p;
}

class CudaAttention final : public AttentionKernel {
 public:
  CudaAttention(const AttentionSpec& spec, const DeviceKernel& kernel, const CudaBackend& backend)
      : spec_(spec),
        kernel_(kernel),
        device_(backend.device()),
        multiprocessors_(multiprocessors_of(backend.device())),
        params_(params_of(spec)) {
    kernel_.shape.ctas = multiprocessors_;
  }

  int key_tile() const override { return kernel_.shape.key_tile; }
  int query_tile() const override { return kernel_.shape.query_tile; }
  std::size_t state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(spec_.heads) * kernel_.state_floats *
           sizeof(float);
  }
  std::size_t scratch_bytes(const AttentionLimits& limits) const override {
    const std::size_t slots = kStagingSlots + static_cast<std::size_t>(limits.prepared);
    return slots * table_bytes(spec_, kernel_.shape, limits) + own_bytes();
  }
  void reserve(const AttentionLimits& limits) override {
    const DeviceGuard guard(device_);
    kernel_.shape.cache_bytes = cache_for_keys(device_);
    for (Built& built : built_) built.geometry.reserve(limits);  // and forget
    ring_.reserve(table_bytes(spec_, kernel_.shape, limits), device_);
    builder_.reserve(spec_, kernel_.shape, limits);
    prepared_.clear();
    prepared_.reserve(static_cast<std::size_t>(limits.prepared));
    if (own_bytes() > scratch_.bytes()) {
      scratch_ = allocate_cleared_device(own_bytes(), device_);
    }
    kernel_.launcher->prepare();
  }

  // The tables belong to the task and are never overwritten, so no launch, not even a graph's, has to wait for them.
  PreparedTask prepare(const AttentionTask& task) override {
    if (task.sources.size() > kInlineSources) {
      fail(ErrorCode::kInternal, fmt::format("an attention task of {} sources can't be prepared", task.sources.size()),
           fmt::format("the tables would hold the addresses of more than {} sources", kInlineSources));
    }
    const DeviceGuard guard(device_);
    const CudaStream queue;
    const std::span<std::byte> memory = ring_.next({});
    built_[ring_.current()].geometry.forget();
    PreparedTables tables;
    tables.layout = builder_.build(spec_, task, kernel_.shape, memory);
    tables.memory = allocate_device(tables.layout.bytes, device_);
    check_cuda(
        cudaMemcpyAsync(tables.memory.data(), memory.data(), tables.layout.bytes, cudaMemcpyHostToDevice, queue.get()),
        "cudaMemcpyAsync");
    await_stream(queue.get(), DeviceTimeouts::for_short_work());
    prepared_.push_back(std::move(tables));
    return static_cast<PreparedTask>(prepared_.size()) - 1;
  }

  void attend(const AttentionTask& task, Stream stream, const Progress& progress) override {
    check_attention_task(spec_, key_tile(), task);
    if (reinterpret_cast<std::uintptr_t>(task.state) % kStateAlignment != 0) {
      fail(ErrorCode::kInternal, "an attention task's state is not aligned",
           fmt::format("its address must be a multiple of {} bytes", kStateAlignment));
    }
    if (progress) progress();
    if (task.q.tokens == 0 || (task.finish == nullptr && !task.save)) return;
    const DeviceGuard guard(device_);
    if (task.prepared != kNotPrepared) {
      const PreparedTables& prepared = prepared_.at(static_cast<std::size_t>(task.prepared));
      if (prepared.layout.work_tile_count > 0) launch(task, prepared.layout, prepared.memory.data(), stream);
      return;
    }
    const cudaStream_t queue = cuda_stream(stream);
    std::byte* tables = nullptr;
    TableLayout layout;
    const auto known = std::ranges::find_if(built_, [&](const Built& built) { return built.geometry.fits(task); });
    const bool again = known != built_.end();
    if (again) {
      layout = known->layout;
      tables = ring_.again(static_cast<std::size_t>(known - built_.begin()), queue);
    } else {
      const std::span<std::byte> memory = ring_.next(progress);
      built_[ring_.current()].geometry.forget();
      layout = builder_.build(spec_, task, kernel_.shape, memory);
      if (layout.work_tile_count == 0) return;
      tables = ring_.upload(layout.bytes, queue);
    }
    launch(task, layout, tables, stream);
    ring_.release(queue);
    if (again) return;
    Built& built = built_[ring_.current()];
    built.layout = layout;
    built.geometry.remember(task);
  }

  void merge_state(void* state, const void* partial, std::int64_t rows, Stream stream) override {
    if (rows == 0) return;
    const DeviceGuard guard(device_);
    kernel_.merge_state({static_cast<float*>(state), static_cast<const float*>(partial), rows, spec_.heads,
                         spec_.head_dim_v, kernel_.offset_scale},
                        stream);
  }

  void export_state(const void* state, std::int64_t rows, const AttentionStateView& view, Stream stream) override {
    if (rows == 0) return;
    const DeviceGuard guard(device_);
    kernel_.export_state(
        {static_cast<const float*>(state), rows, spec_.heads, spec_.head_dim_v, kernel_.offset_scale, view.m.data,
         view.m.token_stride, view.m.head_stride, view.l.data, view.l.token_stride, view.l.head_stride,
         static_cast<float*>(view.o.data), view.o.token_stride, view.o.head_stride},
        stream);
  }

 private:
  // The task and the layout of the tables in a slot of the ring.
  struct Built {
    TaskGeometry geometry;
    TableLayout layout;
  };

  struct PreparedTables {
    TableLayout layout;
    Buffer memory;
  };

  // `tables`: device memory with the layout `layout`.
  void launch(const AttentionTask& task, const TableLayout& layout, std::byte* tables, Stream stream) const {
    AttentionParams p = params_;
    set_tensors(task, p);
    set_tables(task, layout, tables, p);
    p.state.memory = static_cast<float*>(task.state);
    p.state.resume = task.resume;
    p.state.save = task.save;
    p.state.scratch = reinterpret_cast<float*>(scratch_.data());
    kernel_.launcher->launch(p, stream);
  }

  static void set_tensors(const AttentionTask& task, AttentionParams& p) {
    p.rows = task.q.tokens;
    p.q = {task.q.data, task.q.token_stride, task.q.head_stride};
    p.finish = task.finish != nullptr;
    if (!p.finish) return;
    const auto& [out, lse, sinks] = *task.finish;
    p.out = {out.data, out.token_stride, out.head_stride};
    p.lse = {lse.data, lse.token_stride, lse.head_stride};
    p.sinks = sinks;
  }

  // `tables`: device address of the tables of `layout`.
  void set_tables(const AttentionTask& task, const TableLayout& layout, std::byte* tables, AttentionParams& p) const {
    const auto at = [tables]<class Entry>(const Entry*& entries, std::size_t offset) {
      entries = reinterpret_cast<const Entry*>(tables + offset);
    };
    at(p.tables.work_tiles, layout.work_tiles);
    at(p.tables.gqa_tiles, layout.gqa_tiles);
    at(p.tables.runs, layout.runs);
    at(p.tables.tiles, layout.tiles);
    if (spec_.positions > 0) at(p.tables.positions, layout.positions);
    p.tables.position_lists = spec_.positions;
    at(p.tables.sources, layout.sources);
    for (std::size_t i = 0; i < std::min<std::size_t>(kInlineSources, task.sources.size()); ++i) {
      p.tables.inline_sources[i] = source_entry(task.sources[i]);
    }
    p.tables.page_runs = task.page_runs;
    p.tables.all_inline = task.sources.size() <= kInlineSources;
    p.tables.work_tile_count = layout.work_tile_count;
    p.tables.gqa_tile_count = layout.gqa_tile_count;
    p.schedule.taken = reinterpret_cast<std::int32_t*>(tables + layout.counters);
    p.schedule.tiles_done = p.schedule.taken + 1;
    p.schedule.multiprocessors = multiprocessors_;
    p.schedule.cluster_ctas = layout.cluster_ctas;
    p.schedule.entry_heads = layout.entry_heads;
    p.schedule.heads_per_gqa_tile = layout.heads_per_gqa_tile;
    p.schedule.swizzle_heads = layout.swizzle_heads;
    p.schedule.early_entries = layout.early_entries;
    p.schedule.keep_pace = layout.keep_pace;
  }

  std::size_t own_bytes() const {
    return static_cast<std::size_t>(multiprocessors_) * kernel_.scratch_floats * sizeof(float);
  }

  AttentionSpec spec_;
  DeviceKernel kernel_;
  int device_;
  int multiprocessors_;
  AttentionParams params_;
  StagingRing ring_;
  std::array<Built, kStagingSlots> built_;
  std::vector<PreparedTables> prepared_;  // indexed by PreparedTask
  Buffer scratch_;
  WorkBuilder builder_;
};

}  // namespace

AttentionParams::Softmax softmax_of(const AttentionSpec& spec) {
  AttentionParams::Softmax softmax{};
  softmax.scale = spec.softmax_scale;
  softmax.cap = spec.softcap;
  // Scaling keeps the order of scores only if the scale is positive.
  softmax.scaled_first = spec.softcap > 0.0F || !(spec.softmax_scale > 0.0F);
  softmax.exponent = softmax.scaled_first ? 1.0F : spec.softmax_scale;
  softmax.exponent_base2 = softmax.exponent * kLog2E;
  return softmax;
}

std::unique_ptr<AttentionKernel> make_cuda_attention(const AttentionSpec& spec, const DeviceKernel& kernel,
                                                     Backend& backend) {
  return std::make_unique<CudaAttention>(spec, kernel, static_cast<const CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
