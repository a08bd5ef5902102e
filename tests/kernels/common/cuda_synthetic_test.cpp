// SPDX-License-Identifier: Apache-2.0
// Synthetic input made on a GPU: the host's bits, and nothing beside them.
#include <gtest/gtest.h>

#include <cstring>

#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/synthetic.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::cuda {
namespace {

using testing::DeviceArray;

class CudaSynthetic : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpus_unavailable().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
    backend_.emplace(0);
  }

  // Fills on the device and compares with synthetic_value(), element by element; what lies between is untouched.
  void check(Dtype dtype, std::int64_t heads, std::int64_t dim, std::int64_t token_stride, std::int64_t head_stride,
             std::int64_t shift, const std::vector<PackedRun>& runs, SyntheticTensor tensor = SyntheticTensor::kV) {
    const std::int64_t rows = total_tokens(runs);
    const std::size_t size = size_of(dtype);
    DeviceArray array(*backend_, static_cast<std::size_t>(rows * token_stride + shift) * size);
    const MutableTensorView view{
        array.data() + static_cast<std::size_t>(shift) * size, dtype, rows, heads, dim, token_stride, head_stride};
    backend_->fill_synthetic(77, tensor, runs, view, backend_->stream());
    std::vector<std::byte> expected(static_cast<std::size_t>(rows * token_stride + shift) * size, std::byte{0xff});
    std::int64_t row = 0;
    for (const PackedRun& run : runs) {
      for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
        for (std::int64_t head = 0; head < heads; ++head) {
          for (std::int64_t d = 0; d < dim; ++d) {
            const std::int64_t at = shift + row * token_stride + head * head_stride + d;
            store_element(expected.data() + static_cast<std::size_t>(at) * size, dtype,
                          synthetic_value(77, tensor, token, head, d) * synthetic_scale(tensor, dim));
          }
        }
      }
    }
    EXPECT_TRUE(array.read() == expected) << dtype_name(dtype) << ", dim " << dim << ", shift " << shift;
  }

  std::optional<CudaBackend> backend_;
};

TEST_F(CudaSynthetic, MakesTheHostsBits) {
  const std::vector<PackedRun> few = {
      {3, 200}, {1'000, 1'001}, {(std::int64_t{5} << 32) + 7, (std::int64_t{5} << 32) + 90}};
  std::vector<PackedRun> many;  // more than one launch takes
  for (std::int64_t i = 0; i < 300; ++i) many.push_back({10 * i, 10 * i + i % 4});
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    check(dtype, 5, 128, 640, 128, 0, few);
    check(dtype, 5, 512, 2560, 512, 0, {{3, 9}}, SyntheticTensor::kWeightKeys);
    check(dtype, 2, 7, 31, 9, 1, few);
    check(dtype, 3, 64, 200, 66, 3, many);
    check(dtype, 1, 8, 8, 8, 0, {});
  }
}

}  // namespace
}  // namespace ringattn::cuda
