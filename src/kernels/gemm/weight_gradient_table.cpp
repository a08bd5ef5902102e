// SPDX-License-Identifier: Apache-2.0
// The kernels of gradients of matrices, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/gemm/cpu/cpu_weight_gradient.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/gemm/sm80/sm80_weight_gradient.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<WeightGradientSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    // 186 TFLOP/s on an H200: 128 heads, 128 x 512, 16,384 tokens
    {{kCudaPlatform, "sm80_weight_gradient", "bf16, fp16; dims that are multiples of 8",
      [](const Backend&) { return 1.8e14; }},
     sm80::weight_gradient_missing,
     sm80::make_weight_gradient},
    // estimated from sm80_linear_simt
    {{kCudaPlatform, "sm80_weight_gradient_simt", "fp32; dims that are multiples of 8",
      [](const Backend&) { return 4.0e13; }},
     sm80::weight_gradient_simt_missing,
     sm80::make_weight_gradient},
#endif
    // both are chains of multiply-adds
    {{kCpuPlatform, "cpu_weight_gradient", "fp32, bf16, fp16; dims that are multiples of 8", cpu::cpu_attention_speed},
     vectorized_weight_gradient_missing,
     cpu::make_cpu_weight_gradient},
};

}  // namespace

template <>
std::span<const KernelRow<WeightGradientSpec>> kernel_table<WeightGradientSpec>() {
  return kTable;
}

}  // namespace ringattn
