// SPDX-License-Identifier: Apache-2.0
#include "launch/model_layer.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>

#include "attention/files/model_config.hpp"
#include "base/error.hpp"
#include "kernels/latent.hpp"

namespace ringattn {

namespace {

// Defaults that an op has of its own, small models' dims.
struct OpDefault {
  Op op;
  std::string_view flag;
  std::string_view text;
};
constexpr OpDefault kOpDefaults[] = {{Op::kLatent, "heads", "16"},         {Op::kSsd, "head-dim", "64"},
                                     {Op::kSelectiveScan, "heads", "256"}, {Op::kSelectiveScan, "state-dim", "16"},
                                     {Op::kConvolution, "heads", "256"},   {Op::kConvolution, "conv-width", "4"}};

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

bool is_scan(Op op) { return op >= Op::kSsd; }

void fill_shape(const ModelConfig& model, Op op, Filler& filler) {
  if (op == Op::kConvolution) {
    filler.fill("heads", [&] { return model.scan_conv_channels(); });
    filler.fill("conv-width", [&] { return model.scan_conv_width(); });
    return;
  }
  if (is_scan(op)) {
    filler.fill("heads", [&] { return model.scan_heads(); });
    if (op == Op::kSsd) filler.fill("head-dim", [&] { return model.scan_head_dim(); });
    filler.fill("state-dim", [&] { return model.scan_state_dim(); });
    filler.fill("groups", [&] { return model.scan_groups(); });
    filler.fill("conv-width", [&] { return model.scan_conv_width(); });
    return;
  }
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

// The scan of the model's state space layers.
Op scan_of(const ModelConfig& model) { return model.scans_channels() ? Op::kSelectiveScan : Op::kSsd; }

// Of a model with both, the layer says it; attention where none is named.
Op op_of(const ModelConfig& model, std::optional<std::int64_t> layer) {
  if (model.has_scans()) {
    const bool both = model.has_attention();
    if (!both || (layer && model.layer_scans(*layer).value_or(false))) return scan_of(model);
  }
  return model.is_latent() ? Op::kLatent : Op::kAttention;
}

// The op of a config that has another one than was asked for is no shape of it.
void check_op_of(const ModelConfig& model, const Config& config) {
  const Op op = config.options.op;
  if (!config.given("op")) return;
  const std::string contradiction =
      fmt::format("{} contradicts {}", config.origin("op"), config.origin("model-config"));
  const std::string& path = config.options.model_config;
  if (is_scan(op)) {
    if (model.has_scans() && (op == Op::kConvolution || op == scan_of(model))) return;
    fail(ErrorCode::kUsage, contradiction,
         model.has_scans() ? fmt::format("the scans of {} are {}", path, op_name(scan_of(model)))
                           : fmt::format("{} has no state_size, mamba_d_state or ssm_state_size", path),
         "Leave --op out, or give another config.");
  }
  if (model.has_scans() && !model.has_attention()) {
    fail(ErrorCode::kUsage, contradiction, fmt::format("{} has no num_attention_heads", path),
         fmt::format("Leave --op out, or name {}.", op_name(scan_of(model))));
  }
  if (model.is_latent() == (op == Op::kLatent)) return;
  const bool latent = model.is_latent();
  fail(ErrorCode::kUsage, contradiction,
       fmt::format("{} {} kv_lora_rank, so its attention is {}of latents", path, latent ? "has" : "has no",
                   latent ? "" : "not "),
       latent ? "Leave --op out, or name mla." : "Name attention or decode, or another config.");
}

// What a file without w_uk doesn't say.
void fill_latents(const ModelConfig& model, Filler& filler) {
  filler.fill("latent-dim", [&] { return model.latent_dim(); });
  if (model.softmax_scale()) return;
  filler.fill("softmax-scale", [&] {
    return default_softmax_scale(LatentSpec{.head_dim = model.nope_dim(), .rope_dim = model.rope_dim()});
  });
}

// What attention does with its scores.
void fill_scores(const ModelConfig& model, std::optional<std::int64_t> layer, Filler& filler) {
  filler.fill_optional("window", [&]() -> std::optional<std::string> {
    const auto window = model.sliding_window(layer);
    return window ? std::optional(fmt::format("{},-1", *window - 1)) : std::nullopt;
  });
  filler.fill("softcap", [&] { return model.softcap(); });
  filler.fill_optional("softmax-scale", [&] { return model.softmax_scale(); });
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
      filler.fill("op", [&] { return op_name(op_of(model, config.options.layer)); });
      fill_shape(model, config.options.op, filler);
    }
    const bool scan = is_scan(config.options.op);
    if ((scan && config.options.op != Op::kConvolution) || config.given("input")) {
      filler.fill_optional("dt-limit", [&]() -> std::optional<std::string> {
        const auto limit = model.dt_limit();
        return limit ? std::optional(fmt::format("{},{}", limit->first, limit->second)) : std::nullopt;
      });
    }
    if (!scan) fill_scores(model, config.options.layer, filler);
    if (config.given("input") && model.is_latent()) fill_latents(model, filler);
  }
  for (const OpDefault& row : kOpDefaults) {
    if (config.options.op != row.op || config.value(row.flag).source != Source::kDefault) continue;
    fill_value(config, row.flag, std::string(row.text), Source::kDefault, row.flag);
  }
}

}  // namespace ringattn
