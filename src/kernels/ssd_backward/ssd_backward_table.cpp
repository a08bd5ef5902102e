// SPDX-License-Identifier: Apache-2.0
// The SSD backward kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssd_backward/cpu/cpu_ssd_backward.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<SsdBackwardSpec> kTable[] = {
    {{"cpu_ssd_backward", "cpu", "fp32, bf16, fp16; head_dim and state_dim multiples of 8 up to 256",
      [] { return std::vector<std::string>(); }, cpu::cpu_ssd_backward_speed, [] { return std::string(); },
      cpu::make_cpu_backend},
     cpu::cpu_ssd_backward_missing,
     cpu::make_cpu_ssd_backward},
};

}  // namespace

template <>
std::span<const KernelRow<SsdBackwardSpec>> kernel_table<SsdBackwardSpec>() {
  return kTable;
}

}  // namespace ringattn
