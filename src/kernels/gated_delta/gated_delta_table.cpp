// SPDX-License-Identifier: Apache-2.0
// The kernels of the gated delta rule, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gated_delta/cpu/cpu_gated_delta.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<GatedDeltaSpec> kTable[] = {
    {{"cpu_gated_delta", "cpu", "fp32, bf16, fp16; GDN and KDA; key_dim and value_dim multiples of 8 up to 256",
      [] { return std::vector<std::string>(); }, cpu::cpu_gated_delta_speed, [] { return std::string(); },
      cpu::make_cpu_backend},
     cpu::cpu_gated_delta_missing,
     cpu::make_cpu_gated_delta},
};

}  // namespace

template <>
std::span<const KernelRow<GatedDeltaSpec>> kernel_table<GatedDeltaSpec>() {
  return kTable;
}

bool rounds_delta_factors(const KernelEntry& kernel) { return kernel.backend == "cuda"; }

}  // namespace ringattn
