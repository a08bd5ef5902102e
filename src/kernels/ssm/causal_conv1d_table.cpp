// SPDX-License-Identifier: Apache-2.0
// The conv1d kernels, in order of preference.
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/cpu/cpu_conv1d.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/ssm/sm80/sm80_conv1d.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<CausalConv1dSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    // on an H200, limited by memory bandwidth: four terms per four bytes
    {{kCudaPlatform, "sm80_conv1d", "fp32, bf16, fp16; channels that are multiples of 8, width 2 to 4",
      [](const Backend&) { return 7e12; }},
     vectorized_conv1d_missing,
     sm80::make_conv1d},
#endif
    {{kCpuPlatform, "cpu_conv1d", "fp32, bf16, fp16; channels that are multiples of 8, width 2 to 4",
      cpu::cpu_conv1d_speed},
     vectorized_conv1d_missing,
     cpu::make_cpu_conv1d,
     cpu::cpu_conv1d_work},
};

}  // namespace

template <>
std::span<const KernelRow<CausalConv1dSpec>> kernel_table<CausalConv1dSpec>() {
  return kTable;
}

}  // namespace ringattn
