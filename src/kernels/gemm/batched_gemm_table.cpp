// SPDX-License-Identifier: Apache-2.0
// The batched GEMM kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/gemm/cpu/cpu_gemm.hpp"
#include "kernels/gemm/cpu/cpu_gemm_amx.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/gemm/cuda/cuda_gemm.hpp"
#include "kernels/gemm/sm80/sm80_gemm.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/gemm/sm90/sm90_gemm.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

// GPU speeds were measured on an H200 with many rows that all heads share, as in expanding a block of latents. They are
// rounded down from bench/results/nvidia-h200.
constexpr BatchedGemmRow kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_gemm", "bf16, fp16; batched GEMM over heads, dims that are multiples of 8",
      [](const Backend&) { return 4.9e14; },  // 493 to 536 TFLOP/s (2026-11-23-products)
      sm90::gemm_configs},
     cuda::gemm_missing,
     sm90::make_gemm},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_gemm", "bf16, fp16; batched GEMM over heads, dims that are multiples of 8",
      [](const Backend&) { return 2.6e14; },  // 264 and 281 TFLOP/s (2026-11-22-products)
      sm80::gemm_configs},
     cuda::gemm_missing,
     sm80::make_gemm},
    {{kCudaPlatform, "sm80_gemm_ordered", "bf16, fp16; batched GEMM over heads, with the bits of cpu_gemm",
      [](const Backend&) { return 2.0e13; },  // estimated from the fp32 peak
      sm80::gemm_ordered_configs},
     cuda::gemm_missing,
     sm80::make_gemm_ordered},
#endif
    {{{"cpu", cpu::amx_gemm_unavailable, cpu::make_cpu_backend},
      "cpu_gemm_amx",
      "bf16; batched GEMM over heads by AMX tiles, dims that are multiples of 8",
      cpu::cpu_attention_speed,  // both multiply tiles
      nullptr,
      /*amx_bf16=*/true},
     cpu::cpu_gemm_amx_missing,
     cpu::make_cpu_gemm_amx},
    {{kCpuPlatform, "cpu_gemm", "fp32, bf16, fp16; batched GEMM over heads, dims that are multiples of 8",
      cpu::cpu_gemm_speed},
     cpu::cpu_gemm_missing,
     cpu::make_cpu_gemm},
};

}  // namespace

template <>
std::span<const BatchedGemmRow> kernel_table<BatchedGemmSpec>() {
  return kTable;
}

}  // namespace ringattn
