// SPDX-License-Identifier: Apache-2.0
// Pages gathered on a GPU: the rows that the host copies, and not a byte after them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

#include "base/gpu.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {
namespace {

struct GatherCase {
  Dtype dtype;
  std::int64_t page_size;
  std::int64_t heads;
  std::int64_t dim;
  std::int64_t gap;  // elements after each page
  bool head_major;
  std::int64_t rows;
};

TEST(CudaGather, RowsOfPagesSideBySide) {
  if (!gpus_unavailable().empty()) GTEST_SKIP() << "needs: " << gpus_unavailable();
  cuda::CudaBackend device(0);
  cpu::CpuBackend host(1);
  for (const GatherCase& c : {GatherCase{Dtype::kBf16, 16, 2, 64, 0, false, 1000},
                              {Dtype::kBf16, 64, 3, 96, 8, true, 129},
                              {Dtype::kF16, 256, 1, 128, 2, false, 255},
                              {Dtype::kF32, 32, 2, 40, 0, true, 1},
                              {Dtype::kBf16, 16, 1, 8, 0, true, 16 * 1100 + 3},  // more pages than a launch takes
                              {Dtype::kBf16, 16, 2, 64, 0, false, 0}}) {
    const std::int64_t pages = (c.rows + c.page_size - 1) / c.page_size;
    CacheView cache{nullptr,
                    c.dtype,
                    pages + 2,
                    c.page_size,
                    c.heads,
                    c.dim,
                    c.page_size * c.heads * c.dim + c.gap,
                    c.head_major ? c.dim : c.heads * c.dim,
                    c.head_major ? c.page_size * c.dim : c.dim};
    std::mt19937 random(3);
    std::vector<std::byte> pool(static_cast<std::size_t>(cache.pages * cache.page_stride) * size_of(c.dtype));
    for (std::byte& byte : pool) byte = static_cast<std::byte>(random());
    std::vector<std::int32_t> order(static_cast<std::size_t>(cache.pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<std::size_t>(pages));

    const std::size_t row_bytes = static_cast<std::size_t>(c.heads * c.dim) * size_of(c.dtype);
    std::vector<std::byte> expected((static_cast<std::size_t>(c.rows) + 1) * row_bytes, std::byte{0xff});
    cache.data = pool.data();
    host.gather_pages(expected.data(), cache, order, c.rows, {});
    DeviceArray there(device, pool.size());
    there.write(pool);
    DeviceArray rows(device, expected.size());
    cache.data = there.data();
    device.gather_pages(rows.data(), cache, order, c.rows, device.stream());
    EXPECT_EQ(rows.read(), expected) << c.page_size << ", " << c.dim << ", " << c.rows;
  }
}

}  // namespace
}  // namespace ringattn::testing
