// SPDX-License-Identifier: Apache-2.0
// Shared code for tables of compiled configurations. A table has one entry per pair of head dims for both bf16 and
// fp16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace ringattn::cuda {

// Returns the entry for these head dims at compile time. A missing entry is a compile error.
template <class Config, std::size_t kSize>
consteval Config config_of_dims(const Config (&table)[kSize], int head_dim, int head_dim_v) {
  for (const Config& config : table) {
    if (config.head_dim == head_dim && config.head_dim_v == head_dim_v) return config;
  }
  throw "the table has no such configuration";
}

// Returns the entry for the spec's head dims, or nullopt if the kernel doesn't support the spec.
template <class Config>
std::optional<Config> find_config(std::span<const Config> table, const AttentionSpec& spec) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const Config& config) {
    return config.head_dim == spec.head_dim && config.head_dim_v == spec.head_dim_v;
  });
  if (spec.dtype == Dtype::kF32 || found == table.end()) return std::nullopt;
  return *found;
}

struct TableDims {
  int head_dim, head_dim_v;
};
// Returns what a kernel with a table of these head dims lacks for the spec (KernelRow::missing).
std::vector<std::string> missing_in_table(const AttentionSpec& spec, std::span<const TableDims> table);

// "head_dim 192/128: " followed by the description.
std::string config_line(int head_dim, int head_dim_v, const std::string& description);

template <class Config>
std::vector<std::string> missing_in_table(std::span<const Config> table, AttentionSpec spec) {
  std::vector<TableDims> dims;
  for (const Config& config : table) dims.push_back({config.head_dim, config.head_dim_v});
  return missing_in_table(spec, std::span<const TableDims>(dims));
}

// Text for KernelRow::configs.
template <class Config>
std::vector<std::string> config_lines(std::span<const Config> table) {
  std::vector<std::string> lines;
  for (const Config& config : table) {
    lines.push_back(config_line(config.head_dim, config.head_dim_v, describe(config)));
  }
  return lines;
}

}  // namespace ringattn::cuda
