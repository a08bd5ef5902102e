// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_fold.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/staging_ring.hpp"
#include "kernels/fold_task.hpp"
#include "kernels/registry.hpp"

namespace ringattn::cuda {

namespace {

constexpr float kLog2E = 1.44269504F;
constexpr std::uintptr_t kStateAlignment = 16;

// K and V that stay in the cache: a section's, while the one before comes to its end.
std::int64_t cache_for_keys(int device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  return std::int64_t{bytes} / 8 * 3;
}

int multiprocessors_of(int device) {
  constexpr int kUsual = 132;  // of an H100 or H200: what plans without a device count with
  if (device == kNoDevice) return kUsual;
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// What doesn't change from task to task.
FoldParams params_of(const FoldSpec& spec) {
  FoldParams p{};
  p.mask_left = spec.mask.left;
  p.mask_right = spec.mask.right;
  p.heads = spec.heads;
  p.kv_heads = spec.kv_heads;
  p.head_dim = spec.head_dim;
  p.head_dim_v = spec.head_dim_v;
  p.dtype = static_cast<std::int32_t>(spec.dtype);
  p.softmax_scale = spec.softmax_scale;
  p.softcap = spec.softcap;
  // The greatest score keeps its place under a positive factor only.
  p.scaled_first = spec.softcap > 0.0F || !(spec.softmax_scale > 0.0F);
  p.exponent = p.scaled_first ? 1.0F : spec.softmax_scale;
  p.exponent_base2 = p.exponent * kLog2E;
  return p;
}

class CudaFold final : public FoldKernel {
 public:
  CudaFold(const FoldSpec& spec, const DeviceKernel& kernel, const CudaBackend& backend)
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
  std::size_t scratch_bytes(const FoldLimits& limits) const override {
    const std::size_t slots = kStagingSlots + static_cast<std::size_t>(limits.prepared);
    return slots * table_bytes(spec_, kernel_.shape, limits) + own_bytes();
  }
  void reserve(const FoldLimits& limits) override {
    const DeviceGuard guard(device_);
    kernel_.shape.cache_bytes = cache_for_keys(device_);
    for (Built& built : built_) built.geometry.reserve(limits);  // and forget
    ring_.reserve(table_bytes(spec_, kernel_.shape, limits), device_);
    builder_.reserve(spec_, kernel_.shape, limits);
    prepared_.clear();
    prepared_.reserve(static_cast<std::size_t>(limits.prepared));
    if (own_bytes() > scratch_.bytes()) scratch_ = allocate_device(own_bytes(), device_);
    kernel_.launch(params_, {});  // loaded now, not while peers wait
  }

  // The tables are the task's own, so nobody overwrites them and nobody has to wait: not even a graph's launches do.
  PreparedTask prepare(const FoldTask& task) override {
    if (task.sources.size() > kNearSources) {
      fail(ErrorCode::kInternal, fmt::format("a fold task of {} sources can't be prepared", task.sources.size()),
           fmt::format("the addresses of more than {} stand in its tables", kNearSources));
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
    check_cuda(cudaStreamSynchronize(queue.get()), "cudaStreamSynchronize");
    prepared_.push_back(std::move(tables));
    return static_cast<PreparedTask>(prepared_.size()) - 1;
  }

  void fold(const FoldTask& task, Stream stream, const Progress& progress) override {
    check_fold_task(spec_, task);
    if (reinterpret_cast<std::uintptr_t>(task.state) % kStateAlignment != 0) {
      fail(ErrorCode::kInternal, "a fold task's state is not aligned",
           fmt::format("it must lie at a multiple of {} bytes", kStateAlignment));
    }
    if (progress) progress();
    if (task.q.tokens == 0 || (task.finish == nullptr && !task.save)) return;
    const DeviceGuard guard(device_);
    if (task.prepared != kNotPrepared) {
      const PreparedTables& prepared = prepared_.at(static_cast<std::size_t>(task.prepared));
      if (prepared.layout.item_count > 0) launch(task, prepared.layout, prepared.memory.data(), stream);
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
      if (layout.item_count == 0) return;
      tables = ring_.upload(layout.bytes, queue);
    }
    launch(task, layout, tables, stream);
    ring_.release(queue);
    if (again) return;
    Built& built = built_[ring_.current()];
    built.layout = layout;
    built.geometry.remember(task);
  }

  void export_state(const void* state, std::int64_t rows, const FoldStateView& view, Stream stream) override {
    if (rows == 0) return;
    const DeviceGuard guard(device_);
    kernel_.export_state({static_cast<const float*>(state), rows, spec_.heads, spec_.head_dim_v,
                          kernel_.reference_unit == 0.0F ? params_.exponent : kernel_.reference_unit, view.m.data,
                          view.m.token_stride, view.m.head_stride, view.l.data, view.l.token_stride, view.l.head_stride,
                          static_cast<float*>(view.o.data), view.o.token_stride, view.o.head_stride},
                         stream);
  }

 private:
  // What a slot of the ring holds.
  struct Built {
    TaskGeometry geometry;
    TableLayout layout;
  };

  struct PreparedTables {
    TableLayout layout;
    Buffer memory;
  };

  // `tables`: on the device, as `layout` says.
  void launch(const FoldTask& task, const TableLayout& layout, std::byte* tables, Stream stream) const {
    FoldParams p = params_;
    p.q = task.q.data;
    p.q_token_stride = task.q.token_stride;
    p.q_head_stride = task.q.head_stride;
    if (task.finish != nullptr) {
      const FoldOutput& output = *task.finish;
      p.out = output.out.data;
      p.out_token_stride = output.out.token_stride;
      p.out_head_stride = output.out.head_stride;
      p.lse = output.lse.data;
      p.lse_token_stride = output.lse.token_stride;
      p.lse_head_stride = output.lse.head_stride;
      p.sinks = output.sinks;
    }
    p.items = reinterpret_cast<const WorkItem*>(tables + layout.items);
    p.runs = reinterpret_cast<const RunEntry*>(tables + layout.runs);
    p.tiles = reinterpret_cast<const TileEntry*>(tables + layout.tiles);
    p.sources = reinterpret_cast<const SourceEntry*>(tables + layout.sources);
    for (std::size_t i = 0; i < std::min<std::size_t>(kNearSources, task.sources.size()); ++i) {
      p.near_sources[i] = source_entry(task.sources[i]);
    }
    p.all_near = task.sources.size() <= kNearSources;
    p.bundles = reinterpret_cast<const WorkBundle*>(tables + layout.bundles);
    p.item_count = layout.item_count;
    p.bundle_count = layout.bundle_count;
    p.taken = reinterpret_cast<std::int32_t*>(tables + layout.counters);
    p.tiles_done = p.taken + 1;
    p.keep_pace = layout.keep_pace;
    p.multiprocessors = multiprocessors_;
    p.walk_ctas = layout.walk_ctas;
    p.scratch = reinterpret_cast<float*>(scratch_.data());
    p.section_heads = layout.section_heads;
    p.early_count = layout.early_count;
    p.state = static_cast<float*>(task.state);
    p.rows = task.q.tokens;
    p.resume = task.resume;
    p.save = task.save;
    p.finish = task.finish != nullptr;
    kernel_.launch(p, stream);
  }

  std::size_t own_bytes() const {
    return static_cast<std::size_t>(multiprocessors_) * kernel_.scratch_floats * sizeof(float);
  }

  FoldSpec spec_;
  DeviceKernel kernel_;
  int device_;
  int multiprocessors_;
  FoldParams params_;
  StagingRing ring_;
  std::array<Built, kStagingSlots> built_;
  std::vector<PreparedTables> prepared_;  // by PreparedTask
  Buffer scratch_;
  WorkBuilder builder_;
};

}  // namespace

Launch launch_of(std::string_view kernel, std::span<const CompiledFold> compiled, const FoldSpec& spec,
                 bool configured) {
  const auto found = std::ranges::find_if(compiled, [&](const CompiledFold& entry) {
    return entry.dtype == spec.dtype && entry.head_dim == spec.head_dim;
  });
  if (!configured || found == compiled.end()) {
    fail(ErrorCode::kInternal, fmt::format("{} was made for {}", kernel, describe(spec)), "it can't do that");
  }
  return found->launch;
}

std::unique_ptr<FoldKernel> make_cuda_fold(const FoldSpec& spec, const DeviceKernel& kernel, Backend& backend) {
  return std::make_unique<CudaFold>(spec, kernel, static_cast<const CudaBackend&>(backend));
}

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  return std::make_unique<CudaBackend>(options.device);
}

std::string cuda_unavailable() {
  const std::string none = gpus_unavailable();
  if (!none.empty()) return none;
  for (const Gpu& gpu : visible_gpus()) {
    if (gpu.compute_major < 8) {
      return fmt::format("GPU {} ({}) has compute capability {}.{}, 8.0 is needed", gpu.device, gpu.name,
                         gpu.compute_major, gpu.compute_minor);
    }
  }
  return {};
}

}  // namespace ringattn::cuda
