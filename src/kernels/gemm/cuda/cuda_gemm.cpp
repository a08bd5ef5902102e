// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/cuda/cuda_gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/cuda.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kMaxTiles = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxRows = std::int64_t{1}
                                  << 30;  // per launch, so that the index of a tile's last row fits into an int

// `count` rows per head, `stride` elements apart.
template <class Byte, class Void>
GemmOperand<Byte> rows_of(Void* data, std::int64_t count, std::int64_t stride, std::int64_t heads,
                          std::int64_t head_stride) {
  GemmOperand<Byte> rows{};
  rows.data = static_cast<Byte*>(data);
  rows.stride = stride * kElementBytes;
  rows.head_stride = heads > 1 ? head_stride * kElementBytes : 0;
  rows.heads = static_cast<std::int32_t>(heads);
  rows.aligned = reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0 &&
                 (count == 1 || rows.stride % kAlignment == 0) && rows.head_stride % kAlignment == 0;
  return rows;
}

class CudaGemm final : public BatchedGemmKernel {
 public:
  CudaGemm(const BatchedGemmSpec& spec, const GemmLauncher& launcher, const CudaBackend& backend)
      : spec_(spec),
        launcher_(launcher),
        device_(backend.device()),
        multiprocessors_(multiprocessors_of(backend.device())) {}

  std::size_t scratch_bytes(std::int64_t) const override { return 0; }
  void reserve(std::int64_t) override {
    const DeviceGuard guard(device_);
    launcher_.prepare();
  }

  void multiply(const BatchedGemmTask& task, Stream stream, const Progress& progress) override {
    check_batched_gemm(spec_, task);
    if (progress) progress();
    if (task.rows.tokens == 0 || task.weights.heads == 0) return;
    const DeviceGuard guard(device_);
    const GemmWeights& weights = task.weights;
    GemmParams p{};
    p.heads = static_cast<std::int32_t>(weights.heads);
    p.dim_k = spec_.dim_k;
    p.dim_n = spec_.dim_n;
    p.transposed = weights.k_stride != 1;
    p.dtype = spec_.dtype;
    p.multiprocessors = multiprocessors_;
    p.weights = p.transposed
                    ? rows_of<const char>(weights.data, spec_.dim_k, weights.k_stride, p.heads, weights.head_stride)
                    : rows_of<const char>(weights.data, spec_.dim_n, weights.n_stride, p.heads, weights.head_stride);
    // Tiles and rows of a launch are counted in 32 bits.
    const std::int64_t row_tiles = kMaxTiles / (p.heads * column_tiles(p));
    const std::int64_t max_rows = std::clamp(row_tiles * kMinGemmTileM, std::int64_t{kMinGemmTileM}, kMaxRows);
    for (std::int64_t begin = 0; begin < task.rows.tokens; begin += max_rows) {
      const std::int64_t count = std::min(max_rows, task.rows.tokens - begin);
      p.row_count = static_cast<std::int32_t>(count);
      p.rows = rows_of<const char>(static_cast<const void*>(task.rows.at(begin, 0)), count, task.rows.token_stride,
                                   task.rows.heads, task.rows.head_stride);
      p.out = rows_of<char>(static_cast<void*>(task.out.at(begin, 0)), count, task.out.token_stride, task.out.heads,
                            task.out.head_stride);
      launcher_.launch(p, stream);
    }
  }

 private:
  BatchedGemmSpec spec_;
  const GemmLauncher& launcher_;
  int device_;
  int multiprocessors_;
};

}  // namespace

std::vector<std::string> gemm_missing(const BatchedGemmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  const auto require = [&](std::string_view name, int dim) {
    if (dim < 8 || dim % 8 != 0) missing.push_back(fmt::format("{} {} (supported: multiples of 8)", name, dim));
  };
  require("k", spec.dim_k);
  require("n", spec.dim_n);
  return missing;
}

std::unique_ptr<BatchedGemmKernel> make_cuda_gemm(const BatchedGemmSpec& spec, const GemmLauncher& launcher,
                                                  Backend& backend) {
  return std::make_unique<CudaGemm>(spec, launcher, static_cast<const CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
