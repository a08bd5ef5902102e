// SPDX-License-Identifier: Apache-2.0
// Keys of a config.json that change its attention, and that a family's rules do not read.
#include <fmt/format.h>

#include <algorithm>

#include "attention/files/model_families.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Keys known to change what is computed, in whichever family. A value that switches nothing on is none: null, false, 0,
// an empty text, list or object.
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

// Parts of a name that say that a key is about attention.
constexpr std::string_view kTelling[] = {"attn",  "attention", "window",        "sink",
                                         "chunk", "sparse",    "bidirectional", "softcapping"};

// Keys with such names that leave the attention of given q, k and v as it is: projections, dropout, implementations,
// mixtures of experts, and what is read by every family.
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

}  // namespace

void check_attention_keys(const ModelKeys& keys, const ModelFamily& family) {
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
