// SPDX-License-Identifier: Apache-2.0
// The kernels of products of heads with their matrices, in order of preference.
#include "kernels/cpu/cpu_fold.hpp"
#include "kernels/cpu/cpu_product.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

constexpr HeadProductRow kTable[] = {
    {{"cpu_product", "cpu", "fp32, bf16, fp16; products of heads with their matrices, dims that are multiples of 8",
      [] { return std::vector<std::string>(); }, cpu::cpu_fold_speed,  // both are the same chains of multiply-adds
      [] { return std::string(); }, cpu::make_cpu_backend},
     cpu::cpu_product_missing,
     cpu::make_cpu_product},
};

}  // namespace

template <>
std::span<const HeadProductRow> kernel_table<HeadProductSpec>() {
  return kTable;
}

}  // namespace ringattn
