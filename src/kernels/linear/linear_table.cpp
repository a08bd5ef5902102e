// SPDX-License-Identifier: Apache-2.0
// The linear kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/linear/cpu/cpu_linear.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/linear/cuda/cuda_linear.hpp"
#include "kernels/linear/cuda/quantized_linear.hpp"
#include "kernels/linear/sm80/sm80_linear.hpp"
#include "kernels/linear/sm80/sm80_quantized_linear.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/linear/sm90/sm90_linear.hpp"
#include "kernels/linear/sm90/sm90_quantized_linear.hpp"
#endif
#include "kernels/common/registry.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

namespace {

// Parts of attention's rate, fitted to 64 and 1,024 rows of 4096 x 4096 (bench/notes/attention-portable.md#estimates).
// Without AMX tiles few rows leave vectors idle. The bytes of the weights depend on their format: the op adds them.
HostWork cpu_linear_work(const LinearSpec& spec, const Backend& backend, std::int64_t tokens) {
  const auto& cpu = static_cast<const cpu::CpuBackend&>(backend);
  const cpu::TileOps& ops = cpu.attention_ops(spec.dtype);
  const auto rows = static_cast<double>(tokens);
  const double flops = 2.0 * rows * static_cast<double>(spec.in_features) * static_cast<double>(spec.sum_columns());
  WorkPhase phase{.tiles = 4.0 * cpu.threads()};
  if (ops.q_per_float > 1) {
    phase.amx_seconds = flops / (0.85 * ops.flops_per_second);
  } else {
    phase.vector_seconds = flops / (0.66 * ops.flops_per_second * rows / (rows + 40.0));
  }
  return {cpu.threads(), flops, {phase}};
}

constexpr KernelRow<LinearSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_linear", "bf16, fp16; every activation, any number of features",
      [](const Backend&) { return 6.0e14; },  // 605 to 666 TFLOP/s with many rows (2026-11-29-linear)
      sm90::linear_configs},
     cuda::float_linear_missing,
     sm90::make_linear},
    {{kHopperPlatform, "sm90_linear_int8", "bf16, fp16; int8 weights; every activation, any number of features",
      [](const Backend&) { return 1.0e15; },  // with quantization (2026-11-29-linear-quantized)
      sm90::int8_linear_configs},
     cuda::int8_linear_missing,
     sm90::make_int8_linear},
    {{kHopperPlatform, "sm90_linear_int4", "bf16, fp16; int4 weights; every activation, any number of features",
      [](const Backend&) { return 5.0e14; },  // 521 TFLOP/s (2026-11-29-linear-quantized)
      sm90::int4_linear_configs},
     cuda::int4_linear_missing,
     sm90::make_int4_linear},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_linear", "bf16, fp16; every activation, any number of features",
      [](const Backend&) { return 2.0e14; },  // estimated from sm80_gemm
      sm80::linear_configs},
     cuda::float_linear_missing,
     sm80::make_linear},
    {{kCudaPlatform, "sm80_linear_simt", "fp32; every activation, any number of features",
      [](const Backend&) { return 4.2e13; },  // 42 TFLOP/s with many rows (2026-11-30-linear-fp32)
      sm80::simt_linear_configs},
     cuda::simt_linear_missing,
     sm80::make_simt_linear},
    {{kCudaPlatform, "sm80_linear_int8", "bf16, fp16; int8 weights; every activation, any number of features",
      [](const Backend&) { return 2.0e14; },  // estimated
      sm80::int8_linear_configs},
     cuda::int8_linear_missing,
     sm80::make_int8_linear},
    {{kCudaPlatform, "sm80_linear_int4", "bf16, fp16; int4 weights; every activation, any number of features",
      [](const Backend&) { return 1.0e14; },  // estimated
      sm80::int4_linear_configs},
     cuda::int4_linear_missing,
     sm80::make_int4_linear},
#endif
    {{kCpuPlatform, "cpu_linear", "fp32, bf16, fp16; int8 and int4 weights; every activation, any number of features",
      cpu::cpu_attention_speed,  // both are chains of multiply-adds
      nullptr, /*amx_bf16=*/true},
     missing_in_linear,
     cpu::make_cpu_linear,
     cpu_linear_work},
};

}  // namespace

template <>
std::span<const KernelRow<LinearSpec>> kernel_table<LinearSpec>() {
  return kTable;
}

}  // namespace ringattn
