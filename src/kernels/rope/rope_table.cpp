// SPDX-License-Identifier: Apache-2.0
// The RoPE kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/rope/cpu/cpu_rope.hpp"
#include "kernels/rope/rope.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/rope/cuda/cuda_rope.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kEverySpec = "fp32, bf16, fp16; half-split and interleaved pairs, any even rotary_dim";

std::vector<std::string> nothing_missing(const RopeSpec&) { return {}; }

constexpr KernelRow<RopeSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    // limited by memory: three operations for four bytes
    {{kCudaPlatform, "cuda_rope", kEverySpec, [](const Backend&) { return 3e12; }},
     nothing_missing,
     cuda::make_cuda_rope},
#endif
    {{kCpuPlatform, "cpu_rope", kEverySpec, cpu::cpu_attention_speed}, nothing_missing, cpu::make_cpu_rope},
};

}  // namespace

template <>
std::span<const KernelRow<RopeSpec>> kernel_table<RopeSpec>() {
  return kTable;
}

}  // namespace ringattn
