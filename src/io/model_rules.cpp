// SPDX-License-Identifier: Apache-2.0
#include "io/model_rules.hpp"

#include <fmt/format.h>

#include <cmath>

namespace ringattn {

namespace {

double positive(const ModelKeys& keys, std::string_view key, double value) {
  if (!(value > 0.0)) keys.refuse(key, fmt::format("it is {}", value));
  return value;
}

}  // namespace

std::int64_t plain_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  return keys.count("num_key_value_heads").value_or(heads);
}

double head_dim_scale(const ModelKeys&, std::int64_t head_dim, std::int64_t) {
  return 1.0 / std::sqrt(static_cast<double>(head_dim));
}

// K/V heads

std::int64_t kv_groups(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  return keys.first_of("num_attention_groups num_key_value_heads").value_or(heads);
}

std::int64_t falcon_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  if (!keys.flag("new_decoder_architecture") && keys.flag("multi_query", true)) return 1;
  return keys.count("num_kv_heads").value_or(heads);
}

std::int64_t bigcode_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  return keys.flag("multi_query", true) ? 1 : heads;
}

std::int64_t chatglm_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  return keys.flag("multi_query_attention") ? keys.needed("multi_query_group_num") : heads;
}

std::int64_t dbrx_kv_heads(const ModelKeys& keys, std::int64_t, std::int64_t) {
  return keys.count("attn_config.kv_n_heads").value_or(1);
}

std::int64_t mpt_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t) {
  return keys.text("attn_config.attn_type") == "multiquery_attention" ? 1 : heads;
}

std::int64_t all_heads(const ModelKeys&, std::int64_t heads, std::int64_t) { return heads; }

// The layer's entry in a list, or the number of query heads that share a K/V head in block_configs.
std::int64_t nas_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer) {
  constexpr std::string_view kList = "num_key_value_heads_per_layer";
  if (const JsonNode* const list = keys.list(kList)) return keys.count_at(kList, *list, layer);
  const JsonNode* const blocks = keys.list("block_configs");
  if (blocks == nullptr) return plain_kv_heads(keys, heads, layer);
  const JsonNode* group = nullptr;
  if (static_cast<std::size_t>(layer) < blocks->list.size()) {
    group = blocks->list[static_cast<std::size_t>(layer)].at("attention.n_heads_in_group");
  }
  const double share = group != nullptr && group->is_number() ? group->number : 0.0;
  if (!(share >= 1.0) || std::fmod(static_cast<double>(heads), share) != 0.0) {
    keys.refuse("block_configs",
                fmt::format("n_heads_in_group of layer {} is not a number that divides {} heads", layer, heads));
  }
  return static_cast<std::int64_t>(static_cast<double>(heads) / share);
}

// Scales

double unit_scale(const ModelKeys&, std::int64_t, std::int64_t) { return 1.0; }

double query_scalar_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  const auto scalar = keys.number("query_pre_attn_scalar");
  if (!scalar) return head_dim_scale(keys, head_dim, layer);
  return 1.0 / std::sqrt(positive(keys, "query_pre_attn_scalar", *scalar));
}

double multiplier_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  const auto multiplier = keys.number("attention_multiplier");
  return multiplier ? positive(keys, "attention_multiplier", *multiplier) : head_dim_scale(keys, head_dim, layer);
}

// For a file without model_type, by the keys that it has.
double unlisted_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  return keys.has("attention_multiplier") ? multiplier_scale(keys, head_dim, layer)
                                          : query_scalar_scale(keys, head_dim, layer);
}

// YaRN multiplies queries and keys by mscale. The rotary embedding omits that factor, and the scale includes it.
double yarn_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  const double plain = head_dim_scale(keys, head_dim, layer);
  for (const std::string_view scaling : {"rope_scaling", "rope_parameters"}) {
    const JsonNode* const found = keys.find(scaling);
    if (found != nullptr && !found->is_object()) keys.refuse(scaling, "it isn't an object");
    const auto path = [&](std::string_view key) { return fmt::format("{}.{}", scaling, key); };
    const std::string_view type = keys.text(keys.has(path("rope_type")) ? path("rope_type") : path("type"));
    const double all_dims = keys.number(path("mscale_all_dim")).value_or(0.0);
    const double factor = keys.number(path("factor")).value_or(1.0);
    if (all_dims == 0.0 || factor <= 1.0 || type == "default") continue;
    const double mscale = 0.1 * all_dims * std::log(factor) + 1.0;
    return plain * mscale * mscale;
  }
  return plain;
}

double phi3small_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  if (!keys.flag("mup_use_scaling", true)) return head_dim_scale(keys, head_dim, layer);
  const double multiplier = keys.number("mup_attn_multiplier").value_or(1.0);
  return positive(keys, "mup_attn_multiplier", multiplier) / static_cast<double>(head_dim);
}

double half_head_scale(const ModelKeys&, std::int64_t head_dim, std::int64_t) {
  return 1.0 / std::sqrt(static_cast<double>(head_dim) / 2.0);
}

double gpt2_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  const double scale = keys.flag("scale_attn_weights", true) ? head_dim_scale(keys, head_dim, layer) : 1.0;
  return keys.flag("scale_attn_by_inverse_layer_idx") ? scale / static_cast<double>(layer + 1) : scale;
}

double mpt_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer) {
  const auto scale = keys.number("attn_config.softmax_scale");
  return scale ? positive(keys, "attn_config.softmax_scale", *scale) : head_dim_scale(keys, head_dim, layer);
}

}  // namespace ringattn
