// SPDX-License-Identifier: Apache-2.0
// The attention backward kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cpu/cpu_attention_backward.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<AttentionBackwardSpec> kTable[] = {
    {{"cpu_attention_backward", "cpu",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks",
      [] { return std::vector<std::string>(); }, cpu::cpu_attention_backward_speed, [] { return std::string(); },
      cpu::make_cpu_backend},
     cpu::cpu_attention_backward_missing,
     cpu::make_cpu_attention_backward},
};

}  // namespace

template <>
std::span<const KernelRow<AttentionBackwardSpec>> kernel_table<AttentionBackwardSpec>() {
  return kTable;
}

}  // namespace ringattn
