// SPDX-License-Identifier: Apache-2.0
#include "launch/model_layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "io/model_config.hpp"
#include "ops/common/tensor_file.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

std::string_view layer_text(LayerKind kind) {
  constexpr std::string_view kTexts[] = {"attention to keys and values",
                                         "attention over latents (kv_lora_rank)",
                                         "an SSM of Mamba-2",
                                         "an SSM of Mamba-1",
                                         "linear attention",
                                         "a gated delta rule"};
  return kTexts[static_cast<std::size_t>(kind)];
}

// Throws if the model's layer computes another op than the requested one, because the job would have no shape.
void check_op_of(const ModelLayer& layer, const Config& config) {
  if (!config.given("op") || op_entry(config.options.op).computes(layer.kind)) return;
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("op"), config.origin("model-config")),
       fmt::format("{} has {} there", config.options.model_config, layer_text(layer.kind)),
       fmt::format("Leave --op out, or name {}, or give another config or layer.", op_of_layer(layer.kind).name));
}

// The requested kind of layer: one that the given op computes or, if the model has both attention and SSM layers, the
// kind of the file's op.
std::optional<LayerKind> wanted_kind(const ModelConfig& model, const Config& config) {
  const OpEntry* op = nullptr;
  if (config.given("op")) op = &op_entry(config.options.op);
  if (config.given("input") && !config.given("synthetic") && model.mixes_ops()) {
    op = &op_of_file(*open_tensor_file(file_input(config.options), *config.share), config,
                     config.given("op") ? config.options.op : std::string_view());
  }
  return op == nullptr ? std::nullopt : op->layer();
}

// The op of the input file, or nullptr if the job is not known before the file is open.
const OpEntry* recognized_op(const Config& config) {
  const auto file = open_tensor_file(file_input(config.options), *config.share);
  const auto recognizes = [&](const OpEntry* op) { return op->recognizes != nullptr && op->recognizes(*file); };
  const auto found = std::ranges::find_if(op_table(), recognizes);
  return found == op_table().end() ? nullptr : *found;
}

}  // namespace

void fill_from_model(Config& config) {
  if (config.given("layer") && !config.given("model-config")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --model-config", config.origin("layer")),
         "it names a layer of a model", "Add --model-config FILE, or leave it out.");
  }
  if (config.given("model-config")) {
    const ModelConfig model = ModelConfig::open(config.options.model_config);
    const ModelLayer layer = model.layer(config.options.layer, wanted_kind(model, config));
    const bool file = config.given("input");
    const FillSetting fill = [&](std::string_view flag, const std::string& value) {
      const FlagRow* const row = config.value(flag).row;
      if (row == nullptr || config.given(flag)) return;
      if (file && row->group == FlagGroup::kShape && !row->beside_input) return;
      fill_value(config, flag, value, Source::kModel, fmt::format("--{} by {}", flag, config.options.model_config));
    };
    const OpEntry* op = &op_of_layer(layer.kind);
    if (!file) {
      check_op_of(layer, config);
      if (config.given("op")) op = &op_entry(config.options.op);
      fill("op", std::string(op->name));
    } else if (const OpEntry* const by_file = recognized_op(config);
               by_file != nullptr && by_file->computes(layer.kind)) {
      op = by_file;
    }
    op->fill(layer, config.options, fill);
    if (!layer.rope.assumed.empty() && op->takes("rope-theta") && !config.given("rope-theta")) {
      config.options.model_note = fmt::format("{} {}. Give --rope-theta if the model was trained with another.",
                                              config.options.model_config, layer.rope.assumed);
    }
    config.options.model_sinks = layer.sinks;
    config.options.model_assumed = model.assumed();
  }
  for (const SettingDefault& own : op_entry(config.options.op).defaults) {
    if (config.value(own.setting).source != Source::kDefault) continue;
    fill_value(config, own.setting, std::string(own.value), Source::kDefault, own.setting);
  }
}

}  // namespace ringattn
