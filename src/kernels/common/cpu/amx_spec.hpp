// SPDX-License-Identifier: Apache-2.0
// What kernels whose products are AMX tiles of bf16 require of a spec.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"

namespace ringattn::cpu {

struct NamedDim {
  std::string_view name;
  int dim;
};

// Appends to `missing` what a kernel lacks for the dtype and the dims (KernelRow::missing).
inline void require_amx_tiles(std::vector<std::string>& missing, Dtype dtype, std::initializer_list<NamedDim> dims) {
  if (dtype != Dtype::kBf16) missing.push_back(fmt::format("{} (supported: bf16)", dtype_name(dtype)));
  for (const auto& [name, dim] : dims) {
    if (dim % 32 != 0) missing.push_back(fmt::format("{} {} (supported: multiples of 32)", name, dim));
  }
}

}  // namespace ringattn::cpu
