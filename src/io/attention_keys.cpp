// SPDX-License-Identifier: Apache-2.0
// Keys of a config.json that change its attention, but that the rules of its family do not read.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "io/model_families.hpp"

namespace ringattn {

namespace {

// Keys that change the attention of any family. Values that enable nothing are ignored: null, false, 0, and empty
// texts, lists and objects.
struct ChangingKey {
  std::string_view key;
  std::string_view why;
};
constexpr ChangingKey kChanging[] = {
    {"alibi", "scores have ALiBi biases"},
    {"use_alibi", "scores have ALiBi biases"},
    {"attn_config.alibi", "scores have ALiBi biases"},
    {"attn_config.prefix_lm", "the tokens of a prefix see each other"},
    {"prefix_lm", "the tokens of a prefix see each other"},
    {"position_encoding_2d", "the tokens of a prefix see each other"},
    {"relative_attention", "scores have biases by relative position"},
    {"relative_attention_num_buckets", "scores have biases by relative position"},
    {"use_logn_attn", "scores are scaled by the logarithm of the length"},
    {"logn_attn", "scores are scaled by the logarithm of the length"},
    {"dual_chunk_attention_config", "long sequences are attended to in chunks"},
    {"index_topk", "queries attend to tokens that an indexer chooses"},
    {"moba_topk", "queries attend to blocks that a gate chooses"},
    {"is_encoder_decoder", "encoder, decoder and cross attention differ"},
};

// Files beside a model's weights that describe it in another format than transformers' config.json. Such a file has all
// keys of a row, and no model_type.
struct OtherFormat {
  std::string_view keys;  // with spaces between them
  std::string_view what;
  std::string_view suggestion;
};
constexpr OtherFormat kOtherFormats[] = {
    {"peft_type", "it is the configuration of an adapter (LoRA), which has no dims of attention",
     "Give the config.json of the model that base_model_name_or_path names."},
    {"d_model ssm_cfg", "it is the configuration of mamba_ssm's own format, with d_model and ssm_cfg",
     "Give the config.json of the same model in the format of transformers, or the dims themselves."},
    {"dim n_heads", "it is the params.json of Mistral's and Meta's own formats, with dim and n_heads",
     "Give the config.json of the same model in the format of transformers, or the dims themselves."},
};

// Keys of families that are not plain decoders. They are refused in a file without model_type.
constexpr ChangingKey kOfOtherFamilies[] = {
    {"type_vocab_size", "only encoders have it, and their attention is bidirectional"},
    {"laurel_rank", "only models whose scores are not scaled have it"},
    {"global_head_dim", "only models whose scores are not scaled have it"},
};
constexpr std::string_view kSsmKeys =
    "mamba_d_state ssm_state_size state_size mamba_n_heads mamba_num_heads mamba_d_ssm";
constexpr std::string_view kSsmLayers =
    "layer_types layers_block_type hybrid_override_pattern attn_layer_period attn_layer_indices hybrid_layer_ids";

// Substrings of names of keys that concern attention.
constexpr std::string_view kTelling[] = {"attn",  "attention", "window",        "sink",
                                         "chunk", "sparse",    "bidirectional", "softcapping"};

// Keys whose names have such substrings, but that do not change attention for given q, k and v: projections, dropout,
// implementations, mixtures of experts, and keys that every family reads.
constexpr std::string_view kHarmless[] = {"num_attention_heads",
                                          "attention_dropout",
                                          "attention_bias",
                                          "attention_out_bias",
                                          "attention_probs_dropout_prob",
                                          "attention_softmax_in_fp32",
                                          "scale_attention_softmax_in_fp32",
                                          "reorder_and_upcast_attn",
                                          "apply_query_key_layer_scaling",
                                          "add_cross_attention",
                                          "cross_attention_hidden_size",
                                          "attn_pdrop",
                                          "attn_dropout",
                                          "attn_rotary_emb",
                                          "attn_implementation",
                                          "_attn_implementation",
                                          "_attn_implementation_autoset",
                                          "_attn_implementation_internal",
                                          "use_flash_attn",
                                          "use_flash_attention",
                                          "flash_attn",
                                          "use_cache",
                                          "final_logit_softcapping",
                                          "chunk_size_feed_forward",
                                          "decoder_sparse_step",
                                          "encoder_sparse_step",
                                          "sparse_prediction",
                                          "sparse_pred_ignore_index",
                                          "num_ln_in_parallel_attn",
                                          "parallel_attn",
                                          "use_sliding_window",
                                          "max_window_layers",
                                          "prune_heads",
                                          "output_attentions",
                                          "use_attention_bias",
                                          "qkv_attention_bias"};

bool switches(const JsonNode& node) {
  switch (node.kind) {
    case JsonNode::Kind::kNull:
    case JsonNode::Kind::kFalse:
      return false;
    case JsonNode::Kind::kNumber:
      return node.number != 0.0;
    case JsonNode::Kind::kString:
      return !node.text.empty();
    case JsonNode::Kind::kList:
      return !node.list.empty();
    case JsonNode::Kind::kObject:
      return !node.members.empty();
    case JsonNode::Kind::kTrue:
    case JsonNode::Kind::kOther:
      break;
  }
  return true;
}

std::string value_text(const JsonNode& node) {
  if (node.is_number()) return fmt::format("{}", node.number);
  return node.is_string() ? in_quotes(node.text) : kind_text(node);
}

[[noreturn]] void refuse(const ModelKeys& keys, std::string_view key, const JsonNode& value, std::string_view why) {
  fail(ErrorCode::kUnsupported, fmt::format("the attention of {} can't be computed", keys.name()),
       fmt::format("{} is {}: {}", in_quotes(key), value_text(value), why),
       "Give the dims themselves for attention to all tokens.");
}

// A file without model_type is read by its keys, unless it has keys of models that are not plain decoders.
void check_untyped(const ModelKeys& keys) {
  for (const OtherFormat& format : kOtherFormats) {
    if (any_word(format.keys, [&](std::string_view key) { return !keys.has(key); })) continue;
    fail(ErrorCode::kFile, fmt::format("{} is not the config.json of a model", keys.name()), format.what,
         std::string(format.suggestion));
  }
  const auto refuse_untyped = [&](std::string_view why) {
    fail(ErrorCode::kUnsupported, fmt::format("{} has no model_type", keys.name()), why,
         "Add its model_type, or give the dims, the mask and the scale themselves.");
  };
  for (const auto& [key, why] : kOfOtherFamilies) {
    if (keys.has(key)) refuse_untyped(fmt::format("it has {}; {}", in_quotes(key), why));
  }
  if (!keys.flag("is_decoder", true))
    refuse_untyped("is_decoder is false, which makes attention bidirectional in encoders");
  if (keys.has("logits_scaling") && !keys.has("attention_multiplier")) {
    refuse_untyped("it has `logits_scaling` and no attention_multiplier; the scale of such models is 1");
  }
  const auto has = [&](std::string_view key) { return keys.has(key); };
  if (keys.has("num_attention_heads") && any_word(kSsmKeys, has) && !any_word(kSsmLayers, has)) {
    refuse_untyped(fmt::format("it has {}, and no key says which layers have attention and which have an SSM",
                               in_quotes(keys.first_name(kSsmKeys))));
  }
}

}  // namespace

void check_attention_keys(const ModelKeys& keys, const ModelFamily& family) {
  if (keys.model_type().empty()) check_untyped(keys);
  for (const auto& [key, why] : kChanging) {
    const JsonNode* const value = keys.find(key);
    if (value != nullptr && switches(*value)) refuse(keys, key, *value, why);
  }
  if (const std::string_view type = keys.text("position_embedding_type");
      type.starts_with("relative") || type == "alibi") {
    refuse(keys, "position_embedding_type", *keys.find("position_embedding_type"), "scores have biases by position");
  }
  const bool windows = keys.flag("use_sliding_window", true);
  for (const auto& [name, value] : keys.object().members) {
    if (name == "sliding_window" && !windows) continue;
    if (!switches(value) || std::ranges::find(kHarmless, name) != std::end(kHarmless)) continue;
    const auto tells = [&, text = std::string_view(name)](std::string_view part) {
      return text.find(part) != std::string_view::npos;
    };
    if (std::ranges::none_of(kTelling, tells)) continue;
    if (any_word(family.reads, [&, text = std::string_view(name)](std::string_view read) { return read == text; }))
      continue;
    refuse(keys, name, value,
           keys.model_type().empty() ? "what it means can't be told without a model_type"
                                     : fmt::format("it is not known to mean anything in a {}, and may change attention",
                                                   in_quotes(keys.model_type())));
  }
}

}  // namespace ringattn
