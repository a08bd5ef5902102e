// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/sm90/config.hpp"

#include <fmt/format.h>

#include "kernels/common/cuda/config_table.hpp"

namespace ringattn::sm90 {

namespace {

constexpr cuda::TableDims kTable[] = {{kLatentDim, kLatentDimV}};

}  // namespace

std::vector<std::string> mla_missing(const DecodeSpec& spec) {
  const AttentionSpec& attention = spec.attention;
  std::vector<std::string> missing = cuda::missing_in_table(attention, kTable);
  if (!spec.values_in_keys) missing.push_back("values of their own (supported: the first columns of the keys)");
  if (!spec.format.is_plain() &&
      (spec.format != CacheFormat{kFp8LatentFormat, {}} || attention.dtype != Dtype::kBf16)) {
    missing.push_back(fmt::format("{} of {} (supported: plain caches, and {} of bf16)", describe(spec.format),
                                  dtype_name(attention.dtype), describe(kFp8LatentFormat)));
  }
  if (attention.block_mask.any()) missing.push_back("a block-sparse mask (supported: none)");
  return missing;
}

std::vector<std::string> mla_configs(const MlaVariant& variant) {
  return {cuda::config_line(
      kLatentDim, kLatentDimV,
      fmt::format("tile {}x{}, KV splits of {} keys, 2 warpgroups, {} stages of keys, output columns of 1 to 4 CTAs",
                  kQueryTile, kMlaKeyTile, variant.tiles_per_kv_split * kMlaKeyTile, kMlaStages))};
}

}  // namespace ringattn::sm90
