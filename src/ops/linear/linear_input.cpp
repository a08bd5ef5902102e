// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear_input.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/quotes.hpp"
#include "io/known_names.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kLayersShown = 3;

bool is_named(const InputNames& names, std::string_view tensor) { return names.others.contains(tensor); }

// Whether a tensor of that name and shape is W of rows of `features`, and not the filters of causal_conv1d.
bool is_linear_weight(const SafetensorsFile& file, std::string_view name, std::int64_t features) {
  const TensorInfo& info = *file.tensor(name).info;
  if (info.shape.size() != 2) return false;
  const bool one = info.shape[0] == 1 && info.shape[1] == 1;  // not the filters of a convolution
  return info.shape[0] != features || info.shape[1] > kMaxConv1dWidth || one;
}

bool has_quantized(const SafetensorsFile& file, const std::string& layer) {
  const std::string prefix = layer.empty() ? "" : layer + ".";
  return file.contains(prefix + "weight_packed") || file.contains(prefix + "qweight");
}

// The prefixed layers that fit x.
std::vector<std::string> candidates(const SafetensorsFile& file, std::int64_t features) {
  std::vector<std::string> layers = layer_names(file);
  std::erase_if(layers, [&](const std::string& layer) {
    if (layer.empty() || has_quantized(file, layer)) return false;
    const std::string weight = layer + ".weight";
    const bool alias = std::ranges::any_of(known_names(), [&](const KnownName& known) { return known.name == weight; });
    return alias || file.tensor(weight).info->shape[1] != features;
  });
  return layers;
}

std::string chosen_layer(const SafetensorsFile& file, const InputNames& names, const TensorSource& x) {
  if (is_named(names, "weight")) return name_in(names, "weight");
  if (has_layer(file, "")) return "";
  const std::vector<std::string> layers = candidates(file, x.info->shape.back());
  if (layers.size() == 1) return layers.front();
  if (layers.empty()) return "weight";  // the name of the missing tensor
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < std::min(layers.size(), kLayersShown); ++i) shown.push_back(in_quotes(layers[i]));
  fail(ErrorCode::kFile, fmt::format("{} has {} layers", file.path(), layers.size()),
       fmt::format("{}{}; a job is of one", fmt::join(shown, ", "), layers.size() > kLayersShown ? ", …" : ""),
       {"Name one with ", setting("tensors", fmt::format("weight={}", layers.front())), "."});
}

// Checks a layer's bias against its weight and x.
void check_bias(const TensorSource& bias, std::int64_t rows, Dtype dtype) {
  require(bias.info->shape == std::vector{rows} && row_dtype(bias) == dtype, bias,
          fmt::format("the weight has {} rows, and x is {}", rows, dtype_name(dtype)),
          "Give one element of x's dtype for each row of the weight.");
}

}  // namespace

bool holds_linear(const SafetensorsFile& file, const InputNames& names) {
  const std::string x = name_in(names, "x");
  if (!file.contains(x) || file.contains(name_in(names, "dt")) || file.tensor(x).info->shape.empty()) return false;
  const std::int64_t features = file.tensor(x).info->shape.back();
  const std::string weight = name_in(names, "weight");
  if (file.contains(weight)) return is_linear_weight(file, weight, features);
  if (is_named(names, "weight")) return true;
  return has_quantized(file, "") || (!any_named(names) && !candidates(file, features).empty());
}

bool holds_square_linear(const SafetensorsFile& file, const InputNames& names) {
  const std::string x = name_in(names, "x"), weight = name_in(names, "weight");
  if (!file.contains(x) || !file.contains(weight) || file.contains(name_in(names, "dt"))) return false;
  const std::vector<std::int64_t>& rows = file.tensor(x).info->shape;
  return !rows.empty() && file.tensor(weight).info->shape == std::vector{rows.back(), rows.back()};
}

std::int64_t LinearInput::out_features() const {
  std::int64_t rows = 0;
  for (const Matrix& matrix : matrices) rows += matrix.weight->out_features();
  return rows;
}

LinearInput find_linear(const SafetensorsFile& file, const TensorSource& x, const InputNames& names, bool gated,
                        const std::string& config) {
  const Dtype dtype = row_dtype(x);
  std::vector<LayerTensors> layers{find_layer(file, chosen_layer(file, names, x))};
  const std::string up = name_in(names, "up");
  if (is_named(names, "up") || (gated && (file.contains(up) || has_layer(file, up)))) {
    if (!gated) {
      fail(ErrorCode::kUsage, {setting("tensors"), " names up"}, "the layer has no gate",
           {"Leave it out, or choose a gated ", setting("activation"), "."});
    }
    layers.push_back(find_layer(file, up));
  }
  if (is_named(names, "bias")) {
    layers.front().bias = file.tensor(name_in(names, "bias"));
  } else if (layers.front().name.empty() && file.contains("bias")) {
    layers.front().bias = file.tensor("bias");
  }
  LinearInput input;
  std::optional<QuantizationConfig> said;
  const bool quantized =
      std::ranges::any_of(layers, [](const LayerTensors& layer) { return layer.format != LayerFormat::kFloat; });
  if (!quantized && config != "auto") {
    fail(ErrorCode::kUsage, {setting("quantization_config", config), " contradicts ", file.path()},
         fmt::format("{} has floating-point values", layers.front().weight.text()), "Leave it out.");
  }
  if (quantized) said = config == "auto" ? quantization_config_beside(file.path()) : read_quantization_config(config);
  for (LayerTensors& layer : layers) {
    if (layer.format != LayerFormat::kFloat) {
      const bool v2 = layer.format == LayerFormat::kGptq && said && !said->zeros_less_one;
      input.format = fmt::format("{}{}", layer_format_name(layer.format), v2 ? "_v2" : "");
    }
    const std::vector<TensorSource> parts = layer.sources();
    input.sources.insert(input.sources.end(), parts.begin(), parts.end());
    const std::optional<TensorSource> bias = layer.bias;
    auto weight = std::make_unique<const LayerWeights>(std::move(layer), said);
    const TensorSource& values = weight->tensors().weight;
    require(weight->format() != WeightFormat::kFloat || weight->dtype() == dtype, values,
            fmt::format("x is {}", dtype_name(dtype)), "Give tensors of one dtype.");
    if (bias) check_bias(*bias, weight->out_features(), dtype);
    input.matrices.push_back({std::move(weight), bias});
  }
  if (input.matrices.size() == 1) return input;
  const auto& [gate, other] = std::tie(input.matrices[0], input.matrices[1]);
  const TensorSource& second = static_cast<const LayerWeights&>(*other.weight).tensors().weight;
  require(
      gate.weight->format() == other.weight->format() && gate.weight->out_features() == other.weight->out_features() &&
          gate.weight->in_features() == other.weight->in_features() && gate.bias.has_value() == other.bias.has_value(),
      second,
      fmt::format("the gate's weight is {} [{}, {}]{}", format_name(gate.weight->format()), gate.weight->out_features(),
                  gate.weight->in_features(), gate.bias ? ", with a bias" : ""),
      "Give two layers of one format and shape, both with a bias or both without.");
  return input;
}

}  // namespace ringattn
