// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/config.hpp"

#include <fmt/format.h>

#include "kernels/cuda/config_table.hpp"

namespace ringattn::sm90 {

namespace {

constexpr cuda::TableDims kTable[] = {{kLatentDim, kLatentDimV}};

}  // namespace

std::vector<std::string> latent_missing(const DecodeSpec& spec) {
  const FoldSpec& fold = spec.fold;
  std::vector<std::string> missing = cuda::missing_in_table(fold, kTable);
  if (!spec.values_in_keys) missing.push_back("values of their own (supported: the first columns of the keys)");
  if (!spec.format.is_plain() && (spec.format != CacheFormat{kLatentCodes, {}} || fold.dtype != Dtype::kBf16)) {
    missing.push_back(fmt::format("{} of {} (supported: plain caches, and {} of bf16)", describe(spec.format),
                                  dtype_name(fold.dtype), describe(kLatentCodes)));
  }
  if (fold.lists.any()) missing.push_back("lists of key tiles (supported: none)");
  return missing;
}

std::vector<std::string> latent_configs(const LatentRow& row) {
  return {cuda::config_line(
      kLatentDim, kLatentDimV,
      fmt::format("tile {}x{}, groups of {} keys, 2 warpgroups, {} stages of keys, outputs of 1 to 4 CTAs", kQueryTile,
                  kLatentTile, row.group_tiles * kLatentTile, kLatentStages))};
}

}  // namespace ringattn::sm90
