// SPDX-License-Identifier: Apache-2.0
#include "launch/check_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "io/model_config.hpp"
#include "launch/job_request.hpp"
#include "launch/ssm_request.hpp"

namespace ringattn {

namespace {

// The dims of a file beside those of a model's layer.
class Comparison {
 public:
  Comparison(const Config& config, Op op)
      : config_(config), layer_(ModelConfig::open(config.options.model_config).layer(config.options.layer, op)) {}

  const ModelLayer& layer() const { return layer_; }

  void same(std::string_view name, int of_file, int of_model) const {
    if (of_file != of_model) refuse(name, of_file, of_model, "a layer of the model has the config's");
  }
  // In how many parts heads, or channels, are divided: a share of tensor parallelism.
  int parts(std::string_view name, int of_file, int of_model) const {
    if (of_file > of_model || of_model % of_file != 0) {
      refuse(name, of_file, of_model, "a job has all of a layer's, or a share that divides them");
    }
    return of_model / of_file;
  }
  // What heads share is divided in as many parts; where there are fewer of them than parts, each part has a copy of
  // one.
  void shared(std::string_view name, int of_file, int of_model, int parts) const {
    const int share = of_model % parts == 0 ? of_model / parts : 1;
    if (of_file == share && (of_model % parts == 0 || parts % of_model == 0)) return;
    refuse(name, of_file, of_model, fmt::format("of 1 / {} of the heads they are {}", parts, share));
  }
  [[noreturn]] void refuse_kind(std::string_view file, std::string_view model) const {
    fail(ErrorCode::kUsage, contradiction(), fmt::format("the file holds {}, and the config is of {}", file, model),
         kSuggestion);
  }
  [[noreturn]] void refuse_without_sinks() const {
    fail(ErrorCode::kUsage, contradiction(),
         "the model's layer has attention sinks, a logit for each query head, and the file has no tensor `sinks`",
         "Add the layer's sinks, under that name or by --tensors sinks=NAME, or leave the config out.");
  }

 private:
  static constexpr std::string_view kSuggestion =
      "Give the config that belongs to the file, and the layer, or leave it out.";

  std::string contradiction() const {
    return fmt::format("{} {} contradicts {} {}", config_.origin("model-config"), config_.options.model_config,
                       config_.origin("input"), config_.options.input);
  }
  [[noreturn]] void refuse(std::string_view name, int of_file, int of_model, std::string_view why) const {
    fail(ErrorCode::kUsage, contradiction(),
         fmt::format("{} is {} in the config and {} by the file's tensors; {}", name, of_model, of_file, why),
         kSuggestion);
  }

  const Config& config_;
  ModelLayer layer_;
};

// Compares keys and values with a layer of the model. For an MLA layer they are either expanded for each head, or the
// latents as one K/V head with queries in the latent.
void compare_attention(const Comparison& compare, const AttentionSpec& spec) {
  const ModelLayer& layer = compare.layer();
  const int parts = compare.parts("num_attention_heads", spec.heads, layer.heads);
  int head_dim = layer.head_dim;
  int head_dim_v = layer.head_dim_v;
  if (layer.op != Op::kMla) {
    compare.shared("num_key_value_heads", spec.kv_heads, layer.kv_heads, parts);
  } else if (spec.kv_heads == 1 && spec.head_dim == layer.latent_dim + layer.rope_dim) {
    head_dim = spec.head_dim;
    head_dim_v = layer.latent_dim;
  } else {
    compare.shared("num_key_value_heads", spec.kv_heads, layer.heads, parts);
    head_dim += layer.rope_dim;
  }
  compare.same("head_dim", spec.head_dim, head_dim);
  compare.same("the dim of v", spec.head_dim_v, head_dim_v);
  if (layer.sinks && !spec.sinks) compare.refuse_without_sinks();
}

bool has_both(const Config& config) { return config.given("model-config") && config.given("input"); }

}  // namespace

void check_model(const Config& config, const JobInput& input) {
  if (!has_both(config)) return;
  const Comparison compare(config, input.op());
  const ModelLayer& layer = compare.layer();
  if (layer.is_ssm()) compare.refuse_kind("attention", "SSM layers only");
  const AttentionSpec& spec = input.job().spec;
  if (input.op() != Op::kMla) return compare_attention(compare, spec);
  compare.parts("num_attention_heads", spec.heads, layer.heads);
  if (layer.op != Op::kMla) compare.refuse_kind("latents", "keys and values: it has no kv_lora_rank");
  const MlaSpec& latent = input.latent().spec;
  compare.same("kv_lora_rank", latent.latent_dim, layer.latent_dim);
  compare.same("qk_rope_head_dim", latent.rope_dim, layer.rope_dim);
  if (const auto nope_dim = input.nope_dim()) compare.same("qk_nope_head_dim", *nope_dim, layer.head_dim);
  if (!latent.out_in_latent) compare.same("v_head_dim", latent.head_dim_v, layer.head_dim_v);
}

void check_model(const Config& config, const SsmJob& job) {
  if (!has_both(config)) return;
  const Comparison compare(config, ssm_op(job));
  const ModelLayer& layer = compare.layer();
  const SsmSpec& spec = job.spec;
  if (!layer.is_ssm()) {
    compare.refuse_kind("an SSM", "no SSM: it has no state_size, mamba_d_state or ssm_state_size");
  }
  if (job.conv1d_only) {
    compare.parts("the number of channels", spec.heads, static_cast<int>(layer.conv_channels));
    compare.same("the convolution's width", job.convolution->width, layer.conv_width);
    return;
  }
  const bool channels = layer.op == Op::kSelectiveScan;
  if (channels != spec.state_decays) {
    compare.refuse_kind(spec.state_decays ? "an SSM of Mamba-1" : "an SSM of Mamba-2",
                        channels ? "Mamba-1" : "Mamba-2");
  }
  const int parts = compare.parts(channels ? "the number of channels" : "the number of heads", spec.heads, layer.heads);
  if (!channels) compare.same("the dim of a head", spec.head_dim, layer.head_dim);
  compare.same("the state's dim", spec.state_dim, layer.state_dim);
  compare.shared("the number of groups", spec.groups, layer.groups, parts);
  if (job.convolution) compare.same("the convolution's width", job.convolution->width, layer.conv_width);
}

}  // namespace ringattn
