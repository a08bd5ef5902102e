// SPDX-License-Identifier: Apache-2.0
// The SSM kernels, in order of preference.
#include "kernels/ssm/cpu/cpu_gla.hpp"
#include "kernels/ssm/cpu/cpu_gla_amx.hpp"
#include "kernels/ssm/cpu/cpu_ssd.hpp"
#include "kernels/ssm/cpu/cpu_ssd_amx.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/ssm/sm80/sm80_gla.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/ssm/sm90/sm90_ssd.hpp"
#endif
#include "kernels/common/registry.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

namespace {

// The speed of a CPU kernel that has work for all threads.
template <HostWork (*kWork)(const SsmSpec&, const Backend&, std::int64_t)>
double speed_of_many(const Backend& backend) {
  SsmSpec any;
  any.heads = 1;
  return host_speed(kWork(any, backend, kManyTokens), nullptr);
}

// GPU speeds were measured on an H200 and rounded down. By ssm_token_flops() 131,072 tokens of 80 heads of 64 with a
// state of 128 are 3.44e11 flop. sm80_ssd takes 5.95 ms for them. An earlier version of sm90_ssd took 2.52 ms (1.36e14
// flop/s, and 1.25e14 with 16k tokens). The current version takes 2.17 ms on an H100, and has not been measured on an
// H200. 131,072 tokens of 5,120 channels with a state of 16 are 4.29e10 flop, for which sm80_selective_scan takes 9.08
// to 9.13 ms. 131,072 tokens of 64 heads of 128 with a state of 128 are 5.50e11 flop, for which sm80_gla takes 13.96
// ms. Sources: bench/results/nvidia-h200, 2026-11-24-scans-peers, 2026-11-23-scans and 2026-11-30-gla, and
// nvidia-h100-80gb-hbm3, 2026-11-27-scans-peers.
constexpr KernelRow<SsmSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_ssd", "bf16; a decay per head; head_dim 64, 128; state_dim 64, 128",
      [](const Backend&) { return 1.2e14; }},
     sm90::ssd_missing,
     sm90::make_ssd},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_ssd",
      "bf16, fp16; a decay per head; head_dim multiples of 8 up to 128, state_dim multiples of 8 up to 256",
      [](const Backend&) { return 5.7e13; }},
     sm80::ssd_missing,
     sm80::make_ssd},
    {{kCudaPlatform, "sm80_gla", "bf16; a decay per key dim; head_dim 64, 128; state_dim 64, 128",
      [](const Backend&) { return 3.9e13; }},
     sm80::gla_missing,
     sm80::make_gla},
    {{kCudaPlatform, "sm80_selective_scan",
      "fp32, bf16, fp16; a decay for each state; channels of a group multiples of 8, state_dim multiples of 8 up to "
      "256",
      [](const Backend&) { return 4.7e12; }},
     sm80::selective_scan_missing,
     sm80::make_selective_scan},
#endif
    {{{"cpu", cpu::amx_ssd_unavailable, cpu::make_cpu_backend},
      "cpu_ssd_amx",
      "bf16; a decay per head, by AMX tiles; head_dim and state_dim multiples of 32 up to 256",
      speed_of_many<cpu::cpu_ssd_amx_work>,
      nullptr,
      /*amx_bf16=*/true},
     cpu::cpu_ssd_amx_missing,
     cpu::make_cpu_ssd_amx,
     cpu::cpu_ssd_amx_work},
    {{kCpuPlatform, "cpu_ssd", "fp32, bf16, fp16; a decay per head; head_dim and state_dim multiples of 8 up to 256",
      speed_of_many<cpu::cpu_ssd_work>},
     cpu::cpu_ssd_missing,
     cpu::make_cpu_ssd,
     cpu::cpu_ssd_work},
    {{{"cpu", cpu::amx_gla_unavailable, cpu::make_cpu_backend},
      "cpu_gla_amx",
      "bf16; a decay per key dim, by AMX tiles; head_dim and state_dim multiples of 32 up to 256",
      speed_of_many<cpu::cpu_gla_amx_work>,
      nullptr,
      /*amx_bf16=*/true},
     cpu::cpu_gla_amx_missing,
     cpu::make_cpu_gla_amx,
     cpu::cpu_gla_amx_work},
    {{kCpuPlatform, "cpu_gla", "fp32, bf16, fp16; a decay per key dim; head_dim and state_dim multiples of 8 up to 256",
      speed_of_many<cpu::cpu_gla_work>},
     cpu::cpu_gla_missing,
     cpu::make_cpu_gla,
     cpu::cpu_gla_work},
    {{kCpuPlatform, "cpu_selective_scan",
      "fp32, bf16, fp16; a decay for each state; channels of a group multiples of 8, state_dim multiples of 8 up to "
      "256",
      speed_of_many<cpu::cpu_selective_scan_work>},
     cpu::cpu_selective_scan_missing,
     cpu::make_cpu_selective_scan,
     cpu::cpu_selective_scan_work},
};

}  // namespace

template <>
std::span<const KernelRow<SsmSpec>> kernel_table<SsmSpec>() {
  return kTable;
}

bool rounds_factors(const KernelEntry& ssm) {
  return ssm.name == "sm90_ssd" || ssm.name == "sm80_gla" || ssm.name == "cpu_ssd_amx" || ssm.name == "cpu_gla_amx";
}

}  // namespace ringattn
