// SPDX-License-Identifier: Apache-2.0
// The scan's kernels, in order of preference.
#include "kernels/cpu/cpu_fold.hpp"
#include "kernels/cpu/cpu_scan.hpp"
#include "kernels/registry.hpp"
#include "kernels/scan.hpp"

namespace ringattn {

namespace {

std::vector<std::string> one_for_all() { return {}; }

constexpr KernelRow<ScanSpec> kTable[] = {
    {{"cpu_scan", "cpu", "fp32, bf16, fp16; a decay a head; head_dim and state_dim multiples of 8 up to 256",
      one_for_all, cpu::cpu_scan_speed, [] { return std::string(); }, cpu::make_cpu_backend},
     cpu::cpu_scan_missing,
     cpu::make_cpu_scan},
    {{"cpu_selective", "cpu",
      "fp32, bf16, fp16; a decay for each state; channels of a group multiples of 8, state_dim multiples of 8 up to "
      "256",
      one_for_all, cpu::cpu_selective_scan_speed, [] { return std::string(); }, cpu::make_cpu_backend},
     cpu::cpu_selective_scan_missing,
     cpu::make_cpu_selective_scan},
};

}  // namespace

template <>
std::span<const KernelRow<ScanSpec>> kernel_table<ScanSpec>() {
  return kTable;
}

}  // namespace ringattn
