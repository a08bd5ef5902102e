// SPDX-License-Identifier: Apache-2.0
// Linear layers in files: every format gives one form, whole and in parts; what is not read is refused by name.
#include "ops/linear/layer_weights.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "ops/linear/round_to_nearest.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/layer_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr std::string_view kLayer = "model.layers.0.mlp.down_proj";
const std::string kPrefix = std::string(kLayer) + ".";

QuantizationConfig gptq_config(bool less_one) { return {"config.json", QuantMethod::kGptq, less_one}; }

// A part of a layer as kernels have it.
struct ReadPart {
  std::vector<std::byte> data;
  std::vector<float> scales;
  std::vector<std::uint8_t> zeros;

  bool operator==(const ReadPart&) const = default;
};

ReadPart read_part(const LayerWeights& layer, FeatureRange rows, FeatureRange features) {
  ReadPart part;
  const auto scales = static_cast<std::size_t>(rows.size() * row_scales(layer.format(), features.size()));
  part.data.resize(
      static_cast<std::size_t>(rows.size() * weight_row_bytes(layer.format(), layer.dtype(), features.size())));
  part.scales.resize(scales);
  part.zeros.resize(layer.has_zeros() ? scales : 0);
  layer.read(rows, features, part.data.data());
  layer.read_scales(rows, features, part.scales.data(), part.zeros.data());
  return part;
}

// The same of the values that the layer was made of.
ReadPart expected_part(const Int4Layer& layer, bool zeros, FeatureRange rows, FeatureRange features) {
  ReadPart part;
  for (std::int64_t n = rows.begin; n < rows.end; ++n) {
    for (std::int64_t k = features.begin; k < features.end; k += 2) {
      part.data.push_back(static_cast<std::byte>(layer.q(n, k) | layer.q(n, k + 1) << 4));
    }
    for (std::int64_t group = features.begin / 128; group < features.end / 128; ++group) {
      part.scales.push_back(layer.scale(n, group));
      if (zeros) part.zeros.push_back(static_cast<std::uint8_t>(layer.zero(n, group)));
    }
  }
  return part;
}

struct FormatCase {
  std::string name;
  bool zeros;
  std::function<void(const Int4Layer&, LayerFile&)> fill;
  std::optional<QuantizationConfig> config = std::nullopt;
};

TEST(LayerWeights, EveryInt4FormatGivesOneForm) {
  const FormatCase cases[] = {
      {"pack-quantized", false,
       [](const Int4Layer& layer, LayerFile& file) { layer.pack_quantized(file, kPrefix, false); }},
      {"pack-quantized", true,
       [](const Int4Layer& layer, LayerFile& file) { layer.pack_quantized(file, kPrefix, true); }},
      {"gptq", true, [](const Int4Layer& layer, LayerFile& file) { layer.gptq(file, kPrefix, 1); }, gptq_config(true)},
      {"gptq", true, [](const Int4Layer& layer, LayerFile& file) { layer.gptq(file, kPrefix, 0); }, gptq_config(false)},
      {"awq", true, [](const Int4Layer& layer, LayerFile& file) { layer.awq(file, kPrefix); }}};
  const TemporaryFolder folder;
  for (const FormatCase& format : cases) {
    const Int4Layer layer{40, 640};
    LayerFile file;
    format.fill(layer, file);
    file.write(folder.file("layer.safetensors"));
    const SafetensorsFile opened(folder.file("layer.safetensors"));
    EXPECT_EQ(layer_names(opened), std::vector{std::string(kLayer)});
    const LayerWeights weights(find_layer(opened, kLayer), format.config);
    EXPECT_EQ(layer_format_name(weights.tensors().format), format.name);
    EXPECT_EQ(weights.out_features(), 40);
    EXPECT_EQ(weights.in_features(), 640);
    EXPECT_EQ(weights.has_zeros(), format.zeros);
    // Rows that begin within a word of AWQ, and none at all.
    for (const FeatureRange rows : {FeatureRange{0, 40}, {3, 21}, {39, 40}, {7, 7}}) {
      for (const FeatureRange features : {FeatureRange{0, 640}, {128, 512}, {512, 640}}) {
        EXPECT_EQ(read_part(weights, rows, features), expected_part(layer, format.zeros, rows, features))
            << format.name << ", rows from " << rows.begin << ", features from " << features.begin;
      }
    }
  }
}

TEST(LayerWeights, ReadsInt8AndFloatInParts) {
  const TemporaryFolder folder;
  LayerFile file;
  int8_layer(file, kPrefix, 9, 33);
  std::vector<float> values;
  for (int i = 0; i < 9 * 33; ++i) values.push_back(static_cast<float>(i));
  file.set("plain.weight", FileDtype::kF32, {9, 33}, values);
  file.write(folder.file("layers.safetensors"));
  const SafetensorsFile opened(folder.file("layers.safetensors"));
  const LayerWeights int8(find_layer(opened, kPrefix + "weight"), std::nullopt);
  const LayerWeights plain(find_layer(opened, "plain"), std::nullopt);
  EXPECT_EQ(int8.tensors().name, kLayer) << "a tensor of the layer names it, too";
  const ReadPart all = read_part(int8, {0, 9}, {0, 33});
  const ReadPart part = read_part(int8, {2, 5}, {7, 20});
  const ReadPart floats = read_part(plain, {2, 5}, {7, 20});
  for (std::int64_t n = 0; n < 3; ++n) {
    EXPECT_EQ(part.scales[static_cast<std::size_t>(n)], (n + 2) % 2 == 0 ? 0x1p-7F : 0x1p-9F);
    for (std::int64_t k = 0; k < 13; ++k) {
      const auto from = static_cast<std::size_t>((n + 2) * 33 + k + 7), to = static_cast<std::size_t>(n * 13 + k);
      EXPECT_EQ(part.data[to], all.data[from]);
      EXPECT_EQ(load_element(&floats.data[4 * to], Dtype::kF32), values[from]);
    }
  }
}

struct Refusal {
  const char* what;
  std::function<void(LayerFile&)> change;
  const char* text;   // of the message
  bool read = false;  // found when the scales are read
  std::optional<QuantizationConfig> config = gptq_config(true);
};

void expect_refused(const Refusal& refusal, LayerFile file) {
  const TemporaryFolder folder;
  refusal.change(file);
  file.write(folder.file("layer.safetensors"));
  const SafetensorsFile opened(folder.file("layer.safetensors"));
  const Error error = error_of([&] {
    const LayerWeights weights(find_layer(opened, kLayer), refusal.config);
    if (refusal.read) read_part(weights, {0, weights.out_features()}, {0, weights.in_features()});
  });
  EXPECT_EQ(error.code(), ErrorCode::kFile) << refusal.what;
  const std::string message = error.what();
  EXPECT_NE(message.find(refusal.text), std::string::npos) << refusal.what << ": " << message;
  EXPECT_NE(message.find("). "), std::string::npos) << refusal.what << ": " << message;
}

TEST(LayerWeights, GptqThatIsNotReadIsRefused) {
  LayerFile whole;
  Int4Layer().gptq(whole, kPrefix, 1);
  const auto shaped = [](const char* name, FileDtype dtype, std::vector<std::int64_t> shape) {
    return [=](LayerFile& file) { file.set_zeros(kPrefix + name, dtype, shape); };
  };
  const Refusal refusals[] = {
      {"no config", [](LayerFile&) {}, "is of GPTQ, and no config says how its zeros are stored", false, std::nullopt},
      {"another method's config", [](LayerFile&) {}, "is of gptq (config.json says awq)", false,
       QuantizationConfig{"config.json", QuantMethod::kAwq}},
      {"act-order",
       [](LayerFile& file) {
         std::vector<std::int32_t> index;
         for (int k = 0; k < 256; ++k) index.push_back(k % 2);
         file.set(kPrefix + "g_idx", FileDtype::kI32, {256}, index);
       },
       "feature 1 is in group 1: the layer has activation ordering (desc_act)"},
      {"8 bits", shaped("qzeros", FileDtype::kI32, {2, 6}), "24 rows of W have 8 bits for each zero"},
      {"groups of 64", shaped("scales", FileDtype::kF16, {4, 24}), "it has groups of 64 of 256 features"},
      {"a short g_idx", shaped("g_idx", FileDtype::kI32, {255}), "it must be [256]"},
      {"a wrong dtype", shaped("qweight", FileDtype::kI64, {32, 24}), "it must be I32"},
      {"no zeros", [](LayerFile& file) { file.tensors.erase(kPrefix + "qzeros"); }, ".qzeros` (`"},
      {"NaN as a scale", [](LayerFile& file) { file.tensors[kPrefix + "scales"].bytes[1] = std::byte{0x7e}; },
       "has a scale nan at row 0 of W, group 0 (a scale is finite and not negative)", true},
      {"a negative scale", [](LayerFile& file) { file.tensors[kPrefix + "scales"].bytes[1] |= std::byte{0x80}; },
       "has a scale -", true},
      {"a zero of 16", [](LayerFile& file) { file.tensors[kPrefix + "qzeros"].bytes[0] |= std::byte{0x0f}; },
       "has a zero stored as 15 at row 0 of W, group 0", true},
      {"two weights", shaped("weight", FileDtype::kF16, {24, 256}), "and a layer has one weight"},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal, whole);
}

TEST(LayerWeights, OtherFormatsAreRefusedByName) {
  const auto only = [](const char* name, FileDtype dtype, std::vector<std::int64_t> shape) {
    return [=](LayerFile& file) { file.set_zeros(kPrefix + name, dtype, shape); };
  };
  LayerFile pack, awq, int8, plain;
  Int4Layer().pack_quantized(pack, kPrefix, true);
  Int4Layer().awq(awq, kPrefix);
  int8_layer(int8, kPrefix, 24, 256);
  plain.set_zeros(kPrefix + "weight", FileDtype::kBf16, {24, 256});
  const std::pair<const LayerFile*, Refusal> refusals[] = {
      {&plain, {"bitsandbytes, 4 bits", only("weight.absmax", FileDtype::kF32, {96}), "it belongs to bitsandbytes"}},
      {&int8, {"bitsandbytes, 8 bits", only("SCB", FileDtype::kF32, {24}), "it belongs to bitsandbytes (LLM.int8)"}},
      {&plain, {"torchao", only("_weight_qdata", FileDtype::kI8, {24, 256}), "it belongs to torchao"}},
      {&plain, {"fp8 blocks", only("weight_scale_inv", FileDtype::kF32, {1, 2}), "fp8 weights"}},
      {&plain, {"scales of float", only("weight_scale", FileDtype::kF32, {24, 1}), "the file also has"}},
      {&int8, {"a fixed scale of x", only("input_scale", FileDtype::kF32, {1}), "each row of x has its own"}},
      {&int8, {"asymmetric int8", only("weight_zero_point", FileDtype::kI8, {24, 1}), "have no zero points"}},
      {&int8, {"int8 in groups", only("weight_scale", FileDtype::kF32, {24, 2}), "one scale for each of 24 rows"}},
      {&int8, {"one scale", only("weight_scale", FileDtype::kF32, {1}), "one scale for each of 24 rows"}},
      {&pack, {"act-order", only("weight_g_idx", FileDtype::kI32, {256}), "activation ordering"}},
      {&pack, {"8 bits packed", only("weight_packed", FileDtype::kI32, {24, 64}), "256 features has 8 bits for each"}},
      {&pack, {"groups of 32", only("weight_scale", FileDtype::kF16, {24, 8}), "groups of 32 of 256 features"}},
      {&pack, {"one scale a row", only("weight_scale", FileDtype::kF16, {24, 1}), "groups of 256 of 256 features"}},
      {&pack, {"swapped shape", only("weight_packed", FileDtype::kI32, {32, 24}), "it must hold the shape"}},
      {&pack, {"zeros along K", only("weight_zero_point", FileDtype::kI32, {24, 1}), "it must be [3, 2]"}},
      {&awq, {"8 bits", only("qweight", FileDtype::kI32, {256, 6}), "have 8 bits a value"}},
      {&awq, {"groups of 64", only("scales", FileDtype::kF16, {4, 24}), "groups of 64 of 256 features"}},
      {&awq, {"swapped zeros", only("qzeros", FileDtype::kI32, {3, 2}), "it must be [2, 3]"}},
  };
  for (const auto& [file, refusal] : refusals) {
    Refusal of = refusal;
    of.config = std::nullopt;
    expect_refused(of, *file);
  }
}

TEST(QuantizationConfigs, SayWhatTensorsDoNot) {
  const auto config = [](const std::string& members) {
    return parse_quantization_config("{\"quantization_config\": {" + members + "}}", "c.json");
  };
  EXPECT_FALSE(parse_quantization_config("{\"model_type\": \"llama\"}", "c.json"));
  const std::string gptq = R"("quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true)";
  EXPECT_TRUE(config(gptq)->zeros_less_one) << "without checkpoint_format it is the first one";
  EXPECT_FALSE(config(gptq + R"(, "checkpoint_format": "gptq_v2")")->zeros_less_one);
  EXPECT_TRUE(parse_quantization_config(R"({"bits": 4, "group_size": 128})", "quantize_config.json")->zeros_less_one);
  const std::string tensors = R"("quant_method": "compressed-tensors", )";
  const auto activations = [&](const std::string& members) {
    return tensors + R"("config_groups": {"group_0": {"weights": {"type": "int"}, "input_activations": {)" + members +
           "}}}";
  };
  EXPECT_TRUE(config(activations(R"("num_bits": 8, "dynamic": true, "strategy": "token", "symmetric": true)")));
  // A config of one group; the group's own format goes first.
  const auto group = [&](const std::string& format, int bits, const std::string& more) {
    return tensors + fmt::format(R"("format": "{}", "config_groups": {{"g": {{"weights": {{"num_bits": {}}}{}}}}})",
                                 format, bits, more);
  };
  const std::string none = R"(, "input_activations": null)";
  const std::string int8 = R"(, "input_activations": {"num_bits": 8, "dynamic": true})";
  for (const std::string& read :
       {group("int-quantized", 8, int8), group("int-quantized", 4, int8), group("pack-quantized", 4, none),
        group("pack-quantized", 4, ""), group("mixed-precision", 8, R"(, "format": "pack-quantized")"),
        group("dense", 8, none)}) {
    EXPECT_TRUE(config(read)) << read;
  }
  const std::pair<std::string, std::string> refused[] = {
      {R"("quant_method": "bitsandbytes", "load_in_4bit": true)", "quant_method is `bitsandbytes`"},
      {R"("quant_method": "torchao")", "quant_method is `torchao`"},
      {R"("bits": 4)", "quant_method is missing"},
      {R"("quant_method": "gptq", "bits": 8)", "bits is 8"},
      {R"("quant_method": "gptq", "bits": 4, "group_size": -1)", "group_size is"},
      {R"("quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin")", "checkpoint_format is `marlin`"},
      {R"("quant_method": "awq", "bits": 4, "version": "gemv")", "version is `gemv`"},
      {tensors + R"("format": "float-quantized")", "format is `float-quantized`"},
      {tensors + R"("config_groups": {"g": {"weights": {"type": "float"}}})", "type of weights is `float`"},
      {group("int-quantized", 8, none), "input_activations is null (x of a layer with int8 weights is quantized"},
      {group("int-quantized", 8, ""), "input_activations is missing"},
      {group("mixed-precision", 8, none), "input_activations is null"},
      {group("pack-quantized", 4, int8), "input_activations is an object (x of a layer with int4 weights is not"},
      {group("mixed-precision", 4, int8), "input_activations is an object"},
      {activations(R"("dynamic": false)"), "dynamic of input_activations is false"},
      {activations(R"("dynamic": true, "symmetric": false)"), "symmetric of input_activations is false"},
      {activations(R"("dynamic": true, "num_bits": 4)"), "num_bits is 4"},
      {activations(R"("dynamic": true, "strategy": "tensor")"), "strategy of input_activations is `tensor`"},
  };
  for (const auto& [members, text] : refused) {
    const Error error = error_of([&, members = members] { config(members); });
    EXPECT_NE(std::string(error.what()).find("c.json: " + text), std::string::npos) << error.what();
  }
}

TEST(RoundToNearest, RoundsRelativeToTheStoredScale) {
  std::int8_t integers[4];
  const float values[] = {-1.0F, 0.5F, 0.3F, 0.0F};
  const RoundedValues int8 = round_to_nearest(values, {WeightFormat::kInt8, Dtype::kF32}, integers);
  EXPECT_EQ(int8.scale, 1.0F / 127.5F);
  EXPECT_EQ((std::vector<int>(integers, integers + 4)), (std::vector{-127, 64, 38, 0}));
  const RoundedValues int4 = round_to_nearest(values, {WeightFormat::kInt4, Dtype::kBf16}, integers);
  EXPECT_EQ(int4.scale, bf16_to_float(float_to_bf16(1.0F / 7.5F)));
  EXPECT_EQ((std::vector<int>(integers, integers + 4)), (std::vector{-7, 4, 2, 0}));
  const float zeros[] = {0.0F, -0.0F};
  EXPECT_EQ(round_to_nearest(zeros, {WeightFormat::kInt4, Dtype::kF16}, integers).scale, 1.0F);
  // amax / 127.5 is below fp16's least number.
  const float tiny[] = {0x1p-20F, -0x1p-24F};
  EXPECT_EQ(round_to_nearest(tiny, {WeightFormat::kInt8, Dtype::kF16}, integers).scale, 0x1p-24F);
  EXPECT_EQ(integers[0], 16);
  EXPECT_EQ(integers[1], -1);
}

TEST(RoundToNearest, SearchTakesTheLeastSquaredErrorOfItsScales) {
  std::vector<float> values;
  for (int i = 0; i < 128; ++i) values.push_back(static_cast<float>((37 * i) % 64 - 32) / 64.0F);
  values[5] = 1.0F;  // an outlier that a smaller scale clips
  std::vector<std::int8_t> integers(128);
  const RoundedValues plain = round_to_nearest(values, {WeightFormat::kInt4, Dtype::kF32}, integers.data());
  const RoundedValues best = round_to_nearest(values, {WeightFormat::kInt4, Dtype::kF32, true}, integers.data());
  EXPECT_LT(best.squared_error, plain.squared_error);
  double error = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    error += std::pow(static_cast<double>(values[i]) - static_cast<double>(best.scale) * integers[i], 2.0);
  }
  EXPECT_EQ(error, best.squared_error);
}

}  // namespace
}  // namespace ringattn::testing
