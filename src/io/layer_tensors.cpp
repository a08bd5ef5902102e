// SPDX-License-Identifier: Apache-2.0
#include "io/layer_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "base/error.hpp"
#include "base/quotes.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kReadFormats =
    "Formats that are read are compressed-tensors (int-quantized, pack-quantized), GPTQ and AWQ.";

// The tensors that hold a layer's weight.
constexpr std::array<std::string_view, 3> kWeightNames{"weight_packed", "qweight", "weight"};

std::string in_layer(std::string_view layer, std::string_view tensor) {
  return layer.empty() ? std::string(tensor) : fmt::format("{}.{}", layer, tensor);
}

// A tensor beside a layer's weight that belongs to an unsupported format, and the reason.
struct RefusedTensor {
  std::string_view name;
  std::string_view why;
};
constexpr RefusedTensor kRefused[] = {
    {"SCB", "it belongs to bitsandbytes (LLM.int8), which separates outlier columns at run time"},
    {"weight.absmax", "it belongs to bitsandbytes, whose 4-bit values are nf4 or fp4, not integers"},
    {"weight.quant_map", "it belongs to bitsandbytes, whose 4-bit values are nf4 or fp4, not integers"},
    {"weight:qdata", "it belongs to torchao, whose names and layouts change between versions"},
    {"weight:scale", "it belongs to torchao, whose names and layouts change between versions"},
    {"_weight_qdata", "it belongs to torchao, whose names and layouts change between versions"},
    {"weight_g_idx", "it belongs to activation ordering, in which a group's features are not adjacent"},
    {"weight_scale_inv", "it belongs to fp8 weights with block scales"},
    {"weight_global_scale", "it belongs to fp4 weights"},
    {"input_scale", "it belongs to activations with a fixed scale; here each row of x has its own"},
    {"input_zero_point", "it belongs to asymmetric activations"},
};

void refuse_others(const SafetensorsFile& file, std::string_view layer) {
  for (const RefusedTensor& refused : kRefused) {
    const std::string name = in_layer(layer, refused.name);
    if (!file.contains(name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} has {}, which isn't read", file.path(), in_quotes(name)), refused.why,
         std::string(kReadFormats));
  }
}

std::optional<TensorSource> find_in(const SafetensorsFile& file, std::string_view layer, std::string_view tensor) {
  const std::string name = in_layer(layer, tensor);
  if (!file.contains(name)) return std::nullopt;
  return file.tensor(name);
}

TensorSource need_in(const SafetensorsFile& file, const LayerTensors& layer, std::string_view tensor) {
  if (const auto found = find_in(file, layer.name, tensor)) return *found;
  fail(ErrorCode::kFile, fmt::format("{} lacks {}", file.path(), in_quotes(in_layer(layer.name, tensor))),
       fmt::format("{} is {}, which has it", layer.weight.text(), layer_format_name(layer.format)),
       "Copy all tensors of the layer.");
}

std::string layer_of(std::string_view tensor) {
  const std::size_t dot = tensor.rfind('.');
  return std::string(dot == std::string_view::npos ? std::string_view{} : tensor.substr(0, dot));
}

bool is_weight_name(std::string_view tensor) {
  return std::ranges::find(kWeightNames, tensor.substr(tensor.rfind('.') + 1)) != kWeightNames.end();
}

// The last axis of qweight has N elements in GPTQ. In AWQ it has N values, several in each word.
LayerFormat packed_format(const LayerTensors& layer) {
  const std::vector<std::int64_t>& shape = layer.weight.info->shape;
  const std::vector<std::int64_t>& scales = layer.scales->info->shape;
  const bool matrices = shape.size() == 2 && scales.size() == 2;
  return layer.group_index || !matrices || shape[1] == scales[1] ? LayerFormat::kGptq : LayerFormat::kAwq;
}

}  // namespace

std::string weights_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return path;
  const std::filesystem::path single = std::filesystem::path(path) / "model.safetensors";
  const std::filesystem::path index = single.string() + std::string(kIndexSuffix);
  const bool has_index = std::filesystem::exists(index, error);
  if (has_index || std::filesystem::exists(single, error)) return (has_index ? index : single).string();
  fail(ErrorCode::kFile, fmt::format("{} has neither model.safetensors nor its index", path),
       "a model's folder has one of them", "Name the file that has the weights.");
}

std::string_view layer_format_name(LayerFormat format) {
  constexpr std::string_view kNames[] = {"float", "int-quantized", "pack-quantized", "gptq", "awq"};
  return kNames[static_cast<std::size_t>(format)];
}

std::string LayerTensors::text() const {
  return name.empty() ? fmt::format("the layer of {}", weight.shard->path())
                      : fmt::format("layer {} of {}", in_quotes(name), weight.shard->path());
}

std::vector<TensorSource> LayerTensors::sources() const {
  std::vector<TensorSource> all{weight};
  for (const auto* const part : {&scales, &zeros, &shape, &group_index, &bias}) {
    if (*part) all.push_back(**part);
  }
  return all;
}

std::vector<std::string> layer_names(const SafetensorsFile& file) {
  std::vector<std::string> layers;
  for (const std::string_view name : file.names()) {
    if (!is_weight_name(name) || file.tensor(name).info->shape.size() != 2) continue;
    layers.push_back(layer_of(name));
  }
  std::ranges::sort(layers);
  layers.erase(std::ranges::unique(layers).begin(), layers.end());
  return layers;
}

bool has_layer(const SafetensorsFile& file, std::string_view name) {
  return std::ranges::any_of(kWeightNames,
                             [&](std::string_view tensor) { return file.contains(in_layer(name, tensor)); });
}

LayerTensors find_layer(const SafetensorsFile& file, std::string_view name) {
  LayerTensors layer;
  if (file.contains(name) && !is_weight_name(name)) {  // a matrix with any other name
    layer.weight = file.tensor(name);
    return layer;
  }
  layer.name = file.contains(name) ? layer_of(name) : std::string(name);
  refuse_others(file, layer.name);
  for (const std::string_view tensor : kWeightNames) {
    const auto found = find_in(file, layer.name, tensor);
    if (!found) continue;
    if (layer.weight.info != nullptr) {
      require(false, *found, fmt::format("{}, and a layer has one weight", described(layer.weight)),
              "Leave one of them out.");
    }
    layer.weight = *found;
  }
  if (layer.weight.info == nullptr) static_cast<void>(file.tensor(name));  // throws, with the nearest name
  layer.bias = find_in(file, layer.name, "bias");
  const std::string_view weight =
      std::string_view(layer.weight.info->name).substr(layer.name.empty() ? 0 : layer.name.size() + 1);
  if (weight == "weight_packed") {
    layer.format = LayerFormat::kPackQuantized;
    layer.scales = need_in(file, layer, "weight_scale");
    layer.shape = need_in(file, layer, "weight_shape");
    layer.zeros = find_in(file, layer.name, "weight_zero_point");
  } else if (weight == "qweight") {
    layer.format = LayerFormat::kGptq;
    layer.scales = need_in(file, layer, "scales");
    layer.zeros = need_in(file, layer, "qzeros");
    layer.group_index = find_in(file, layer.name, "g_idx");
    layer.format = packed_format(layer);
  } else if (layer.weight.info->dtype == FileDtype::kI8) {
    layer.format = LayerFormat::kIntQuantized;
    layer.scales = need_in(file, layer, "weight_scale");
    layer.zeros = find_in(file, layer.name, "weight_zero_point");
  } else if (const auto scales = find_in(file, layer.name, "weight_scale")) {
    require(false, layer.weight, fmt::format("the file also has {}", in_quotes(scales->info->name)),
            std::string(kReadFormats));
  }
  return layer;
}

}  // namespace ringattn
