// SPDX-License-Identifier: Apache-2.0
// The kernels of the gated delta rule, in order of preference.
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/gated_delta/sm90/sm90_gated_delta.hpp"
#endif
#include "kernels/common/registry.hpp"
#include "kernels/gated_delta/cpu/cpu_gated_delta.hpp"
#include "kernels/gated_delta/cpu/cpu_gated_delta_amx.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {

namespace {

// The speed of sm90_gated_delta without the carry was measured on an H200 and rounded down: GDN over 32,768 tokens of
// 64 value heads, 2.06e11 flop by gated_delta_token_flops(), takes 1.51 ms, and longer tasks up to a fifth more, as
// most of their factors are computed twice (bench/notes/gated_delta.md). KDA takes about three times as long.
constexpr KernelRow<GatedDeltaSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_gated_delta", "bf16; GDN and KDA; key_dim and value_dim 128",
      [](const Backend&) { return 1.2e14; }},
     sm90::gated_delta_missing,
     sm90::make_gated_delta},
#endif
    {{{"cpu", cpu::amx_gated_delta_unavailable, cpu::make_cpu_backend},
      "cpu_gated_delta_amx",
      "bf16; GDN and KDA, by AMX tiles; key_dim and value_dim multiples of 32 up to 256",
      cpu::cpu_gated_delta_amx_speed,
      nullptr,
      /*amx_bf16=*/true},
     cpu::cpu_gated_delta_amx_missing,
     cpu::make_cpu_gated_delta_amx,
     cpu::cpu_gated_delta_amx_work},
    {{kCpuPlatform, "cpu_gated_delta", "fp32, bf16, fp16; GDN and KDA; key_dim and value_dim multiples of 8 up to 256",
      cpu::cpu_gated_delta_speed},
     cpu::cpu_gated_delta_missing,
     cpu::make_cpu_gated_delta,
     cpu::cpu_gated_delta_work},
};

}  // namespace

template <>
std::span<const KernelRow<GatedDeltaSpec>> kernel_table<GatedDeltaSpec>() {
  return kTable;
}

bool rounds_delta_factors(const KernelEntry& kernel) {
  return kernel.backend == "cuda" || kernel.name == "cpu_gated_delta_amx";
}

}  // namespace ringattn
