// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/cpu/cpu_gemm_amx.hpp"

#include <algorithm>

#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/gemm/cpu/cpu_gemm.hpp"
#include "kernels/gemm/cpu/gemm_ops.hpp"

namespace ringattn::cpu {

namespace {

// Rows packed at a time: at dim_k 2,048 they take half of an L2 cache of 2 MiB.
constexpr std::int64_t kPackedRows = 256;

class CpuGemmAmx final : public BatchedGemmKernel {
 public:
  CpuGemmAmx(const BatchedGemmSpec& spec, const CpuBackend& backend)
      : spec_(spec),
        ops_(*gemm_tile_ops()),
        threads_(backend.threads()),
        rows_stride_((spec.dim_k + kGemmTileDepth - 1) / kGemmTileDepth * kGemmTileBytes),
        matrix_bytes_((spec.dim_n + kGemmTileColumns - 1) / kGemmTileColumns * 2 * rows_stride_),
        thread_bytes_(matrix_bytes_ + kPackedRows / kGemmTileRows * rows_stride_) {}

  std::size_t scratch_bytes(std::int64_t) const override {
    return static_cast<std::size_t>(thread_bytes_) * static_cast<std::size_t>(threads_);
  }
  void reserve(std::int64_t heads) override { scratch_ = allocate_host(scratch_bytes(heads)); }

  void multiply(const BatchedGemmTask& task, Stream, const Progress& progress) override {
    check_batched_gemm(spec_, task);
    const std::int64_t rows = task.rows.tokens;
    const std::int64_t heads = task.weights.heads;
    // A work item is a head's matrix and a block of rows: enough items for the threads, and of many rows, so that a
    // matrix is seldom read or packed again.
    const std::int64_t blocks = std::max<std::int64_t>(1, 4 * threads_ / std::max<std::int64_t>(1, heads));
    const std::int64_t even = (rows + blocks - 1) / blocks;
    const std::int64_t block = std::max<std::int64_t>(1, (even + 31) / 32) * 32;
    ThreadPool thread_pool((rows + block - 1) / block * heads);
    thread_pool.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      std::byte* const scratch = scratch_.data() + thread * thread_bytes_;
      for (std::int64_t item; (item = thread_pool.take()) >= 0;) {
        const std::int64_t begin = item / heads * block;
        multiply_head(task, item % heads, begin, std::min(rows, begin + block), scratch, checkpoint);
      }
    });
  }

 private:
  static constexpr std::int64_t kElement = 2;  // bytes

  void multiply_head(const BatchedGemmTask& task, std::int64_t head, std::int64_t begin, std::int64_t end,
                     std::byte* scratch, const Checkpoint& checkpoint) const {
    if (checkpoint.should_stop()) return;
    const GemmWeights& weights = task.weights;
    std::byte* const tiles = scratch + matrix_bytes_;
    GemmTiles gemm;
    gemm.rows = tiles;
    gemm.rows_stride = rows_stride_;
    gemm.scratch = scratch;
    gemm.matrix = {weights.at(head),           spec_.dtype, spec_.dim_n, spec_.dim_k, weights.n_stride * kElement,
                   weights.k_stride * kElement};
    if (weights.k_stride != 1) {
      ops_.pack_transposed(gemm.matrix, scratch);
      gemm.packed = scratch;
    }
    gemm.out_stride = task.out.token_stride * kElement;
    const std::int64_t row_head = task.rows.heads == 1 ? 0 : head;
    for (std::int64_t row = begin; row < end; row += kPackedRows) {
      if (checkpoint.should_stop()) return;
      gemm.count = std::min(kPackedRows, end - row);
      for (std::int64_t i = 0; i < gemm.count; i += kGemmTileRows) {
        const std::byte* rows[kGemmTileRows] = {};
        for (std::int64_t r = 0; r < std::min(kGemmTileRows, gemm.count - i); ++r) {
          rows[r] = task.rows.at(row + i + r, row_head);
        }
        ops_.pack_rows(rows, spec_.dim_k * kElement, tiles + i / kGemmTileRows * rows_stride_);
      }
      gemm.out = task.out.at(row, head);
      ops_.multiply(gemm);
    }
  }

  BatchedGemmSpec spec_;
  const GemmTileOps& ops_;
  int threads_;
  std::int64_t rows_stride_;
  std::int64_t matrix_bytes_;
  std::int64_t thread_bytes_;
  Buffer scratch_;  // [threads_, thread_bytes_]: a packed matrix, and packed rows
};

}  // namespace

std::vector<std::string> cpu_gemm_amx_missing(const BatchedGemmSpec& spec) {
  std::vector<std::string> missing = cpu_gemm_missing(spec);
  if (spec.dtype != Dtype::kBf16) missing.push_back(std::string(dtype_name(spec.dtype)) + " (supported: bf16)");
  return missing;
}

std::string amx_gemm_unavailable() { return gemm_tile_ops() != nullptr ? std::string() : amx_unavailable(); }

std::unique_ptr<BatchedGemmKernel> make_cpu_gemm_amx(const BatchedGemmSpec& spec, Backend& backend) {
  return std::make_unique<CpuGemmAmx>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
