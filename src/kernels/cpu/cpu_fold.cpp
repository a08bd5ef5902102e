// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_fold.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/threads.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/fold_state.hpp"
#include "kernels/cpu/row_group.hpp"
#include "kernels/cpu/team.hpp"
#include "kernels/fold_task.hpp"

namespace ringattn::cpu {

namespace {

class CpuFold final : public FoldKernel {
 public:
  CpuFold(const FoldSpec& spec, const CpuBackend& backend)
      : spec_(spec), ops_(backend.tile_ops()), threads_(backend.threads()) {
    GroupScratch none;
    thread_bytes_ = GroupScratch::layout(spec_, ops_, nullptr, none);
  }

  int key_tile() const override { return kKeyTile; }
  int query_tile() const override { return 1; }
  std::size_t state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows * spec_.heads) * state_floats(spec_) * sizeof(float);
  }
  std::size_t scratch_bytes(const FoldLimits& limits) const override {
    // At worst every row is a group of its own.
    return thread_bytes_ * static_cast<std::size_t>(threads_) +
           static_cast<std::size_t>(limits.rows) * sizeof(RowGroup);
  }
  void reserve(const FoldLimits&) override {
    scratch_ = allocate_host(thread_bytes_ * static_cast<std::size_t>(threads_));
  }

  void fold(const FoldTask& task, Stream, const Progress& progress) override {
    check_fold_task(spec_, kKeyTile, task);
    const std::vector<RowGroup> groups = make_row_groups(task.queries, group_rows(task.q.tokens), spec_.lists);
    const auto group_count = static_cast<std::int64_t>(groups.size());
    const int heads = heads_of_group(spec_);
    const int turns = spec_.heads / heads;  // that each group is folded in
    Team team(group_count * turns);
    team.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      GroupScratch scratch;
      GroupScratch::layout(spec_, ops_, scratch_.data() + static_cast<std::size_t>(thread) * thread_bytes_, scratch);
      for (std::int64_t item; (item = team.take()) >= 0;) {
        // Under a causal mask the last rows take longest: begin with them.
        const RowGroup& group = groups[static_cast<std::size_t>(group_count - 1 - item / turns)];
        fold_row_group(spec_, ops_, task, group, static_cast<int>(item % turns) * heads, scratch, checkpoint);
      }
    });
  }

  void merge_state(void* state, const void* partial, std::int64_t rows, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        const RowState group = copy_state(partial, row, head, memory);
        float* const into = state_at(spec_, static_cast<float*>(state), row, head);
        RowState merged = read_state(spec_, into);
        merge_row(spec_, ops_, group, merged);
        write_state(spec_, merged, into);
      }
    }
  }

  void export_state(const void* state, std::int64_t rows, const FoldStateView& view, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    std::vector<float> zeros(static_cast<std::size_t>(spec_.head_dim_v));
    const Partial nothing{-std::numeric_limits<float>::infinity(), 0.0F, zeros.data()};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        RowState saved = copy_state(state, row, head, memory);
        const Partial all = saved.parts == 0 ? nothing : merge_all(spec_, ops_, saved);
        view.m.at(row, head) = all.m;
        view.l.at(row, head) = one_nan(all.l);
        std::transform(all.o, all.o + spec_.head_dim_v, reinterpret_cast<float*>(view.o.at(row, head)), one_nan);
      }
    }
  }

 private:
  // One row's saved state, in `memory`.
  RowState copy_state(const void* state, std::int64_t row, std::int64_t head, std::vector<float>& memory) const {
    std::copy_n(state_at(spec_, static_cast<const float*>(state), row, head), memory.size(), memory.begin());
    return read_state(spec_, memory.data());
  }

  // Few rows: smaller groups, down to one score block, so that every thread has several.
  std::int64_t group_rows(std::int64_t rows) const {
    const std::int64_t most = max_group_rows(spec_);
    const std::int64_t least = std::min<std::int64_t>(most, std::max(1, ops_.row_block * spec_.kv_heads / spec_.heads));
    return std::clamp<std::int64_t>(rows * spec_.kv_heads / (4 * threads_), least, most);
  }

  FoldSpec spec_;
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

std::vector<std::string> cpu_fold_missing(const FoldSpec& spec) {
  std::vector<std::string> missing;
  require_dim("head_dim", spec.head_dim, missing);
  if (spec.head_dim_v != spec.head_dim) require_dim("head_dim_v", spec.head_dim_v, missing);
  const std::string lists = missing_for_lists(spec.lists, {/*query=*/1, kKeyTile});
  if (!lists.empty()) missing.push_back(lists);
  return missing;
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  check_threads(options.threads);
  auto backend = std::make_unique<CpuBackend>(options.threads);
  try_team(backend->threads());
  return backend;
}

double cpu_fold_speed(const Backend& backend) {
  const auto& cpu = static_cast<const CpuBackend&>(backend);
  return cpu.threads() * cpu.tile_ops().flops_per_second;
}

std::unique_ptr<FoldKernel> make_cpu_fold(const FoldSpec& spec, Backend& backend) {
  return std::make_unique<CpuFold>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
