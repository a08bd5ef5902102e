// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cpu/cpu_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/threads.hpp"
#include "kernels/attention/attention_task.hpp"
#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/attention/cpu/work_tile.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"

namespace ringattn::cpu {

namespace {

class CpuAttention final : public AttentionKernel {
 public:
  CpuAttention(const AttentionSpec& spec, const CpuBackend& backend)
      : spec_(spec), ops_(backend.attention_ops(spec.dtype)), threads_(backend.threads()) {
    TileScratch none;
    thread_bytes_ = TileScratch::layout(spec_, ops_, nullptr, none);
  }

  int key_tile() const override { return kKeyTile; }
  int query_tile() const override { return 1; }
  std::size_t state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows * spec_.heads) * state_floats(spec_) * sizeof(float);
  }
  std::size_t scratch_bytes(const AttentionLimits& limits) const override {
    // At worst every row has its own work tile.
    return thread_bytes_ * static_cast<std::size_t>(threads_) +
           static_cast<std::size_t>(limits.rows) * sizeof(WorkTile);
  }
  void reserve(const AttentionLimits&) override {
    scratch_ = allocate_host(thread_bytes_ * static_cast<std::size_t>(threads_));
  }

  void attend(const AttentionTask& task, Stream, const Progress& progress) override {
    check_attention_task(spec_, kKeyTile, task);
    const std::vector<WorkTile> work_tiles = make_work_tiles(task.queries, tile_rows(task.q.tokens), spec_.block_mask);
    const auto tile_count = static_cast<std::int64_t>(work_tiles.size());
    const int heads = heads_of_tile(spec_);
    const int head_tiles = spec_.heads / heads;  // head work tiles per work tile
    ThreadPool thread_pool(tile_count * head_tiles);
    thread_pool.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      TileScratch scratch;
      TileScratch::layout(spec_, ops_, scratch_.data() + static_cast<std::size_t>(thread) * thread_bytes_, scratch);
      for (std::int64_t item; (item = thread_pool.take()) >= 0;) {
        // Under a causal mask the last rows take longest: begin with them.
        const WorkTile& work_tile = work_tiles[static_cast<std::size_t>(tile_count - 1 - item / head_tiles)];
        attend_work_tile(spec_, ops_, task, work_tile, static_cast<int>(item % head_tiles) * heads, scratch,
                         checkpoint);
      }
    });
  }

  void merge_state(void* state, const void* partial, std::int64_t rows, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        const AttentionState split = copy_state(partial, row, head, memory);
        float* const into = state_at(spec_, static_cast<float*>(state), row, head);
        AttentionState merged = read_state(spec_, into);
        merge_row(spec_, ops_, split, merged);
        write_state(spec_, merged, into);
      }
    }
  }

  void export_state(const void* state, std::int64_t rows, const AttentionStateView& view, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    std::vector<float> zeros(static_cast<std::size_t>(spec_.head_dim_v));
    const Partial identity{-std::numeric_limits<float>::infinity(), 0.0F, zeros.data()};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        AttentionState saved = copy_state(state, row, head, memory);
        const Partial all = saved.flags == 0 ? identity : merge_all(spec_, ops_, saved);
        view.m.at(row, head) = all.offset;
        view.l.at(row, head) = one_nan(all.sum);
        std::transform(all.acc, all.acc + spec_.head_dim_v, reinterpret_cast<float*>(view.o.at(row, head)), one_nan);
      }
    }
  }

 private:
  // Copies one row's saved state to `memory`.
  AttentionState copy_state(const void* state, std::int64_t row, std::int64_t head, std::vector<float>& memory) const {
    std::copy_n(state_at(spec_, static_cast<const float*>(state), row, head), memory.size(), memory.begin());
    return read_state(spec_, memory.data());
  }

  // With few rows work tiles are smaller, down to one score block, so that every thread has several.
  std::int64_t tile_rows(std::int64_t rows) const {
    const std::int64_t max_rows = max_tile_rows(spec_, ops_);
    const std::int64_t min_rows =
        std::min<std::int64_t>(max_rows, std::max(1, ops_.row_block * spec_.kv_heads / spec_.heads));
    return std::clamp<std::int64_t>(rows * spec_.kv_heads / (4 * threads_), min_rows, max_rows);
  }

  AttentionSpec spec_;
  const TileOps& ops_;
  int threads_;
  std::size_t thread_bytes_ = 0;
  Buffer scratch_;  // [threads_, thread_bytes_]
};

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxHeadDim));
}

}  // namespace

std::vector<std::string> cpu_attention_missing(const AttentionSpec& spec) {
  std::vector<std::string> missing;
  require_dim("head_dim", spec.head_dim, missing);
  if (spec.head_dim_v != spec.head_dim) require_dim("head_dim_v", spec.head_dim_v, missing);
  const std::string block_mask = missing_for_block_mask(spec.block_mask, {/*query=*/1, kKeyTile});
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  check_threads(options.threads);
  auto backend = std::make_unique<CpuBackend>(options.threads);
  try_thread_pool(backend->threads());
  return backend;
}

double cpu_attention_speed(const Backend& backend) {
  const auto& cpu = static_cast<const CpuBackend&>(backend);
  return cpu.threads() * cpu.attention_ops(Dtype::kBf16).flops_per_second;
}

std::unique_ptr<AttentionKernel> make_cpu_attention(const AttentionSpec& spec, Backend& backend) {
  return std::make_unique<CpuAttention>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
