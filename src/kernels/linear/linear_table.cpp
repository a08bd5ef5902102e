// SPDX-License-Identifier: Apache-2.0
// The linear kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/linear/cpu/cpu_linear.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<LinearSpec> kTable[] = {
    {{"cpu_linear", "cpu", "fp32, bf16, fp16; int8 and int4 weights; every activation, any number of features",
      [] { return std::vector<std::string>(); }, cpu::cpu_attention_speed,  // both are chains of multiply-adds
      [] { return std::string(); }, cpu::make_cpu_backend},
     missing_in_linear,
     cpu::make_cpu_linear},
};

}  // namespace

template <>
std::span<const KernelRow<LinearSpec>> kernel_table<LinearSpec>() {
  return kTable;
}

}  // namespace ringattn
