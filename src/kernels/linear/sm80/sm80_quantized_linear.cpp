// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/sm80/sm80_quantized_linear.hpp"

#include "kernels/linear/cuda/quantized_linear.hpp"

namespace ringattn::sm80 {

namespace {

std::int64_t nothing_shared(const LinearSpec&, std::int64_t, int) { return 0; }

constexpr cuda::QuantizedLauncher<cuda::Int8Gemm> kInt8Mma{[](Dtype) { cuda::prepare_int8_mma(); }, nothing_shared,
                                                           nothing_shared, cuda::launch_int8_mma};
constexpr cuda::QuantizedLauncher<cuda::Int4Gemm> kInt4Mma{[](Dtype) { cuda::prepare_int4_mma(); }, nothing_shared,
                                                           nothing_shared, cuda::launch_int4_mma};

}  // namespace

std::vector<std::string> int8_linear_configs() { return {"all shapes: tile 32x64, 4 warps"}; }
std::vector<std::string> int4_linear_configs() { return {"all shapes: tile 32x64, 4 warps"}; }

std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_int8_linear(spec, kInt8Mma, backend);
}
std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_int4_linear(spec, kInt4Mma, backend);
}

}  // namespace ringattn::sm80
