// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/quotes.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "io/layer_tensors.hpp"
#include "io/quantization_config.hpp"
#include "io/safetensors_rows.hpp"
#include "io/tensor_checks.hpp"
#include "ops/linear/layer_weights.hpp"

using namespace ringattn;
using namespace ringattn::c;

struct ringattn_layer {
  explicit ringattn_layer(const std::string& path) : file(path) {}

  SafetensorsFile file;
  std::optional<LayerWeights> weights;
  std::string format;
};

namespace {

constexpr std::size_t kFirstFacts = 56;

DLDataType dl_type(Dtype dtype) {
  if (dtype == Dtype::kF32) return {kDLFloat, 32, 1};
  return {static_cast<std::uint8_t>(dtype == Dtype::kBf16 ? kDLBfloat : kDLFloat), 16, 1};
}

void open_layer(ringattn_layer& layer, std::string name, const char* config) {
  if (name.empty() && !has_layer(layer.file, "")) {
    const std::vector<std::string> names = layer_names(layer.file);
    if (names.size() > 1) {
      fail(ErrorCode::kFile, fmt::format("{} has {} layers", layer.file.path(), names.size()),
           fmt::format("{} and {} are two of them", in_quotes(names[0]), in_quotes(names[1])), "Name one.");
    }
    name = names.empty() ? "weight" : names.front();
  }
  LayerTensors tensors = find_layer(layer.file, name);
  std::optional<QuantizationConfig> said;
  if (config != nullptr) {
    said = read_quantization_config(config);
  } else if (tensors.format != LayerFormat::kFloat) {
    said = quantization_config_beside(layer.file.path());
  }
  const bool v2 = tensors.format == LayerFormat::kGptq && said && !said->zeros_less_one;
  layer.format = fmt::format("{}{}", layer_format_name(tensors.format), v2 ? "_v2" : "");
  layer.weights.emplace(std::move(tensors), said);
  const LayerTensors& found = layer.weights->tensors();
  if (!found.bias) return;
  static_cast<void>(row_dtype(*found.bias));
  require(entries(*found.bias) == layer.weights->out_features(), *found.bias,
          fmt::format("the weight has {} rows", layer.weights->out_features()), "Give one element for each of them.");
}

void check_range(const char* what, std::int64_t begin, std::int64_t count, std::int64_t whole, std::int64_t unit) {
  if (begin >= 0 && count >= 0 && begin <= whole && count <= whole - begin && begin % unit == 0 && count % unit == 0) {
    return;
  }
  fail(ErrorCode::kUsage, fmt::format("{} {} from {} on", count, what, begin),
       unit == 1 ? fmt::format("the layer has {}", whole)
                 : fmt::format("the layer has {}, in groups of {}", whole, unit),
       "Check the range.");
}

}  // namespace

extern "C" {

ringattn_status ringattn_layer_open(const char* path, const char* name, const char* config, ringattn_layer** layer) {
  return guarded([&] {
    need(path, "path");
    need(layer, "layer");
    auto made = std::make_unique<ringattn_layer>(weights_file(path));
    open_layer(*made, name == nullptr ? "" : name, config);
    *layer = made.release();
  });
}

ringattn_status ringattn_layer_get_facts(const ringattn_layer* layer, ringattn_layer_facts* facts) {
  return guarded([&] {
    need(layer, "layer");
    const LayerWeights& weights = *layer->weights;
    const LayerTensors& tensors = weights.tensors();
    write_struct("ringattn_layer_facts",
                 {0, weights.out_features(), weights.in_features(), layer->format.c_str(), tensors.name.c_str(),
                  dl_type(weights.dtype()), static_cast<std::int32_t>(weights.format()), weights.has_zeros() ? 1 : 0,
                  tensors.bias ? dl_type(row_dtype(*tensors.bias)) : DLDataType{}},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_layer_read(const ringattn_layer* layer, int64_t row, int64_t rows, int64_t feature,
                                    int64_t features, void* values, float* scales, uint8_t* zeros, void* bias) {
  return guarded([&] {
    need(layer, "layer");
    const LayerWeights& weights = *layer->weights;
    check_range("rows", row, rows, weights.out_features(), 1);
    check_range("features", feature, features, weights.in_features(),
                weights.format() == WeightFormat::kInt4 ? kInt4Group : 1);
    const FeatureRange of_rows{row, row + rows}, of_features{feature, feature + features};
    const std::optional<TensorSource>& own_bias = weights.tensors().bias;
    if (scales != nullptr && weights.format() == WeightFormat::kFloat) {
      fail(ErrorCode::kUsage, "scales is given", "the layer has none", "Pass NULL.");
    }
    if (zeros != nullptr && !weights.has_zeros()) {
      fail(ErrorCode::kUsage, "zeros is given", "the layer has none", "Pass NULL.");
    }
    if (weights.has_zeros() && (zeros == nullptr) != (scales == nullptr)) {
      fail(ErrorCode::kUsage, "only one of scales and zeros is given", "they are read together", "Pass both.");
    }
    if (bias != nullptr && !own_bias) {
      fail(ErrorCode::kUsage, "bias is given", "the layer has none", "Pass NULL.");
    }
    if (values != nullptr) weights.read(of_rows, of_features, static_cast<std::byte*>(values));
    if (scales != nullptr) weights.read_scales(of_rows, of_features, scales, zeros);
    if (bias == nullptr) return;
    const auto element = static_cast<std::int64_t>(size_of(row_dtype(*own_bias)));
    own_bias->shard->read(*own_bias->info, row * element,
                          {static_cast<std::byte*>(bias), static_cast<std::size_t>(rows * element)});
  });
}

void ringattn_layer_destroy(ringattn_layer* layer) { ringattn::c::destroy(layer); }

}  // extern "C"
