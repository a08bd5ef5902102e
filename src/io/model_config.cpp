// SPDX-License-Identifier: Apache-2.0
#include "io/model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.hpp"
#include "base/text_file.hpp"
#include "io/layer_kinds.hpp"
#include "io/model_families.hpp"
#include "io/model_keys.hpp"

namespace ringattn {

namespace {

constexpr JsonLimits kLimits{16, std::size_t{1} << 16, std::size_t{1} << 16};
// Number of layers to compare if the file does not give it. No rule has a longer period.
constexpr std::int64_t kUnsaidLayers = 128;

TextSource config_source(std::string name) {
  return {std::move(name), "model config", "Give the config.json in the folder of the model's weights."};
}

// Kinds of layers that can't be computed.
struct OtherKind {
  std::string_view kind;
  std::string_view why;
};
constexpr OtherKind kOtherAttention[] = {
    {kLinearAttentionLayer, "a state replaces its keys and values"},
    {kChunkedAttention, "a row sees only the keys of its own chunk"},
    {kCrossAttention, "its keys and values are not those of the text"},
    {kBlockSparse, "a row sees only selected blocks of keys"},
    {"indexed_attention", "a row sees keys that an indexer chooses"},
    {"compressed_sparse_attention", "a row sees compressed keys that an indexer chooses"},
    {"heavily_compressed_attention", "a row sees compressed keys"},
    {"minimax_m3_sparse", "a row sees keys that an indexer chooses"},
    {"conv", "a short convolution replaces it"},
    {"recurrent", "a gated recurrence replaces it"},
    {"replace_with_linear", "a linear layer replaces it"},
    {"sparsify", "its weights are sparse in a way that this reader does not know"},
    {"num_sink_tokens", "a row sees the first tokens besides its window"},
    {"window_length", "a row sees the first tokens besides its window"},
};

}  // namespace

// A layer's kind and what it computes: one op, both ops of a hybrid layer, or none and the reason.
struct ModelConfig::Derived {
  std::int64_t layer = 0;
  std::string kind;
  std::vector<ModelLayer> ops;
};

double ModelLayer::default_scale() const { return 1.0 / std::sqrt(static_cast<double>(head_dim + rope_dim)); }

ModelConfig ModelConfig::open(const std::string& path) { return {read_text_file(path), path}; }

ModelConfig::ModelConfig(std::string_view text, std::string name)
    : keys_(std::make_shared<ModelKeys>(parse_json_object(text, config_source(name), kLimits), name)),
      family_(&model_family(*keys_)) {
  if (!keys_->model_type().empty()) keys_->set_defaults(family_->defaults);
  check_attention_keys(*keys_, *family_);
  layers_ = layer_count(*keys_, family_->keys.layers);
}

std::string ModelConfig::kind_of(std::int64_t layer) const {
  const LayerList types = layer_types_of(*keys_);
  std::string kind =
      types.list == nullptr ? family_->kind(*keys_, layer) : keys_->text_at(types.key, *types.list, layer);
  if (kind == "attention" || kind == "global") kind = kFullAttention;
  if (kind == "local") kind = kSlidingAttention;
  if (kind == "mamba2" || (kind == kLinearAttentionLayer && family_->is(kMamba))) kind = kMambaLayer;
  if (kind == kSlidingAttention && family_->is(kLastIsFull) && layer + 1 == layers_) kind = kFullAttention;
  return kind;
}

void ModelConfig::set_window(ModelLayer& layer) const {
  const std::string_view key = keys_->first_name(family_->keys.window);
  if (!keys_->flag("use_sliding_window", true)) return;  // layer_types say sliding, but the model has no windows
  const auto window = keys_->number(key);
  if (!window) {
    fail(ErrorCode::kFile, fmt::format("{} doesn't say {}", keys_->name(), key), "a layer of it has a window",
         "Give the config.json of a model of that kind, or the value itself.");
  }
  if (*window < 1.0 || *window > 0x1p53 || *window != std::floor(*window)) {
    keys_->refuse(key, fmt::format("it is {}, not a number of tokens", *window));
  }
  const auto tokens = static_cast<std::int64_t>(*window);
  switch (family_->window) {
    case WindowRule::kCausal:
      layer.window_left = tokens - 1;
      break;
    case WindowRule::kHalfCausal:
      layer.window_left = std::max<std::int64_t>(tokens / 2, 1) - 1;
      break;
    case WindowRule::kHalfBothWays:
      layer.window_left = layer.window_right = tokens / 2;
      break;
    case WindowRule::kBothWays:
      layer.window_left = layer.window_right = tokens;
      break;
    case WindowRule::kWholeBehind:
      layer.window_left = key == "sliding_window_size" ? tokens : tokens - 1;
      break;
  }
  if (!layer.bidirectional || layer.window_right >= 0) return;
  // Gemma 3 halves the window for bidirectional layers, so that a row sees the same number of keys; its masks are
  // exclusive. For other models with a causal rule, implementations differ by one token.
  if (!family_->is(kGemmaBoth) || family_->is(kGlobalDims)) {
    keys_->refuse(key, "its layers are bidirectional, and how far a window reaches then is not agreed on");
  }
  layer.window_left = layer.window_right = tokens / 2;
}

void ModelConfig::set_mla_dims(ModelLayer& found) const {
  const ModelKeys& keys = *keys_;
  found.kind = LayerKind::kMla;
  found.kv_heads = found.heads;
  found.head_dim = static_cast<int>(keys.needed("qk_nope_head_dim"));
  found.rope_dim = static_cast<int>(keys.needed("qk_rope_head_dim"));
  found.latent_dim = static_cast<int>(keys.needed("kv_lora_rank"));
  const bool derived = !keys.has("v_head_dim") && keys.model_type() == "minicpm3";
  const std::int64_t dim_v = derived ? keys.needed(family_->keys.hidden) / found.heads : keys.needed("v_head_dim");
  if (dim_v == 0) keys.refuse(family_->keys.hidden, "it is less than the heads");
  found.head_dim_v = static_cast<int>(dim_v);
}

std::optional<std::int64_t> ModelConfig::dim_of(std::int64_t layer, bool sliding, std::string_view key) const {
  const ModelKeys& keys = *keys_;
  // transformers writes values that differ between layers under the layer's number: {"05": {"head_dim": 512}}.
  if (const JsonNode* const layers = keys.find("per_layer_config"); layers != nullptr) {
    for (const auto& [number, dims] : layers->members) {
      std::int64_t at = -1;
      std::from_chars(number.data(), number.data() + number.size(), at);
      if (at == layer && dims.member(key) != nullptr) {
        return keys.count(fmt::format("per_layer_config.{}.{}", number, key));
      }
    }
  }
  if (sliding && family_->is(kSwaDims)) {
    if (const auto dim = keys.count(fmt::format("swa_{}", key))) return dim;
    if (key == "num_key_value_heads") return 2 * keys.needed(key);
  }
  if (!sliding && family_->is(kGlobalDims)) {
    if (key == "head_dim") return keys.needed("global_head_dim");
    // attention_k_eq_v: the keys and values of global layers are one projection, with num_global_key_value_heads heads.
    if (key == "num_key_value_heads" && keys.flag("attention_k_eq_v", true)) {
      return keys.count("num_global_key_value_heads");
    }
  }
  return std::nullopt;
}

void ModelConfig::set_dims(ModelLayer& found, std::int64_t layer, bool sliding) const {
  const ModelKeys& keys = *keys_;
  const ModelKeyNames& names = family_->keys;
  const std::int64_t heads = dim_of(layer, sliding, names.heads).value_or(found.heads);
  const auto own_kv_heads = dim_of(layer, sliding, "num_key_value_heads");
  const std::int64_t kv_heads = own_kv_heads ? *own_kv_heads : family_->kv_heads(keys, heads, layer);
  if (heads % kv_heads != 0) {
    keys.refuse(names.heads, fmt::format("it is {}, and {} K/V heads don't divide it", heads, kv_heads));
  }
  auto dim = dim_of(layer, sliding, "head_dim");
  if (!dim && !names.head_dim.empty()) dim = keys.first_of(names.head_dim);
  if (!dim) {
    const std::int64_t hidden = keys.needed(names.hidden) * (family_->is(kTwiceWide) ? 2 : 1);
    if (hidden % heads != 0) {
      keys.refuse(keys.first_name(names.hidden),
                  fmt::format("it is {}, which {} heads don't divide, and there is no head_dim", hidden, heads));
    }
    dim = std::min(hidden / heads, kMaxModelCount);
  }
  found.heads = static_cast<int>(heads);
  found.kv_heads = static_cast<int>(kv_heads);
  found.head_dim = found.head_dim_v = static_cast<int>(*dim);
  if (!family_->is(kSwaDims)) return;
  const auto dim_v = dim_of(layer, sliding, "v_head_dim");
  found.head_dim_v = static_cast<int>(dim_v ? *dim_v : keys.needed("v_head_dim"));
}

ModelLayer ModelConfig::attention(std::int64_t layer, bool sliding) const {
  const ModelKeys& keys = *keys_;
  ModelLayer found;
  found.heads = static_cast<int>(keys.needed(family_->keys.heads));
  if (family_->is(kMla) && keys.has("kv_lora_rank")) {
    set_mla_dims(found);
  } else {
    set_dims(found, layer, sliding);
  }
  found.softmax_scale = family_->scale(keys, found.head_dim + found.rope_dim, layer);
  if (!(found.softmax_scale >= 1e-30 && found.softmax_scale <= 1e30)) {
    fail(ErrorCode::kFile, fmt::format("the scale of scores by {} can't be used", keys.name()),
         fmt::format("it is {}", found.softmax_scale), "Check the file, or give the value itself.");
  }
  found.softcap = keys.number("attn_logit_softcapping").value_or(0.0);
  if (!(found.softcap >= 0.0 && found.softcap <= 1e30)) {
    keys.refuse("attn_logit_softcapping", fmt::format("it is {}", found.softcap));
  }
  found.sinks = family_->is(kSinks);
  if (family_->is(kSwaDims)) {
    found.sinks = sliding ? keys.flag("add_swa_attention_sink_bias", true) : keys.flag("add_full_attention_sink_bias");
  }
  const JsonNode* const both = family_->is(kGemmaBoth) ? keys.find("use_bidirectional_attention") : nullptr;
  found.bidirectional = family_->is(kBidirectional) || (family_->is(kEncoder) && !keys.flag("is_decoder")) ||
                        !keys.flag("is_causal", true) ||
                        (both != nullptr && (both->kind == JsonNode::Kind::kTrue || both->text == "all"));
  if (sliding) set_window(found);
  if (found.kind == LayerKind::kAttention) {
    found.rope = read_rope(keys, sliding ? kSlidingAttention : kFullAttention, found.head_dim);
  } else {
    found.rope.refusal = "its layers have latents, whose rotary part is a tensor of its own";
  }
  return found;
}

ModelLayer ModelConfig::ssm() const {
  constexpr std::string_view kHeads = "mamba_n_heads mamba_num_heads n_mamba_heads";
  constexpr std::string_view kExpand = "mamba_expand expand";
  const ModelKeys& keys = *keys_;
  const bool ssm_only = !keys.has("num_attention_heads");  // Mamba and Mamba-2, whose keys have short names
  ModelLayer found;
  auto heads = keys.first_of(kHeads);
  if (!heads && ssm_only) heads = keys.count("num_heads");
  if (!heads && keys.model_type() == "mamba2") static_cast<void>(keys.needed("num_heads"));
  found.kind = heads ? LayerKind::kSsd : LayerKind::kSelectiveScan;
  const auto inner = [&] {
    if (const auto said = keys.count("mamba_d_ssm")) return *said;
    const std::int64_t expand = keys.first_of(kExpand).value_or(2);
    return keys.product(keys.first_name(kExpand), expand, "hidden_size", keys.needed("hidden_size"));
  };
  // The class of Mamba uses intermediate_size instead of expand * hidden_size if the file has it.
  const auto channels = ssm_only ? keys.count("intermediate_size") : std::nullopt;
  found.heads = static_cast<int>(heads ? *heads : channels ? *channels : inner());
  if (found.kind == LayerKind::kSsd) {
    std::optional<std::int64_t> dim;
    if (keys.text("mamba_d_head") != "auto") dim = keys.first_of("mamba_d_head mamba_head_dim");
    if (!dim && ssm_only) dim = keys.count("head_dim");
    if (!dim) {
      const std::int64_t all = inner();
      if (all % *heads != 0) {
        keys.refuse("hidden_size",
                    fmt::format("with it there are {} channels, which {} heads don't divide", all, *heads));
      }
      dim = all / *heads;
    }
    found.head_dim = static_cast<int>(*dim);
  }
  found.state_dim = static_cast<int>(keys.needed("mamba_d_state ssm_state_size state_size"));
  found.groups = static_cast<int>(keys.first_of("mamba_n_groups n_groups mamba_ngroups").value_or(1));
  if (found.heads % found.groups != 0) {
    keys.refuse(keys.first_name("mamba_n_groups n_groups mamba_ngroups"),
                fmt::format("it is {}, which does not divide {} heads", found.groups, found.heads));
  }
  constexpr std::string_view kWidth = "mamba_d_conv conv_kernel";
  found.conv_width = static_cast<int>(keys.first_of(kWidth).value_or(4));
  found.conv_channels = found.heads;
  if (found.kind == LayerKind::kSsd) {
    found.conv_channels = std::int64_t{found.heads} * found.head_dim + std::int64_t{2} * found.groups * found.state_dim;
  }
  found.dt_limit = keys.range(keys.has("mamba_dt_limit") ? "mamba_dt_limit" : "time_step_limit");
  return found;
}

namespace {

// ALiBi's slopes are powers of 2^(−8 / heads). If heads is not a power of two, they are those of the power of two
// below, followed by every other slope of the power above.
std::vector<double> alibi_slopes(std::int64_t heads) {
  const auto powers = [](double count, std::int64_t first, std::int64_t step, std::int64_t end) {
    std::vector<double> slopes;
    for (std::int64_t i = first; static_cast<std::int64_t>(slopes.size()) < end; i += step) {
      slopes.push_back(std::exp2(-8.0 / count * static_cast<double>(i)));
    }
    return slopes;
  };
  std::int64_t below = 1;
  while (2 * below <= heads) below *= 2;
  std::vector<double> slopes = powers(static_cast<double>(below), 1, 1, below);
  const std::vector<double> rest = powers(static_cast<double>(2 * below), 1, 2, heads - below);
  slopes.insert(slopes.end(), rest.begin(), rest.end());
  return slopes;
}

}  // namespace

ModelLayer ModelConfig::linear_attention(std::int64_t layer) const {
  const ModelKeys& keys = *keys_;
  const bool retnet = keys.model_type() == "retnet";
  const bool ling = keys.model_type().starts_with("bailing");
  ModelLayer found;
  found.kind = LayerKind::kLinearAttention;
  found.heads = static_cast<int>(keys.needed(family_->keys.heads));
  const std::int64_t heads = found.heads;
  auto dim = family_->keys.head_dim.empty() ? std::nullopt : keys.count(family_->keys.head_dim);
  if (!dim) {
    const std::int64_t hidden = keys.needed(family_->keys.hidden);
    if (hidden % heads != 0) {
      keys.refuse(keys.first_name(family_->keys.hidden),
                  fmt::format("it is {}, which {} heads don't divide", hidden, heads));
    }
    dim = hidden / heads;
  }
  found.head_dim = static_cast<int>(*dim);
  found.head_dim_v = found.head_dim;
  found.softmax_scale = ling || retnet ? 1.0 / std::sqrt(static_cast<double>(*dim)) : 1.0;
  found.rope.type = "none";  // q and k are not rotated
  if (retnet) {
    const auto expanded = [&](std::string_view key, double otherwise) {
      const double factor = keys.number(key).value_or(otherwise);
      const double expanded_dim = factor * static_cast<double>(*dim);
      if (!(expanded_dim >= 1.0 && expanded_dim <= 65536.0) || expanded_dim != std::floor(expanded_dim)) {
        keys.refuse(key, fmt::format("it is {}, with heads of {}", factor, *dim));
      }
      return static_cast<int>(expanded_dim);
    };
    found.head_dim = expanded("expand_k", 1.0);
    found.head_dim_v = expanded("expand_v", 2.0);
    found.softmax_scale = 1.0 / std::sqrt(static_cast<double>(found.head_dim));
    for (std::int64_t h = 0; h < heads; ++h) {
      found.log_decays.push_back(std::log1p(-std::exp2(-5.0 - static_cast<double>(h))));
    }
  } else {
    // Slopes shrink with depth. transformers' MiniMax also adds 1e-5 to the divisor. The code beside the weights of
    // Ring and Ling counts layers from −1, so the first layer decays faster than its slopes.
    const double last = static_cast<double>(layers_.value_or(1)) - 1.0 + (ling ? 0.0 : 1e-5);
    const double depth = static_cast<double>(layer) - (ling ? 1.0 : 0.0);
    const double factor = 1.0 - (last > 0.0 ? depth / last : 0.0) + 1e-5;
    for (const double slope : alibi_slopes(heads)) found.log_decays.push_back(-slope * factor);
  }
  if (retnet || (ling && keys.flag("linear_rope", true))) {
    found.rope = read_rope(keys, kLinearAttentionLayer, found.head_dim);
  }
  return found;
}

// The layers of Qwen3-Next and its successors, of Kimi Linear and of Ling 3; absent: the file has none of their keys.
std::optional<ModelLayer> ModelConfig::gated_delta() const {
  const ModelKeys& keys = *keys_;
  ModelLayer found;
  found.kind = LayerKind::kGatedDelta;
  if (keys.has("linear_num_value_heads")) {
    found.heads = static_cast<int>(keys.needed("linear_num_value_heads"));
    found.groups = static_cast<int>(keys.needed("linear_num_key_heads"));
    found.head_dim = static_cast<int>(keys.needed("linear_key_head_dim"));
    found.head_dim_v = static_cast<int>(keys.needed("linear_value_head_dim"));
    found.conv_width = static_cast<int>(keys.count("linear_conv_kernel_dim").value_or(4));
    if (found.heads % found.groups != 0) {
      keys.refuse("linear_num_key_heads",
                  fmt::format("it is {}, which does not divide {} value heads", found.groups, found.heads));
    }
  } else if (keys.find("linear_attn_config") != nullptr) {
    found.heads = found.groups = static_cast<int>(keys.needed("linear_attn_config.num_heads"));
    found.head_dim = found.head_dim_v = static_cast<int>(keys.needed("linear_attn_config.head_dim"));
    found.conv_width = static_cast<int>(keys.count("linear_attn_config.short_conv_kernel_size").value_or(4));
    found.key_decays = true;
  } else if (keys.model_type().starts_with("bailing") && (keys.has("kda_safe_gate") || keys.has("kda_lower_bound"))) {
    // Files that transformers saves have the head_dim of the latent layers, and a separate one for these layers.
    found.heads = found.groups = static_cast<int>(keys.needed("linear_num_heads num_attention_heads"));
    found.head_dim = found.head_dim_v = static_cast<int>(keys.needed("linear_head_dim head_dim"));
    found.conv_width = static_cast<int>(keys.first_of("linear_conv_kernel_dim short_conv_kernel_size").value_or(4));
    found.key_decays = true;
  } else {
    return std::nullopt;
  }
  found.conv_channels = 2 * std::int64_t{found.groups} * found.head_dim + std::int64_t{found.heads} * found.head_dim_v;
  return found;
}

std::string_view layer_kind_name(LayerKind kind) {
  constexpr std::string_view kNames[] = {"attention",        "mla",        "ssd", "selective_scan",
                                         "linear_attention", "gated_delta"};
  return kNames[static_cast<std::size_t>(kind)];
}

ModelConfig::Derived ModelConfig::derive(std::int64_t layer) const {
  Derived found{layer, kind_of(layer), {}};
  const bool hybrid = found.kind == kHybridLayer && family_->is(kMamba);
  if (found.kind == kFullAttention || hybrid) found.ops.push_back(attention(layer, false));
  if (found.kind == kSlidingAttention) found.ops.push_back(attention(layer, true));
  if (found.kind == kMambaLayer || hybrid) found.ops.push_back(ssm());
  if (found.kind == kLinearAttentionLayer) {
    if (const auto rule = gated_delta()) {
      found.ops.push_back(*rule);
    } else if (family_->is(kLightning)) {
      found.ops.push_back(linear_attention(layer));
    }
  }
  return found;
}

namespace {

// "3 mamba, 1 full_attention", in the order in which they appear.
std::string counted_kinds(const std::vector<std::string>& kinds) {
  std::vector<std::pair<std::string, int>> counts;
  for (const std::string& kind : kinds) {
    const auto found = std::ranges::find(counts, kind, &std::pair<std::string, int>::first);
    if (found == counts.end()) {
      counts.emplace_back(kind, 1);
    } else {
      ++found->second;
    }
  }
  std::string text;
  for (const auto& [kind, count] : counts) {
    if (text.size() > 120) return text + ", …";
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, in_quotes(kind));
  }
  return text;
}

struct IntMember {
  std::string_view name;
  int ModelLayer::*value;
};
constexpr IntMember kIntMembers[] = {
    {"query heads", &ModelLayer::heads}, {"K/V heads", &ModelLayer::kv_heads}, {"head_dim", &ModelLayer::head_dim}};

std::string difference(const ModelLayer& one, std::int64_t one_at, const ModelLayer& other, std::int64_t other_at) {
  for (const auto& [name, value] : kIntMembers) {
    if (one.*value == other.*value) continue;
    return fmt::format("{}: {} in layer {}, {} in layer {}", name, one.*value, one_at, other.*value, other_at);
  }
  return fmt::format("layer {} has another window or scale than layer {}", other_at, one_at);
}

}  // namespace

ModelLayer ModelConfig::one_of(const std::vector<Derived>& layers, std::optional<LayerKind> wanted) const {
  const auto is_wanted = [&](const ModelLayer& layer) {
    if (!wanted) return true;
    const bool rule = layer.kind == LayerKind::kGatedDelta;
    return rule == (wanted == LayerKind::kGatedDelta) && layer.is_ssm() == is_ssm(*wanted);
  };
  struct Candidate {
    std::int64_t at;
    const ModelLayer* layer;  // nullptr: it can't be computed
    const std::string* kind;
  };
  std::vector<Candidate> candidates;
  for (const Derived& derived : layers) {
    if (derived.ops.empty() && !wanted) candidates.push_back({derived.layer, nullptr, &derived.kind});
    for (const ModelLayer& op : derived.ops) {
      if (is_wanted(op)) candidates.push_back({derived.layer, &op, &derived.kind});
    }
  }
  if (candidates.empty()) {  // the caller reports that the job's op is not the model's; or nothing can be computed
    for (const Derived& derived : layers) {
      if (!derived.ops.empty()) return derived.ops.front();
    }
    candidates.push_back({layers.front().layer, nullptr, &layers.front().kind});
  }
  const Candidate& first = candidates.front();
  const auto same = [&](const Candidate& other) {
    if (first.layer == nullptr || other.layer == nullptr)
      return first.layer == other.layer && *first.kind == *other.kind;
    ModelLayer layer = *other.layer;
    layer.rope = first.layer->rope;  // few jobs use it
    return *first.layer == layer;
  };
  const auto differs = std::ranges::find_if_not(candidates, same);
  if (differs != candidates.end()) {
    const bool one_layer = differs->at == first.at;
    if (one_layer) {
      fail(ErrorCode::kUsage, fmt::format("layer {} of {} has attention and an SSM", first.at, keys_->name()),
           "the op is not given",
           {"Add ", setting("op", layer_kind_name(first.layer->kind)), " or ",
            setting("op", layer_kind_name(differs->layer->kind)), "."});
    }
    std::vector<std::string> kinds;
    for (const Candidate& candidate : candidates) kinds.push_back(*candidate.kind);
    const bool by_kind = std::ranges::any_of(kinds, [&](const std::string& kind) { return kind != kinds.front(); });
    fail(ErrorCode::kUsage, fmt::format("{} has layers of several kinds", keys_->name()),
         by_kind ? counted_kinds(kinds) : difference(*first.layer, first.at, *differs->layer, differs->at),
         {"Name one with ", setting("layer", 0), "."});
  }
  if (first.layer != nullptr) {
    ModelLayer found = *first.layer;
    const auto turns_alike = [&](const Candidate& other) { return other.layer->rope == found.rope; };
    if (!std::ranges::all_of(candidates, turns_alike)) found.rope.refusal = "layers differ in it, and none is named";
    return found;
  }
  const std::string& kind = *first.kind;
  const auto* const known = std::ranges::find(kOtherAttention, kind, &OtherKind::kind);
  if (known != std::end(kOtherAttention)) {
    fail(ErrorCode::kUnsupported, fmt::format("layer {} of {} can't be computed", first.at, keys_->name()),
         fmt::format("it is {}: {}", in_quotes(kind), known->why),
         {"Name another with ", setting("layer"), ", or give the dims themselves for attention to all tokens."});
  }
  fail(ErrorCode::kUsage, setting("layer", first.at),
       fmt::format("that layer of {} is {}, neither attention nor an SSM", keys_->name(), in_quotes(kind)),
       "Name another, or leave it out and name the op.");
}

std::vector<ModelConfig::Derived> ModelConfig::all() const {
  std::vector<Derived> derived;
  for (std::int64_t i = 0; i < layers_.value_or(kUnsaidLayers); ++i) derived.push_back(derive(i));
  return derived;
}

std::string ModelConfig::assumed() const { return assumed_family(*keys_); }

bool ModelConfig::mixes_ops() const {
  bool scans = false;
  bool attends = false;
  for (const Derived& derived : all()) {
    for (const ModelLayer& op : derived.ops) (op.is_ssm() ? scans : attends) = true;
  }
  return scans && attends;
}

ModelLayer ModelConfig::layer(std::optional<std::int64_t> layer, std::optional<LayerKind> wanted) const {
  if (layer) {
    if (*layer < 0 || *layer >= layers_.value_or(kMaxModelCount)) {
      fail(ErrorCode::kUsage, setting("layer", *layer),
           fmt::format("{} has layers 0 to {}", keys_->name(), layers_.value_or(kMaxModelCount) - 1),
           "Name one of these.");
    }
    return one_of({derive(*layer)}, wanted);
  }
  return one_of(all(), wanted);
}

}  // namespace ringattn
