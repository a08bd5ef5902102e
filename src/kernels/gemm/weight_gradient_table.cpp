// SPDX-License-Identifier: Apache-2.0
// The kernels of gradients of matrices, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/gemm/cpu/cpu_weight_gradient.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/gemm/sm80/sm80_weight_gradient.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<WeightGradientSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    {{"sm80_weight_gradient", "cuda", "bf16, fp16; dims that are multiples of 8",
      [] { return std::vector<std::string>(); },
      [](const Backend&) { return 1.8e14; },  // 186 TFLOP/s on an H200: 128 heads, 128 x 512, 16,384 tokens
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     sm80::weight_gradient_missing,
     sm80::make_weight_gradient},
    {{"sm80_weight_gradient_simt", "cuda", "fp32; dims that are multiples of 8",
      [] { return std::vector<std::string>(); },
      [](const Backend&) { return 4.0e13; },  // estimated from sm80_linear_simt
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     sm80::weight_gradient_simt_missing,
     sm80::make_weight_gradient},
#endif
    {{"cpu_weight_gradient", "cpu", "fp32, bf16, fp16; dims that are multiples of 8",
      [] { return std::vector<std::string>(); }, cpu::cpu_attention_speed,  // both are chains of multiply-adds
      [] { return std::string(); }, cpu::make_cpu_backend},
     vectorized_weight_gradient_missing,
     cpu::make_cpu_weight_gradient},
};

}  // namespace

template <>
std::span<const KernelRow<WeightGradientSpec>> kernel_table<WeightGradientSpec>() {
  return kTable;
}

}  // namespace ringattn
