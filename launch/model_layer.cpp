// SPDX-License-Identifier: Apache-2.0
#include "launch/model_layer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "io/model_config.hpp"
#include "launch/job_request.hpp"
#include "ops/common/input_file.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

// Sets only those flags of the config that the user did not give.
class Filler {
 public:
  explicit Filler(Config& config) : config_(config), path_(config.options.model_config) {}

  template <typename Value>
  void fill(std::string_view flag, const Value& value) {
    if (config_.given(flag)) return;
    fill_value(config_, flag, fmt::format("{}", value), Source::kModel, fmt::format("--{} by {}", flag, path_));
  }

 private:
  Config& config_;
  const std::string& path_;
};

std::string window_text(std::int64_t left, std::int64_t right) { return fmt::format("{},{}", left, right); }

// The job of a config whose layer computes another op than was asked for has no shape.
void check_op_of(const ModelLayer& layer, const Config& config) {
  const Op op = config.options.op;
  if (!config.given("op")) return;
  const std::string contradiction =
      fmt::format("{} contradicts {}", config.origin("op"), config.origin("model-config"));
  const std::string& path = config.options.model_config;
  if (is_ssm(op)) {
    if (layer.is_ssm() && (op == Op::kConv1d || op == layer.op)) return;
    fail(ErrorCode::kUsage, contradiction,
         layer.is_ssm() ? fmt::format("the SSM layers of {} are {}", path, op_name(layer.op))
                        : fmt::format("{} has no SSM there", path),
         "Leave --op out, or give another config or layer.");
  }
  if (layer.is_ssm()) {
    fail(ErrorCode::kUsage, contradiction, fmt::format("{} has no attention there", path),
         fmt::format("Leave --op out, or name {}, or give another layer.", op_name(layer.op)));
  }
  const bool latent = layer.op == Op::kMla;
  if (latent == (op == Op::kMla)) return;
  fail(ErrorCode::kUsage, contradiction,
       fmt::format("{} {} kv_lora_rank, so its attention is {}of latents", path, latent ? "has" : "has no",
                   latent ? "" : "not "),
       latent ? "Leave --op out, or name mla." : "Name attention or decode, or another config.");
}

// What attention does with its scores. A scale that is the op's default is left to the op.
void fill_scores(const ModelLayer& layer, Config& config, Filler& filler) {
  if (layer.bidirectional) filler.fill("mask", std::string_view("full"));
  if (layer.window_left >= 0 || layer.window_right >= 0) {
    const bool causal = config.options.mask == MaskKind::kCausal;  // the user's, or as it was filled in
    filler.fill("window", window_text(layer.window_left, causal ? -1 : layer.window_right));
  }
  filler.fill("softcap", layer.softcap);
  // Queries in the latent don't show the dims of a head, so a file's job can't know the default.
  const bool unseen = layer.op == Op::kMla && config.given("input");
  if (unseen || std::abs(layer.softmax_scale / layer.default_scale() - 1.0) > 1e-12) {
    filler.fill("softmax-scale", layer.softmax_scale);
  }
}

// The op that the layer is wanted for: the one that is given, or that of the file, which is opened only where the model
// has both attention and SSM.
std::optional<Op> wanted_op(const ModelConfig& model, const Config& config) {
  if (config.given("op")) return config.options.op;
  if (!config.given("input") || config.given("synthetic") || !model.mixes_ops()) return std::nullopt;
  return open_input_file(file_input(config), *config.share)->ssm ? Op::kSsd : Op::kAttention;
}

}  // namespace

void fill_from_model(Config& config) {
  if (config.given("layer") && !config.given("model-config")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --model-config", config.origin("layer")),
         "it names a layer of a model", "Add --model-config FILE, or leave it out.");
  }
  if (config.given("model-config")) {
    const ModelConfig model = ModelConfig::open(config.options.model_config);
    const ModelLayer layer = model.layer(config.options.layer, wanted_op(model, config));
    Filler filler(config);
    if (!config.given("input")) {
      check_op_of(layer, config);
      filler.fill("op", op_name(layer.op));
      op_entry(config.options.op).fill_shape(layer, [&](std::string_view flag, const std::string& value) {
        filler.fill(flag, value);
      });
    } else if (layer.op == Op::kMla) {
      filler.fill("latent-dim", layer.latent_dim);  // pages of latents don't say it
    }
    if (!layer.is_ssm()) {
      fill_scores(layer, config, filler);
    } else if (layer.dt_limit && config.options.op != Op::kConv1d) {
      filler.fill("dt-limit", fmt::format("{},{}", layer.dt_limit->first, layer.dt_limit->second));
    }
    config.options.model_sinks = layer.sinks;
    config.options.model_assumed = model.assumed();
  }
  for (const SettingDefault& own : op_entry(config.options.op).defaults) {
    if (own.setting.empty() || config.value(own.setting).source != Source::kDefault) continue;
    fill_value(config, own.setting, std::string(own.value), Source::kDefault, own.setting);
  }
}

}  // namespace ringattn
