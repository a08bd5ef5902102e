// SPDX-License-Identifier: Apache-2.0
#include "io/model_rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "io/layer_kinds.hpp"

namespace ringattn {

namespace {

// RoPE properties that classes share. Names are separated by spaces.
struct RopeFamily {
  std::string_view names;
  double theta = 10000.0;
  double rotary_factor = 1.0;
  bool interleaved = false;
  bool sections_alternate = false;  // of mrope
};
constexpr RopeFamily kFamilies[] = {
    {"llama mistral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 phi3 starcoder2 olmo olmo2 olmoe falcon granite "
     "granitemoe seed_oss arcee jetmoe ministral"},
    {"gemma3 gemma3_text"},
    {"mixtral qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text", 1e6},
    {.names = "qwen3_vl qwen3_vl_text", .theta = 5e5, .sections_alternate = true},
    {"minimax_m2", 5e6},
    {"olmo3", 5e5},
    {"gpt_oss", 1.5e5},
    {"apertus", 1.2e7},
    {"gpt_neox stablelm qwen3_next", 1e4, 0.25},
    {"phi glm4_moe nemotron persimmon bamba", 1e4, 0.5},
    {"bailing_moe_linear bailing_hybrid", 6e5},
    {"retnet", 1e4},
    {"glm glm4", 1e4, 0.5, true},
    {"gptj codegen", 1e4, 1.0, true},
    {"cohere ernie4_5", 5e5, 1.0, true},
    {"helium", 1e5, 1.0, true},
};

// Keys with "rope" or "rotary" in their names, or in a section's object, that are read or have no effect.
constexpr std::string_view kTopKeys =
    "rope_theta rope_scaling rope_parameters rotary_emb_base rotary_pct rotary_dim partial_rotary_factor "
    "rope_local_base_freq attn_rotary_emb default_rope_type linear_rope";
constexpr std::string_view kNumbers =
    "factor attention_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "low_freq_factor high_freq_factor";
constexpr std::string_view kLists = "short_factor long_factor mrope_section";
constexpr std::string_view kOthers = "rope_type type finetuned";  // read elsewhere, or without effect
constexpr std::string_view kTypes = "default linear dynamic yarn longrope llama3 proportional";

bool among(std::string_view words, std::string_view word) {
  return any_word(words, [&](std::string_view each) { return each == word; });
}

const RopeFamily* rope_family(std::string_view model_type) {
  const auto* const found =
      std::ranges::find_if(kFamilies, [&](const RopeFamily& family) { return among(family.names, model_type); });
  return found == std::end(kFamilies) ? nullptr : found;
}

class RopeReader {
 public:
  RopeReader(const ModelKeys& keys, const RopeFamily& family, std::string_view kind, int head_dim)
      : keys_(keys), family_(family), kind_(kind), head_dim_(head_dim) {
    rope_.theta = family.theta;
    rope_.rotary_factor = family.rotary_factor;
    rope_.interleaved = family.interleaved;
  }

  ModelRope read() {
    for (const auto& [key, value] : keys_.object().members) {
      const bool named = key.find("rope") != std::string::npos || key.find("rotary") != std::string::npos;
      if (named && !among(kTopKeys, key) && !value.is_null()) return refused(fmt::format("{} is not known", key));
    }
    read_top();
    section_ = section();
    if (!rope_.refusal.empty()) return rope_;
    if (section_ != nullptr && !section_->is_null()) read_section();
    if (rope_.refusal.empty()) read_lengths();
    if (!has_theta_) {
      const std::string_view type = keys_.model_type();
      rope_.assumed =
          fmt::format("has no rope_theta ({} is the default{}{})", rope_.theta, type.empty() ? "" : " of ", type);
    }
    return rope_;
  }

 private:
  ModelRope refused(std::string why) {
    rope_.refusal = std::move(why);
    return rope_;
  }

  void read_top() {
    for (const char* const key : {"rope_theta", "rotary_emb_base"}) {
      const auto theta = keys_.number(key);
      if (!theta) continue;
      rope_.theta = *theta;
      has_theta_ = true;
    }
    if (const auto part = keys_.number("rotary_pct")) rope_.rotary_factor = *part;
    if (const auto part = keys_.number("partial_rotary_factor")) rope_.rotary_factor = *part;
    if (const auto dim = keys_.count("rotary_dim")) {
      rope_.rotary_factor = static_cast<double>(*dim) / head_dim_;
    } else if (among("gptj codegen", keys_.model_type())) {
      rope_.rotary_factor = 64.0 / head_dim_;  // their classes' default
    }
  }

  // The object with the layer's parameters, or nullptr.
  const JsonNode* section() {
    const JsonNode* found = keys_.find("rope_parameters");
    const JsonNode* const older = keys_.find("rope_scaling");
    if (found == nullptr) found = older;
    if (among("gemma3 gemma3_text", keys_.model_type()) && found == older) {
      // Layers with windows have a theta of their own, and no scaling.
      if (kind_ == kSlidingAttention) {
        const auto theta = keys_.number("rope_local_base_freq");
        rope_.theta = theta.value_or(10000.0);
        has_theta_ = theta.has_value();
        return nullptr;
      }
      if (!keys_.has("rope_theta")) rope_.theta = 1e6;
    } else if (keys_.has("rope_local_base_freq")) {
      rope_.refusal = "rope_local_base_freq is not known for this model";
    }
    if (found == nullptr) return nullptr;
    if (!found->is_object()) {
      rope_.refusal = "rope_parameters is not an object";
      return nullptr;
    }
    const bool nested = std::ranges::any_of(found->members, [](const auto& member) {
      return member.second.is_object() || member.first.ends_with("_attention");
    });
    if (!nested) return found;
    const JsonNode* const own = found->member(kind_);
    if (own == nullptr || !own->is_object()) {
      rope_.refusal = fmt::format("rope_parameters has none for layers of {}", kind_);
      return nullptr;
    }
    return own;
  }

  void add(std::string_view name, const std::string& text) {
    rope_.scaling += fmt::format("{}{}={}", rope_.scaling.empty() ? "" : ",", name, text);
  }

  void read_section() {
    const JsonNode* type = section_->member("rope_type");
    if (type == nullptr) type = section_->member("type");
    if (type != nullptr && !type->is_null()) rope_.type = type->is_string() ? type->text : kind_text(*type);
    if (rope_.type == "mrope") rope_.type = "default";  // an older name, beside mrope_section
    if (!among(kTypes, rope_.type)) {
      refused(fmt::format("its type {} is not known", rope_.type));
      return;
    }
    for (const auto& [key, value] : section_->members) {
      if (value.is_null()) continue;
      if (among(kNumbers, key)) {
        if (!value.is_number()) return static_cast<void>(refused(fmt::format("{} is {}", key, kind_text(value))));
        if (key == "original_max_position_embeddings" && keys_.has(key))
          continue;  // the file's top-level value is used
        add(key, fmt::format("{}", value.number));
      } else if (among(kLists, key)) {
        if (!value.is_list()) return static_cast<void>(refused(fmt::format("{} is {}", key, kind_text(value))));
        std::string numbers;
        for (const JsonNode& number : value.list) {
          if (!number.is_number()) return static_cast<void>(refused(fmt::format("{} has {}", key, kind_text(number))));
          numbers += fmt::format("{}{}", numbers.empty() ? "" : ":", number.number);
        }
        add(key, numbers);
        if (key == "mrope_section" && family_.sections_alternate) add("mrope_interleaved", "true");
      } else if (key == "rope_theta" || key == "partial_rotary_factor") {
        if (!value.is_number()) return static_cast<void>(refused(fmt::format("{} is {}", key, kind_text(value))));
        (key == "rope_theta" ? rope_.theta : rope_.rotary_factor) = value.number;
        has_theta_ = has_theta_ || key == "rope_theta";
      } else if (key == "truncate") {
        if (rope_.type == "yarn") add(key, value.kind == JsonNode::Kind::kFalse ? "false" : "true");
      } else if (key == "mrope_interleaved") {
        if (family_.sections_alternate || value.kind == JsonNode::Kind::kFalse) continue;
        return static_cast<void>(refused("mrope_interleaved is not known for this model"));
      } else if (!among(kOthers, key)) {
        return static_cast<void>(refused(fmt::format("{} of its parameters is not known", key)));
      }
    }
  }

  // Reads lengths beside the parameters, for the types that need them.
  void read_lengths() {
    const auto has = [&](std::string_view name) { return rope_.scaling.find(name) != std::string::npos; };
    if (among("yarn longrope llama3", rope_.type) && !has("original_max_position_embeddings")) {
      auto length = keys_.number("original_max_position_embeddings");
      if (!length) length = keys_.number("max_position_embeddings");
      if (length) add("original_max_position_embeddings", fmt::format("{}", *length));
    }
    const bool needs_ratio = among("yarn longrope", rope_.type) && section_->member("factor") == nullptr;
    if (rope_.type != "dynamic" && !needs_ratio) return;
    if (const auto length = keys_.number("max_position_embeddings")) {
      add("max_position_embeddings", fmt::format("{}", *length));
    }
  }

  const ModelKeys& keys_;
  const RopeFamily& family_;
  std::string_view kind_;
  int head_dim_;
  const JsonNode* section_ = nullptr;
  ModelRope rope_;
  bool has_theta_ = false;
};

}  // namespace

ModelRope read_rope(const ModelKeys& keys, std::string_view kind, int head_dim) {
  const RopeFamily* const family = rope_family(keys.model_type());
  if (family == nullptr) {
    ModelRope rope;
    rope.refusal = keys.model_type().empty()
                       ? "the file has no model_type, which says what elements of a head are pairs"
                       : fmt::format("the pairs of a {} are not known", keys.model_type());
    return rope;
  }
  return RopeReader(keys, *family, kind, head_dim).read();
}

}  // namespace ringattn
