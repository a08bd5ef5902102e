// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_product.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/cuda.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_fold.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // of a launch: a tile's last row still has an int

// `count` rows of each head, `stride` elements apart.
template <class Byte, class Void>
ProductRows<Byte> rows_of(Void* data, std::int64_t count, std::int64_t stride, std::int64_t heads,
                          std::int64_t head_stride) {
  ProductRows<Byte> rows{};
  rows.data = static_cast<Byte*>(data);
  rows.stride = stride * kElementBytes;
  rows.head_stride = heads > 1 ? head_stride * kElementBytes : 0;
  rows.heads = static_cast<std::int32_t>(heads);
  rows.aligned = reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0 &&
                 (count == 1 || rows.stride % kAlignment == 0) && rows.head_stride % kAlignment == 0;
  return rows;
}

class CudaProduct final : public HeadProductKernel {
 public:
  CudaProduct(const HeadProductSpec& spec, const ProductLauncher& launcher, const CudaBackend& backend)
      : spec_(spec),
        launcher_(launcher),
        device_(backend.device()),
        multiprocessors_(multiprocessors_of(backend.device())) {}

  std::size_t scratch_bytes(std::int64_t) const override { return 0; }
  void reserve(std::int64_t) override {
    const DeviceGuard guard(device_);
    launcher_.prepare();
  }

  void multiply(const HeadProductTask& task, Stream stream, const Progress& progress) override {
    check_head_product(spec_, task);
    if (progress) progress();
    if (task.rows.tokens == 0 || task.weights.heads == 0) return;
    const DeviceGuard guard(device_);
    const HeadMatrices& weights = task.weights;
    ProductParams p{};
    p.heads = static_cast<std::int32_t>(weights.heads);
    p.inner = spec_.inner;
    p.outer = spec_.outer;
    p.across = weights.inner_stride != 1;
    p.dtype = spec_.dtype;
    p.multiprocessors = multiprocessors_;
    p.weights =
        p.across ? rows_of<const char>(weights.data, spec_.inner, weights.inner_stride, p.heads, weights.head_stride)
                 : rows_of<const char>(weights.data, spec_.outer, weights.outer_stride, p.heads, weights.head_stride);
    // Tiles and rows of a launch are counted in 32 bits.
    const std::int64_t row_tiles = kMostTiles / (p.heads * column_tiles(p));
    const std::int64_t most = std::clamp(row_tiles * kLeastProductRows, std::int64_t{kLeastProductRows}, kMostRows);
    for (std::int64_t begin = 0; begin < task.rows.tokens; begin += most) {
      const std::int64_t count = std::min(most, task.rows.tokens - begin);
      p.row_count = static_cast<std::int32_t>(count);
      p.rows = rows_of<const char>(static_cast<const void*>(task.rows.at(begin, 0)), count, task.rows.token_stride,
                                   task.rows.heads, task.rows.head_stride);
      p.out = rows_of<char>(static_cast<void*>(task.out.at(begin, 0)), count, task.out.token_stride, task.out.heads,
                            task.out.head_stride);
      launcher_.launch(p, stream);
    }
  }

 private:
  HeadProductSpec spec_;
  const ProductLauncher& launcher_;
  int device_;
  int multiprocessors_;
};

}  // namespace

std::vector<std::string> product_missing(const HeadProductSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  const auto require = [&](std::string_view name, int dim) {
    if (dim < 8 || dim % 8 != 0) missing.push_back(fmt::format("{} {} (supported: multiples of 8)", name, dim));
  };
  require("inner", spec.inner);
  require("outer", spec.outer);
  return missing;
}

std::unique_ptr<HeadProductKernel> make_cuda_product(const HeadProductSpec& spec, const ProductLauncher& launcher,
                                                     Backend& backend) {
  return std::make_unique<CudaProduct>(spec, launcher, static_cast<const CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
