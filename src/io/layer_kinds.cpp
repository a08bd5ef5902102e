// SPDX-License-Identifier: Apache-2.0
#include "io/layer_kinds.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ringattn {

namespace {

std::string named(std::string_view kind) { return std::string(kind); }
std::string sliding_if(bool sliding) { return named(sliding ? kSlidingAttention : kFullAttention); }

// True if the layer's entry in a list of integers is not 0. For 0 a rule returns its other kind.
bool nonzero_at(const ModelKeys& keys, std::string_view key, std::int64_t layer) {
  return keys.integer_at(key, *keys.list(key), layer) != 0;
}

}  // namespace

bool has_window(const ModelKeys& keys, std::string_view key) {
  if (!keys.flag("use_sliding_window", true)) return false;
  return keys.has(key);
}

std::string full_layers(const ModelKeys&, std::int64_t) { return named(kFullAttention); }

std::string windowed_layers(const ModelKeys& keys, std::int64_t) { return sliding_if(has_window(keys)); }

std::string periodic_layers(const ModelKeys& keys, std::int64_t layer, std::int64_t period, bool keyed) {
  if (!has_window(keys)) return named(kFullAttention);
  if (!keyed) return sliding_if((layer + 1) % period != 0);
  const std::string_view key = keys.first_name("sliding_window_pattern _sliding_window_pattern");
  if (const std::string_view pattern = keys.text(key); !pattern.empty()) {  // EXAONE 4: "LLLG"
    const char letter = pattern[static_cast<std::size_t>(layer) % pattern.size()];
    if (letter != 'L' && letter != 'G') keys.refuse(key, "it has other letters than L and G");
    return sliding_if(letter == 'L');
  }
  return sliding_if((layer + 1) % keys.count(key).value_or(period) != 0);
}

std::string every_fourth_full_from_first(const ModelKeys& keys, std::int64_t layer) {
  return sliding_if(has_window(keys) && layer % 4 != 0);
}

std::string mimo_layers(const ModelKeys& keys, std::int64_t layer) {
  if (keys.has("hybrid_layer_pattern")) return sliding_if(nonzero_at(keys, "hybrid_layer_pattern", layer));
  return sliding_if(layer != 0 && (layer + 1) % 6 != 0);
}

std::string modernbert_layers(const ModelKeys& keys, std::int64_t layer) {
  return sliding_if(layer % keys.count("global_attn_every_n_layers").value_or(3) != 0);
}

std::string last_layers_windowed(const ModelKeys& keys, std::int64_t layer) {
  if (!has_window(keys)) return named(kFullAttention);
  const double first = keys.number("max_window_layers").value_or(0.0);
  return sliding_if(static_cast<double>(layer) >= first);
}

std::string qwen2_moe_layers(const ModelKeys& keys, std::int64_t layer) {
  const double end = keys.number("max_window_layers").value_or(0.0);
  return sliding_if(has_window(keys) && layer % 2 == 0 && static_cast<double>(layer) < end);
}

std::string smollm3_layers(const ModelKeys& keys, std::int64_t layer) {
  if (!has_window(keys)) return named(kFullAttention);
  if (keys.has("no_rope_layers")) return sliding_if(!nonzero_at(keys, "no_rope_layers", layer));
  return sliding_if((layer + 1) % keys.count("no_rope_layer_interval").value_or(4) == 0);
}

std::string unlisted_layers(const ModelKeys& keys, std::int64_t layer) {
  if (keys.has("sliding_window_pattern") || keys.has("_sliding_window_pattern")) {
    return periodic_layers(keys, layer, 1, true);
  }
  return keys.flag("use_sliding_window") ? last_layers_windowed(keys, layer) : windowed_layers(keys, layer);
}

std::string interval_layers(const ModelKeys& keys, std::int64_t layer) {
  const std::int64_t interval = keys.count("full_attention_interval").value_or(4);
  return named((layer + 1) % interval != 0 ? kLinearAttentionLayer : kFullAttention);
}

std::string olmo_hybrid_layers(const ModelKeys&, std::int64_t layer) {
  return named(layer % 4 == 3 ? kFullAttention : kLinearAttentionLayer);
}

std::string llama4_layers(const ModelKeys& keys, std::int64_t layer) {
  // Some files have an empty list; the interval is used instead.
  const JsonNode* const listed = keys.list("no_rope_layers");
  const bool rotary = listed != nullptr && !listed->list.empty()
                          ? nonzero_at(keys, "no_rope_layers", layer)
                          : (layer + 1) % keys.count("no_rope_layer_interval").value_or(4) != 0;
  return named(rotary && keys.has("attention_chunk_size") ? kChunkedAttention : kFullAttention);
}

std::string mllama_layers(const ModelKeys& keys, std::int64_t layer) {
  const bool crosses = keys.has("cross_attention_layers") ? keys.list_holds("cross_attention_layers", layer)
                                                          : layer % 5 == 3 && layer < 40;
  return named(crosses ? kCrossAttention : kFullAttention);
}

std::string lfm2_layers(const ModelKeys& keys, std::int64_t layer) {
  const bool full = !keys.has("full_attn_idxs") || keys.list_holds("full_attn_idxs", layer);
  return full ? named(kFullAttention) : "conv";
}

std::string minimax_m2_layers(const ModelKeys& keys, std::int64_t layer) {
  const bool full = !keys.has("attn_type_list") || nonzero_at(keys, "attn_type_list", layer);
  return named(full ? kFullAttention : kLinearAttentionLayer);
}

std::string minimax_layers(const ModelKeys& keys, std::int64_t layer) {
  const bool full = keys.has("attn_type_list") ? nonzero_at(keys, "attn_type_list", layer) : layer % 2 == 0;
  if (!full) return named(kLinearAttentionLayer);
  return windowed_layers(keys, layer);
}

// The last layer of each group is full, and so are all layers of an incomplete group.
std::string bailing_layers(const ModelKeys& keys, std::int64_t layer) {
  const auto group = keys.count("layer_group_size");
  if (!group) return named(kFullAttention);
  const std::int64_t whole = keys.needed("num_hidden_layers") / *group * *group;
  return named((layer + 1) % *group == 0 || layer >= whole ? kFullAttention : kLinearAttentionLayer);
}

std::string retnet_layers(const ModelKeys&, std::int64_t) { return named(kLinearAttentionLayer); }

std::string kimi_linear_layers(const ModelKeys& keys, std::int64_t layer) {
  constexpr std::string_view kFull = "linear_attn_config.full_attn_layers";
  constexpr std::string_view kKda = "linear_attn_config.kda_layers";
  if (!keys.has(kFull) || !keys.has(kKda)) {
    return named(layer > 0 && layer % 4 == 0 ? kFullAttention : kLinearAttentionLayer);
  }
  if (keys.list_holds(kFull, layer + 1)) return named(kFullAttention);  // these lists count from 1
  if (keys.list_holds(kKda, layer + 1)) return named(kLinearAttentionLayer);
  keys.refuse("linear_attn_config",
              fmt::format("layer {}, which it counts as {}, is in neither list", layer, layer + 1));
}

std::string phi3small_layers(const ModelKeys& keys, std::int64_t layer) {
  const auto period = keys.count("dense_attention_every_n_layers");
  return named(period && (layer + 1) % *period == 0 ? kFullAttention : kBlockSparse);
}

// attention_types is a list of [kinds, times]: [[["global", "local"], 12]].
std::string gpt_neo_layers(const ModelKeys& keys, std::int64_t layer) {
  constexpr std::string_view kKey = "attention_types";
  const JsonNode* const runs = keys.list(kKey);
  if (runs == nullptr) return sliding_if(layer % 2 == 1);
  std::int64_t first = 0;
  for (const JsonNode& run : runs->list) {
    if (!run.is_list() || run.list.size() != 2 || !run.list[0].is_list() || run.list[0].list.empty()) {
      keys.refuse(kKey, "its entries are not pairs of a list of kinds and a number");
    }
    const JsonNode& kinds = run.list[0];
    const auto length = static_cast<std::int64_t>(kinds.list.size());
    const std::int64_t layers = length * keys.count_at(kKey, run, 1);
    if (layer < first + layers) return keys.text_at(kKey, kinds, (layer - first) % length);
    first += layers;
  }
  keys.refuse(kKey, fmt::format("it has {} layers, and none {}", first, layer));
}

std::string recurrent_gemma_layers(const ModelKeys& keys, std::int64_t layer) {
  const JsonNode* const types = keys.list("block_types");
  std::string kind = layer % 3 == 2 ? "attention" : "recurrent";
  if (types != nullptr && !types->list.empty()) {
    kind = keys.text_at("block_types", *types, layer % static_cast<std::int64_t>(types->list.size()));
  }
  return kind == "attention" ? named(kSlidingAttention) : kind;
}

std::string nas_layers(const ModelKeys& keys, std::int64_t layer) {
  constexpr std::string_view kKey = "block_configs";
  const JsonNode* const blocks = keys.list(kKey);
  if (blocks == nullptr) return named(kFullAttention);
  if (static_cast<std::size_t>(layer) >= blocks->list.size()) {
    keys.refuse(kKey, fmt::format("it has {} entries, and none for layer {}", blocks->list.size(), layer));
  }
  const JsonNode* const attention = blocks->list[static_cast<std::size_t>(layer)].member("attention");
  if (attention == nullptr || !attention->is_object())
    keys.refuse(kKey, fmt::format("entry {} has no attention", layer));
  const auto says = [&](std::string_view key) {
    const JsonNode* const value = attention->member(key);
    return value != nullptr && !value->is_null() && value->kind != JsonNode::Kind::kFalse;
  };
  if (says("no_op")) return "no_op";
  for (const std::string_view key : {"replace_with_linear", "sparsify", "num_sink_tokens", "window_length"}) {
    if (says(key)) return named(key);
  }
  return named(kFullAttention);
}

std::string mamba_layers(const ModelKeys&, std::int64_t) { return named(kMambaLayer); }
std::string hybrid_layers(const ModelKeys&, std::int64_t) { return named(kHybridLayer); }

std::string jamba_layers(const ModelKeys& keys, std::int64_t layer) {
  const std::int64_t period = keys.count("attn_layer_period").value_or(8);
  const double offset = keys.number("attn_layer_offset").value_or(4.0);
  return named(static_cast<double>(layer % period) == offset ? kFullAttention : kMambaLayer);
}

std::string bamba_layers(const ModelKeys& keys, std::int64_t layer) {
  return named(keys.list_holds("attn_layer_indices", layer) ? kFullAttention : kMambaLayer);
}

std::string nemotron_h_layers(const ModelKeys& keys, std::int64_t layer) {
  constexpr std::string_view kKey = "hybrid_override_pattern";
  const std::string_view pattern = keys.text(kKey);
  if (static_cast<std::size_t>(layer) >= pattern.size()) {
    keys.refuse(kKey, fmt::format("it has {} layers, and none {}", pattern.size(), layer));
  }
  const char letter = pattern[static_cast<std::size_t>(layer)];
  if (letter == 'M') return named(kMambaLayer);
  if (letter == '*') return named(kFullAttention);
  return std::string(1, letter);
}

// The default list of the class, for files without layers_block_type.
std::string zamba2_layers(const ModelKeys& keys, std::int64_t layer) {
  if (keys.has("hybrid_layer_ids")) {
    return named(keys.list_holds("hybrid_layer_ids", layer) ? kHybridLayer : kMambaLayer);
  }
  const bool hybrid = (layer <= 42 && layer > 0 && layer % 6 == 0) || layer == 47 || layer == 51;
  return named(hybrid ? kHybridLayer : kMambaLayer);
}

LayerList layer_types_of(const ModelKeys& keys) {
  for (const std::string_view key : {"layer_types", "layers_block_type"}) {
    const JsonNode* const list = keys.list(key);
    if (list != nullptr && !list->list.empty()) return {key, list};
  }
  return {};
}

std::optional<std::int64_t> layer_count(const ModelKeys& keys, std::string_view count_keys) {
  const std::string_view key = keys.first_name(count_keys);
  std::optional<std::int64_t> layers = keys.count(key);
  if (layers && *layers > kMaxModelLayers) {
    keys.refuse(key, fmt::format("it is {}, more than {} layers", *layers, kMaxModelLayers));
  }
  // A list may be longer than needed: some have entries for layers that predict later tokens.
  const auto shorten = [&](std::string_view list, std::size_t length) {
    const auto entries = static_cast<std::int64_t>(length);
    if (const std::int64_t needed = layers.value_or(1); entries < needed) {
      keys.refuse(list, fmt::format("it has an entry for {} of {} layers", entries, needed));
    }
    layers = std::min(layers.value_or(entries), entries);
  };
  if (const LayerList types = layer_types_of(keys); types.list != nullptr) {
    shorten(types.key, types.list->list.size());
  } else if (const std::string_view pattern = keys.text("hybrid_override_pattern"); !pattern.empty()) {
    if (pattern.size() > static_cast<std::size_t>(kMaxModelLayers)) {
      keys.refuse("hybrid_override_pattern", fmt::format("it has more than {} layers", kMaxModelLayers));
    }
    layers = static_cast<std::int64_t>(pattern.size());
  } else {
    for (const std::string_view list : {"attn_type_list", "block_configs", "num_key_value_heads_per_layer"}) {
      if (const JsonNode* const entries = keys.list(list)) shorten(list, entries->list.size());
    }
  }
  return layers;
}

}  // namespace ringattn
