// SPDX-License-Identifier: Apache-2.0
// The RoPE kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/rope/cpu/cpu_rope.hpp"
#include "kernels/rope/rope.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/rope/cuda/cuda_rope.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kEverySpec = "fp32, bf16, fp16; half-split and interleaved pairs, any even rotary_dim";

std::vector<std::string> nothing_missing(const RopeSpec&) { return {}; }

constexpr KernelRow<RopeSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    {{"cuda_rope", "cuda", kEverySpec, [] { return std::vector<std::string>(); },
      [](const Backend&) { return 3e12; },  // limited by memory: three operations for four bytes
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     nothing_missing,
     cuda::make_cuda_rope},
#endif
    {{"cpu_rope", "cpu", kEverySpec, [] { return std::vector<std::string>(); }, cpu::cpu_attention_speed,
      [] { return std::string(); }, cpu::make_cpu_backend},
     nothing_missing,
     cpu::make_cpu_rope},
};

}  // namespace

template <>
std::span<const KernelRow<RopeSpec>> kernel_table<RopeSpec>() {
  return kTable;
}

}  // namespace ringattn
