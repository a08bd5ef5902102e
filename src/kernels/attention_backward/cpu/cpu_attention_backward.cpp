// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/cpu/cpu_attention_backward.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/attention_backward/cpu/gradient_tile.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp(sink − LSE) · −delta. 0 if the sink has no weight, and for a row without any score.
float sink_term(float sink, float lse, float delta) {
  if (sink == -kInfinity || lse == -kInfinity) return 0.0F;
  return one_nan(-static_cast<float>(std::exp(static_cast<double>(sink) - static_cast<double>(lse))) * delta);
}

class CpuAttentionBackward final : public AttentionBackwardKernel {
 public:
  CpuAttentionBackward(const AttentionBackwardSpec& spec, const CpuBackend& backend)
      : spec_(spec), ops_(best_backward_ops()), threads_(backend.threads()) {
    GradientScratch none;
    thread_bytes_ = std::max(GradientScratch::layout_dq(spec_.forward, ops_, nullptr, none),
                             GradientScratch::layout_dkv(spec_.forward, ops_, nullptr, none));
  }

  int key_tile() const override { return kDqKeyTile; }
  std::size_t dq_state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows * spec_.forward.heads) * dq_state_floats(spec_.forward) * sizeof(float);
  }
  std::size_t dkv_state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows * spec_.forward.kv_heads) * dkv_state_floats(spec_.forward) * sizeof(float);
  }
  std::size_t scratch_bytes(const BackwardLimits& limits) const override {
    // At worst every row has its own work tile.
    return thread_bytes_ * static_cast<std::size_t>(threads_) +
           static_cast<std::size_t>(limits.rows) * sizeof(WorkTile);
  }
  void reserve(const BackwardLimits&) override {
    scratch_ = allocate_host(thread_bytes_ * static_cast<std::size_t>(threads_));
  }

  void row_stats(const RowStatsTask& task, Stream, const Progress& progress) override {
    constexpr std::int64_t kRows = 64;  // of a work item
    ThreadPool thread_pool((task.out.tokens + kRows - 1) / kRows);
    thread_pool.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
      for (std::int64_t item; (item = thread_pool.take()) >= 0 && !checkpoint.should_stop();) {
        for (std::int64_t row = item * kRows; row < std::min(task.out.tokens, (item + 1) * kRows); ++row) {
          for (int head = 0; head < spec_.forward.heads; ++head) compute_stats(task, row, head);
        }
      }
    });
  }

  void sum_rows(const RowSumsTask& task, Stream) override {
    const std::int64_t heads = spec_.forward.heads;
    for (std::int64_t i = 0; i < task.count; ++i) {
      float* const sum = task.sums + i * heads;
      if (task.begins[i] == task.begins[i + 1]) std::fill_n(sum, heads, 0.0F);
      for (std::int64_t at = task.begins[i]; at < task.begins[i + 1]; ++at) {
        const float* const row = task.rows + (task.order == nullptr ? at : task.order[at]) * heads;
        const bool first = at == task.begins[i];
        for (std::int64_t head = 0; head < heads; ++head) sum[head] = first ? row[head] : sum[head] + row[head];
      }
    }
  }

  void add_dq(const DqTask& task, Stream, const Progress& progress) override {
    check_backward_task(spec_, kDqKeyTile, task);
    const AttentionSpec& spec = spec_.forward;
    const std::int64_t max_rows = max_dq_rows(spec);
    const std::int64_t min_rows = std::max(1, ops_.row_block * spec.kv_heads / spec.heads);
    const std::vector<WorkTile> work_tiles = divide(task, task.q.tokens, std::min(min_rows, max_rows), max_rows);
    // Under a causal mask the last queries take longest: begin with them.
    for_each_item(work_tiles.size(), progress,
                  [&](std::size_t item, int kv_head, std::byte* memory, const Checkpoint& checkpoint) {
                    GradientScratch scratch;
                    GradientScratch::layout_dq(spec, ops_, memory, scratch);
                    add_dq_tile(spec_, ops_, task, work_tiles[work_tiles.size() - 1 - item], kv_head, scratch,
                                checkpoint);
                  });
  }

  void add_dkv(const DkvTask& task, Stream, const Progress& progress) override {
    check_backward_task(spec_, task);
    const std::vector<WorkTile> work_tiles = divide(task, task.k.tokens, ops_.row_block, kDkvTileRows);
    // Under a causal mask the first keys take longest.
    for_each_item(work_tiles.size(), progress,
                  [&](std::size_t item, int kv_head, std::byte* memory, const Checkpoint& checkpoint) {
                    GradientScratch scratch;
                    GradientScratch::layout_dkv(spec_.forward, ops_, memory, scratch);
                    add_dkv_tile(spec_, ops_, task, work_tiles[item], kv_head, scratch, checkpoint);
                  });
  }

 private:
  void compute_stats(const RowStatsTask& task, std::int64_t row, int head) const {
    const AttentionSpec& spec = spec_.forward;
    const float lse = task.lse.at(row, head);
    const float dlse = task.dlse.data == nullptr ? 0.0F : task.dlse.at(row, head);
    const float delta = ops_.dot(task.dout.at(row, head), task.out.at(row, head), spec.dtype, spec.head_dim_v) - dlse;
    float* const stats = task.stats + (row * spec.heads + head) * kRowStats;
    stats[0] = lse == -kInfinity ? 0.0F : lse * kLog2E;
    stats[1] = delta;
    if (task.sinks != nullptr) task.sink_terms[row * spec.heads + head] = sink_term(task.sinks[head], lse, delta);
  }

  // With few rows work tiles are smaller, down to one block of scores, so that every thread has several.
  std::vector<WorkTile> divide(const BackwardTask& task, std::int64_t rows, std::int64_t min_rows,
                               std::int64_t max_rows) const {
    const std::int64_t wanted = rows * spec_.forward.kv_heads / (4 * threads_);
    return make_work_tiles(task.rows, std::clamp(wanted, min_rows, max_rows), {});
  }

  // Calls add(work tile, KV head, the thread's scratch, checkpoint) for all of them, in this order.
  template <typename Add>
  void for_each_item(std::size_t work_tiles, const Progress& progress, Add add) {
    const auto kv_heads = static_cast<std::int64_t>(spec_.forward.kv_heads);
    ThreadPool thread_pool(static_cast<std::int64_t>(work_tiles) * kv_heads);
    thread_pool.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      std::byte* const memory = scratch_.data() + static_cast<std::size_t>(thread) * thread_bytes_;
      for (std::int64_t item; (item = thread_pool.take()) >= 0;) {
        add(static_cast<std::size_t>(item / kv_heads), static_cast<int>(item % kv_heads), memory, checkpoint);
      }
    });
  }

  AttentionBackwardSpec spec_;
  const BackwardOps& ops_;
  int threads_;
  std::size_t thread_bytes_ = 0;
  Buffer scratch_;  // [threads_, thread_bytes_]
};

}  // namespace

std::vector<std::string> cpu_attention_backward_missing(const AttentionBackwardSpec& spec) {
  AttentionSpec forward = spec.forward;
  forward.block_mask = {};  // missing_in_backward() names block masks
  std::vector<std::string> missing = cpu_attention_missing(forward);
  for (std::string& requirement : missing_in_backward(spec)) missing.push_back(std::move(requirement));
  return missing;
}

double cpu_attention_backward_speed(const Backend& backend) {
  AttentionBackwardSpec spec;
  spec.forward.heads = spec.forward.kv_heads = 8;
  return host_speed(cpu_attention_backward_work(spec, backend, kManyTokens), nullptr);
}

HostWork cpu_attention_backward_work(const AttentionBackwardSpec& spec, const Backend& backend, std::int64_t tokens) {
  const auto& cpu = static_cast<const CpuBackend&>(backend);
  const AttentionSpec& forward = spec.forward;
  const double queries = static_cast<double>(tokens);
  const double seen = queries * (queries + 1.0) / 2.0 * forward.heads;
  const double computed = seen + queries * kKeyTile / 2.0 * forward.heads;
  // All dtypes are computed in fp32, and each of the two passes makes the scores again: part of attention's rate,
  // measured with 2,048 tokens and 2 and 16 threads.
  constexpr double kPart = 0.64;
  const double pair_flops = 10.0 * 0.5 * (forward.head_dim + forward.head_dim_v);
  const double pass = 0.5 * computed * pair_flops / (kPart * cpu.tile_ops().flops_per_second);
  const WorkPhase one_pass{.tiles = 4.0 * cpu.threads(), .vector_seconds = pass};
  return {cpu.threads(), seen * pair_flops * 7.0 / 5.0, {one_pass, one_pass}};  // as backward_pair_flops() counts
}

std::unique_ptr<AttentionBackwardKernel> make_cpu_attention_backward(const AttentionBackwardSpec& spec,
                                                                     Backend& backend) {
  return std::make_unique<CpuAttentionBackward>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
