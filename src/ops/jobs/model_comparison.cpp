// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/model_comparison.hpp"

#include <fmt/format.h>

namespace ringattn {

namespace {

constexpr std::string_view kSuggestion = "Give the config that belongs to the file, and the layer, or leave it out.";

}  // namespace

void ModelComparison::same(std::string_view name, int of_file, int of_model) const {
  if (of_file != of_model) refuse(name, of_file, of_model, "a layer of the model has the config's");
}

int ModelComparison::parts(std::string_view name, int of_file, int of_model) const {
  if (of_file > of_model || of_model % of_file != 0) {
    refuse(name, of_file, of_model, "a job has all of a layer's, or a share that divides them");
  }
  return of_model / of_file;
}

void ModelComparison::shared(std::string_view name, int of_file, int of_model, int parts) const {
  const int share = of_model % parts == 0 ? of_model / parts : 1;
  if (of_file == share && (of_model % parts == 0 || parts % of_model == 0)) return;
  refuse(name, of_file, of_model, fmt::format("of 1 / {} of the heads they are {}", parts, share));
}

void ModelComparison::same_attention(const AttentionSpec& spec) const {
  if (layer_.is_ssm()) refuse_kind("attention", "SSM layers only");
  const int parts = this->parts("num_attention_heads", spec.heads, layer_.heads);
  int head_dim = layer_.head_dim;
  int head_dim_v = layer_.head_dim_v;
  if (layer_.kind != LayerKind::kMla) {
    shared("num_key_value_heads", spec.kv_heads, layer_.kv_heads, parts);
  } else if (spec.kv_heads == 1 && spec.head_dim == layer_.latent_dim + layer_.rope_dim) {
    head_dim = spec.head_dim;
    head_dim_v = layer_.latent_dim;
  } else {
    shared("num_key_value_heads", spec.kv_heads, layer_.heads, parts);
    head_dim += layer_.rope_dim;
  }
  same("head_dim", spec.head_dim, head_dim);
  same("the dim of v", spec.head_dim_v, head_dim_v);
  if (layer_.sinks && !spec.sinks) refuse_without_sinks();
}

void ModelComparison::refuse_kind(std::string_view file, std::string_view model) const {
  fail(ErrorCode::kUsage, contradiction(), fmt::format("the file holds {}, and the config is of {}", file, model),
       kSuggestion);
}

void ModelComparison::refuse_without_sinks() const {
  fail(ErrorCode::kUsage, contradiction(),
       "the model's layer has attention sinks, a logit for each query head, and the file has no tensor `sinks`",
       {"Add the layer's sinks, under that name or by ", setting("tensors", "sinks=NAME"),
        ", or leave the config out."});
}

MessageTemplate ModelComparison::contradiction() const {
  return {setting("model_config", model_), " contradicts ", setting("input", file_)};
}

void ModelComparison::refuse(std::string_view name, int of_file, int of_model, std::string_view why) const {
  fail(ErrorCode::kUsage, contradiction(),
       fmt::format("{} is {} in the config and {} by the file's tensors; {}", name, of_model, of_file, why),
       kSuggestion);
}

}  // namespace ringattn
