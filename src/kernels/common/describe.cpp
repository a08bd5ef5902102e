// SPDX-License-Identifier: Apache-2.0
// Descriptions and checks of an AttentionSpec.
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "base/error.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

std::string head_configuration(const AttentionSpec& spec) {
  if (spec.kv_heads == spec.heads) return "MHA";
  if (spec.kv_heads == 1) return "MQA";
  return fmt::format("GQA {}:1", spec.heads / spec.kv_heads);
}

}  // namespace

std::string describe(const Mask& mask) {
  if (mask.is_full()) return "full";
  if (mask.is_causal()) return "causal";
  return fmt::format("window {},{}", mask.left, mask.right);
}

std::string describe(const AttentionSpec& spec) {
  std::string text = fmt::format("{}, heads {}/{} ({}), head_dim {}", dtype_name(spec.dtype), spec.heads, spec.kv_heads,
                                 head_configuration(spec), spec.head_dim);
  if (spec.head_dim_v != spec.head_dim) text += fmt::format("/{}", spec.head_dim_v);
  text += fmt::format(", {}", describe(spec.mask));
  if (spec.softcap > 0.0F) text += fmt::format(", softcap {}", spec.softcap);
  if (spec.sinks) text += ", sinks";
  if (spec.block_mask.any()) text += fmt::format(", {}", describe(spec.block_mask, spec.heads));
  if (spec.positions > 0) text += spec.positions > 1 ? ", keys at positions of each KV head" : ", keys at positions";
  return text;
}

std::string check_heads(const AttentionSpec& spec) {
  if (spec.heads < 1 || spec.kv_heads < 1) {
    fail(ErrorCode::kUsage, fmt::format("{} query heads and {} kv heads", spec.heads, spec.kv_heads),
         "both must be at least 1", {"Check ", setting("heads"), " and ", setting("kv_heads"), "."});
  }
  if (spec.heads % spec.kv_heads != 0) {
    fail(ErrorCode::kUsage, fmt::format("K has {} heads, Q has {} heads", spec.kv_heads, spec.heads),
         fmt::format("{} is not a multiple of {}", spec.heads, spec.kv_heads),
         "Each K/V head serves the same number of query heads.");
  }
  if (spec.head_dim < 1 || spec.head_dim_v < 1) {
    fail(ErrorCode::kUsage, fmt::format("head_dim {} and head_dim_v {}", spec.head_dim, spec.head_dim_v),
         "both must be at least 1", {"Check ", setting("head_dim"), " and ", setting("head_dim_v"), "."});
  }
  if (!std::isfinite(spec.softmax_scale)) {
    fail(ErrorCode::kUsage, fmt::format("softmax scale {}", spec.softmax_scale), "it must be finite",
         "1 / sqrt(head_dim) is usual.");
  }
  if (!std::isfinite(spec.softcap) || spec.softcap < 0.0F) {
    fail(ErrorCode::kUsage, fmt::format("softcap {}", spec.softcap), "it must be finite and not negative",
         "0 switches it off.");
  }
  const BlockMaskShape& block_mask = spec.block_mask;
  if (block_mask.any() && block_mask.heads != 1 && block_mask.heads != spec.kv_heads &&
      block_mask.heads != spec.heads) {
    fail(ErrorCode::kUsage, fmt::format("a block mask for {} heads", block_mask.heads),
         fmt::format("there are {} query heads and {} kv heads", spec.heads, spec.kv_heads),
         "Give mask rows for all heads together, for each KV head, or for each query head.");
  }
  if (spec.positions != 0 && spec.positions != 1 && spec.positions != spec.kv_heads) {
    fail(ErrorCode::kUsage, fmt::format("positions of keys for {} heads", spec.positions),
         fmt::format("there are {} kv heads", spec.kv_heads), "Give positions for all heads together, or for each.");
  }
  if (spec.positions != 0 && block_mask.any()) {
    fail(ErrorCode::kUsage, "keys with positions, and a block mask",
         "a block mask counts keys from the first token of a sequence, which may have been evicted",
         "Leave one of them out.");
  }
  return head_configuration(spec);
}

}  // namespace ringattn
