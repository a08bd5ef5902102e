// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/sm80/sm80_weight_gradient.hpp"

#include <algorithm>
#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"

namespace ringattn::sm80 {

namespace {

constexpr std::int64_t kAlignment = 16;

cuda::GemmOperand<const char> operand_of(const TensorView& view) {
  cuda::GemmOperand<const char> operand{};
  operand.data = static_cast<const char*>(view.data);
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  operand.stride = view.token_stride * element;
  operand.head_stride = view.heads > 1 ? view.head_stride * element : 0;
  operand.heads = static_cast<std::int32_t>(view.heads);
  operand.aligned = reinterpret_cast<std::uintptr_t>(view.data) % kAlignment == 0 && operand.stride % kAlignment == 0 &&
                    operand.head_stride % kAlignment == 0;
  return operand;
}

class Sm80WeightGradient final : public WeightGradientKernel {
 public:
  Sm80WeightGradient(const WeightGradientSpec& spec, cuda::CudaBackend& backend) : spec_(spec), backend_(backend) {
    if (backend.device() == kNoDevice) return;
    const DeviceGuard guard(backend.device());
    load_weight_gradient(spec.dtype);
  }

  void compute(const WeightGradientTask& task, Stream stream, const Progress& progress) override {
    check_weight_gradient(spec_, task);
    if (progress) progress();
    if (task.dout.heads == 0) return;
    const std::vector<TokenUnit> units = token_units(task.lengths);
    if (units.empty()) {
      const auto floats = static_cast<std::size_t>(task.dout.heads * spec_.dim_n * spec_.dim_k);
      return backend_.fill_bytes(task.dw, std::byte{0}, floats * sizeof(float), stream);
    }
    const DeviceGuard guard(backend_.device());
    WeightGradientParams p{};
    p.dout = operand_of(task.dout);
    p.rows = operand_of(task.rows);
    p.dim_n = spec_.dim_n;
    p.dim_k = spec_.dim_k;
    p.dw = task.dw;
    for (std::size_t begin = 0; begin < units.size(); begin += kUnitsPerLaunch) {
      const std::size_t count = std::min(units.size() - begin, std::size_t{kUnitsPerLaunch});
      std::copy_n(units.begin() + static_cast<std::ptrdiff_t>(begin), count, p.units);
      p.unit_count = static_cast<std::int32_t>(count);
      p.continues = begin > 0;
      launch_weight_gradient(p, spec_.dtype, stream);
    }
  }

 private:
  WeightGradientSpec spec_;
  cuda::CudaBackend& backend_;
};

}  // namespace

std::vector<std::string> weight_gradient_missing(const WeightGradientSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  for (std::string& dim : vectorized_weight_gradient_missing(spec)) missing.push_back(std::move(dim));
  return missing;
}

std::vector<std::string> weight_gradient_simt_missing(const WeightGradientSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype != Dtype::kF32) missing.push_back(std::string(dtype_name(spec.dtype)) + " (supported: fp32)");
  for (std::string& dim : vectorized_weight_gradient_missing(spec)) missing.push_back(std::move(dim));
  return missing;
}

std::unique_ptr<WeightGradientKernel> make_weight_gradient(const WeightGradientSpec& spec, Backend& backend) {
  return std::make_unique<Sm80WeightGradient>(spec, static_cast<cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm80
