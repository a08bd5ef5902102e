// SPDX-License-Identifier: Apache-2.0
#include "launch/model_layer.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>

#include "attention/files/model_config.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Defaults that an op has of its own, small models' dims.
struct OpDefault {
  Op op;
  std::string_view flag;
  std::string_view text;
};
constexpr OpDefault kOpDefaults[] = {{Op::kLatent, "heads", "16"},
                                     {Op::kSsd, "head-dim", "64"},
                                     {Op::kSelectiveScan, "heads", "256"},
                                     {Op::kSelectiveScan, "state-dim", "16"}};

// Sets flags of the config that nobody gave.
class Filler {
 public:
  explicit Filler(Config& config) : config_(config), path_(config.options.model_config) {}

  // `value` is called only where it is wanted: a config needn't say what a flag says.
  template <typename Value>
  void fill(std::string_view flag, const Value& value) {
    if (config_.given(flag)) return;
    fill_value(config_, flag, fmt::format("{}", value()), Source::kModel, fmt::format("--{} by {}", flag, path_));
  }
  template <typename Value>
  void fill_optional(std::string_view flag, const Value& value) {
    if (config_.given(flag)) return;
    if (const auto said = value()) fill(flag, [&] { return *said; });
  }

 private:
  Config& config_;
  const std::string& path_;
};

void fill_shape(const ModelConfig& model, Op op, Filler& filler) {
  filler.fill("heads", [&] { return model.heads(); });
  if (op == Op::kLatent) {
    filler.fill("head-dim", [&] { return model.nope_dim(); });
    filler.fill("rope-dim", [&] { return model.rope_dim(); });
    filler.fill("latent-dim", [&] { return model.latent_dim(); });
    filler.fill("head-dim-v", [&] { return model.latent_dim_v(); });
    return;
  }
  filler.fill("kv-heads", [&] { return model.kv_heads(); });
  filler.fill("head-dim", [&] { return model.head_dim(); });
}

// The op of a config that has another one than was asked for is no shape of it.
void check_op_of(const ModelConfig& model, const Config& config) {
  if (!config.given("op") || model.is_latent() == (config.options.op == Op::kLatent)) return;
  const bool latent = model.is_latent();
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("op"), config.origin("model-config")),
       fmt::format("{} {} kv_lora_rank, so its attention is {}of latents", config.options.model_config,
                   latent ? "has" : "has no", latent ? "" : "not "),
       latent ? "Leave --op out, or name mla." : "Name attention or decode, or another config.");
}

}  // namespace

void fill_from_model(Config& config) {
  if (config.given("layer") && !config.given("model-config")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --model-config", config.origin("layer")),
         "it names a layer of a model", "Add --model-config FILE, or leave it out.");
  }
  if (config.given("model-config")) {
    const ModelConfig model = ModelConfig::open(config.options.model_config);
    model.check_attends_to_all();
    Filler filler(config);
    if (!config.given("input")) {
      check_op_of(model, config);
      filler.fill("op", [&] { return model.is_latent() ? "mla" : "attention"; });
      fill_shape(model, config.options.op, filler);
    }
    filler.fill_optional("window", [&]() -> std::optional<std::string> {
      const auto window = model.sliding_window(config.options.layer);
      return window ? std::optional(fmt::format("{},-1", *window - 1)) : std::nullopt;
    });
    filler.fill("softcap", [&] { return model.softcap(); });
    filler.fill_optional("softmax-scale", [&] { return model.softmax_scale(); });
  }
  for (const OpDefault& row : kOpDefaults) {
    if (config.options.op != row.op || config.value(row.flag).source != Source::kDefault) continue;
    fill_value(config, row.flag, std::string(row.text), Source::kDefault, row.flag);
  }
}

}  // namespace ringattn
