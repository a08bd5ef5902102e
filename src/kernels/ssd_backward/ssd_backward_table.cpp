// SPDX-License-Identifier: Apache-2.0
// The SSD backward kernels, in order of preference.
#include "kernels/common/registry.hpp"
#include "kernels/ssd_backward/cpu/cpu_ssd_backward.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/ssd_backward/sm80/sm80_ssd_backward.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/ssd_backward/sm90/sm90_ssd_backward.hpp"
#endif

namespace ringattn {

namespace {

// GPU speeds were measured on an H200 and rounded down. By ssd_backward_token_flops() 131,072 tokens of 80 heads of 64
// with a state of 128 are 8.6e11 flop, for which sm90_ssd_backward takes 7.83 ms and sm80_ssd_backward 13.2 ms
// (bench/results/nvidia-h200/2026-11-29-ssd-backward-2, 2026-11-29-ssd-backward).
constexpr KernelRow<SsdBackwardSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_ssd_backward", "bf16; head_dim 64; state_dim 64, 128",
      [](const Backend&) { return 1.09e14; }},
     sm90::ssd_backward_missing,
     sm90::make_ssd_backward},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_ssd_backward", "bf16, fp16; head_dim and state_dim multiples of 8 up to 128",
      [](const Backend&) { return 6.4e13; }},
     sm80::ssd_backward_missing,
     sm80::make_ssd_backward},
#endif
    {{kCpuPlatform, "cpu_ssd_backward", "fp32, bf16, fp16; head_dim and state_dim multiples of 8 up to 256",
      cpu::cpu_ssd_backward_speed},
     cpu::cpu_ssd_backward_missing,
     cpu::make_cpu_ssd_backward,
     cpu::cpu_ssd_backward_work},
};

}  // namespace

template <>
std::span<const KernelRow<SsdBackwardSpec>> kernel_table<SsdBackwardSpec>() {
  return kTable;
}

}  // namespace ringattn
