// SPDX-License-Identifier: Apache-2.0
// The batched GEMM kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/gemm/cpu/cpu_gemm.hpp"
#include "kernels/gemm/cpu/cpu_gemm_amx.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/gemm/cuda/cuda_gemm.hpp"
#include "kernels/gemm/sm80/sm80_gemm.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/attention/sm90/sm90_attention.hpp"
#include "kernels/gemm/sm90/sm90_gemm.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

// GPU speeds were measured on an H200 with many rows that all heads share, as in expanding a block of latents. They are
// rounded down from bench/results/nvidia-h200.
constexpr BatchedGemmRow kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{"sm90_gemm", "cuda", "bf16, fp16; batched GEMM over heads, dims that are multiples of 8", sm90::gemm_configs,
      [](const Backend&) { return 4.9e14; },  // 493 to 536 TFLOP/s (2026-11-23-products)
      sm90::attention_unavailable, cuda::make_cuda_backend},
     cuda::gemm_missing,
     sm90::make_gemm},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{"sm80_gemm", "cuda", "bf16, fp16; batched GEMM over heads, dims that are multiples of 8", sm80::gemm_configs,
      [](const Backend&) { return 2.6e14; },  // 264 and 281 TFLOP/s (2026-11-22-products)
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     cuda::gemm_missing,
     sm80::make_gemm},
    {{"sm80_gemm_ordered", "cuda", "bf16, fp16; batched GEMM over heads, with the bits of cpu_gemm",
      sm80::gemm_ordered_configs, [](const Backend&) { return 2.0e13; },  // estimated from the fp32 peak
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     cuda::gemm_missing,
     sm80::make_gemm_ordered},
#endif
    {{"cpu_gemm_amx", "cpu", "bf16; batched GEMM over heads by AMX tiles, dims that are multiples of 8",
      [] { return std::vector<std::string>(); }, cpu::cpu_attention_speed,  // both multiply tiles
      cpu::amx_gemm_unavailable, cpu::make_cpu_backend, /*amx_bf16=*/true},
     cpu::cpu_gemm_amx_missing,
     cpu::make_cpu_gemm_amx},
    {{"cpu_gemm", "cpu", "fp32, bf16, fp16; batched GEMM over heads, dims that are multiples of 8",
      [] { return std::vector<std::string>(); }, cpu::cpu_gemm_speed, [] { return std::string(); },
      cpu::make_cpu_backend},
     cpu::cpu_gemm_missing,
     cpu::make_cpu_gemm},
};

}  // namespace

template <>
std::span<const BatchedGemmRow> kernel_table<BatchedGemmSpec>() {
  return kTable;
}

}  // namespace ringattn
