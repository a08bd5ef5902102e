// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/cpu/cpu_gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/gemm/cpu/gemm_ops.hpp"

namespace ringattn::cpu {

namespace {

// Rows widened to fp32 at a time: they fit into the L2 cache with a panel.
constexpr std::int64_t kBlockRows = 48;

class CpuGemm final : public BatchedGemmKernel {
 public:
  CpuGemm(const BatchedGemmSpec& spec, const CpuBackend& backend)
      : spec_(spec),
        widen_(backend.tile_ops().widen),
        ops_(best_gemm_ops()),
        threads_(backend.threads()),
        panel_bytes_(aligned(ops_.panel_floats(spec.dim_n, spec.dim_k) * sizeof(float))),
        thread_bytes_(panel_bytes_ + aligned(static_cast<std::size_t>(kBlockRows * spec.dim_k) * sizeof(float))) {}

  std::size_t scratch_bytes(std::int64_t) const override { return thread_bytes_ * static_cast<std::size_t>(threads_); }
  void reserve(std::int64_t heads) override { scratch_ = allocate_host(scratch_bytes(heads)); }

  void multiply(const BatchedGemmTask& task, Stream, const Progress& progress) override {
    check_batched_gemm(spec_, task);
    const std::int64_t rows = task.rows.tokens;
    const std::int64_t heads = task.weights.heads;
    // A work item is a head's matrix and a block of rows. Packing the matrix costs about as much as ten rows, so it is
    // packed once for all rows if there are enough heads for the threads.
    const std::int64_t row_blocks = std::max<std::int64_t>(1, 4 * threads_ / std::max<std::int64_t>(1, heads));
    const std::int64_t rows_per_block = std::max((rows + row_blocks - 1) / row_blocks, kBlockRows);
    ThreadPool thread_pool((rows + rows_per_block - 1) / rows_per_block * heads);
    thread_pool.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      std::byte* const scratch = scratch_.data() + static_cast<std::size_t>(thread) * thread_bytes_;
      for (std::int64_t item; (item = thread_pool.take()) >= 0;) {
        const std::int64_t begin = item / heads * rows_per_block;
        multiply_head(task, item % heads, begin, std::min(rows, begin + rows_per_block), scratch, checkpoint);
      }
    });
  }

 private:
  static std::size_t aligned(std::size_t bytes) {
    return (bytes + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
  }

  void multiply_head(const BatchedGemmTask& task, std::int64_t head, std::int64_t begin, std::int64_t end,
                     std::byte* scratch, const Checkpoint& checkpoint) const {
    if (checkpoint.should_stop()) return;
    const auto element = static_cast<std::int64_t>(size_of(spec_.dtype));
    auto* const panels = reinterpret_cast<float*>(scratch);
    auto* const wide = reinterpret_cast<float*>(scratch + panel_bytes_);
    ops_.pack({task.weights.at(head), spec_.dtype, spec_.dim_n, spec_.dim_k, task.weights.n_stride * element,
               task.weights.k_stride * element},
              panels);
    const std::int64_t row_head = task.rows.heads == 1 ? 0 : head;
    for (std::int64_t row = begin; row < end; row += kBlockRows) {
      if (checkpoint.should_stop()) return;
      const std::int64_t count = std::min(kBlockRows, end - row);
      for (std::int64_t i = 0; i < count; ++i) {
        widen_(task.rows.at(row + i, row_head), spec_.dtype, spec_.dim_k, wide + i * spec_.dim_k);
      }
      ops_.multiply({wide, count, task.out.at(row, head), task.out.token_stride * element, spec_.dtype}, spec_.dim_n,
                    spec_.dim_k, panels);
    }
  }

  BatchedGemmSpec spec_;
  decltype(TileOps::widen) widen_;
  const GemmOps& ops_;
  int threads_;
  std::size_t panel_bytes_;
  std::size_t thread_bytes_;
  Buffer scratch_;  // [threads_, thread_bytes_]: a packed matrix, and rows in fp32
};

}  // namespace

std::vector<std::string> cpu_gemm_missing(const BatchedGemmSpec& spec) {
  std::vector<std::string> missing;
  const auto require = [&](std::string_view name, int dim) {
    if (dim < 8 || dim % 8 != 0) missing.push_back(fmt::format("{} {} (supported: multiples of 8)", name, dim));
  };
  require("k", spec.dim_k);
  require("n", spec.dim_n);
  return missing;
}

double cpu_gemm_speed(const Backend& backend) {
  const auto& cpu = static_cast<const CpuBackend&>(backend);
  return cpu.threads() * cpu.tile_ops().flops_per_second;
}

std::unique_ptr<BatchedGemmKernel> make_cpu_gemm(const BatchedGemmSpec& spec, Backend& backend) {
  return std::make_unique<CpuGemm>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
