// SPDX-License-Identifier: Apache-2.0
#include "io/quantization_config.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/error.hpp"
#include "base/quotes.hpp"
#include "base/text_file.hpp"
#include "io/json_tree.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr JsonLimits kConfigLimits{16, std::size_t{1} << 18, std::size_t{1} << 24};
constexpr std::size_t kMostConfigBytes = std::size_t{1} << 24;
constexpr std::string_view kRead = "int8 weights with a scale for each row and int4 weights in groups of 128 are read.";

constexpr std::string_view method_name(QuantMethod method) {
  constexpr std::string_view kNames[] = {"compressed-tensors", "gptq", "awq"};
  return kNames[static_cast<std::size_t>(method)];
}

// A value as messages show it.
std::string shown(const JsonNode& node) {
  if (node.is_number()) return fmt::format("{}", node.number);
  return node.is_string() ? in_quotes(node.text) : node.kind == JsonNode::Kind::kOther ? node.text : kind_text(node);
}

class ConfigReader {
 public:
  explicit ConfigReader(const std::string& path) : path_(path) {}

  [[noreturn]] void refuse(std::string_view key, std::string_view value, std::string_view why,
                           const MessageTemplate& suggestion = kRead) const {
    fail(ErrorCode::kFile, fmt::format("{}: {} is {}", path_, key, value), std::string(why), suggestion);
  }
  // Refuses a member that is present, not null, and not equal to this number.
  void need_number(const JsonNode& object, std::string_view key, double wanted, std::string_view why) const {
    const JsonNode* const found = object.member(key);
    if (found == nullptr || found->is_null() || (found->is_number() && found->number == wanted)) return;
    refuse(key, shown(*found), why);
  }
  std::string text(const JsonNode& object, std::string_view key) const {
    const JsonNode* const found = object.member(key);
    if (found == nullptr || found->is_null()) return {};
    if (!found->is_string()) refuse(key, shown(*found), "it must be a string", "Check how it was written.");
    return found->text;
  }

 private:
  const std::string& path_;
};

void read_gptq(const ConfigReader& reader, const JsonNode& config, QuantizationConfig& made) {
  reader.need_number(config, "bits", 4, "GPTQ layers of 4 bits are read");
  reader.need_number(config, "group_size", 128, "groups of 128 are read");
  // desc_act: a layer's g_idx says whether its features are reordered.
  const std::string format = reader.text(config, "checkpoint_format");
  if (!format.empty() && format != "gptq" && format != "gptq_v2") {
    reader.refuse("checkpoint_format", in_quotes(format), "it is another layout of the values",
                  "gptq and gptq_v2 are read.");
  }
  made.zeros_less_one = format != "gptq_v2";
}

void read_awq(const ConfigReader& reader, const JsonNode& config) {
  reader.need_number(config, "bits", 4, "AWQ layers of 4 bits are read");
  reader.need_number(config, "group_size", 128, "groups of 128 are read");
  const std::string version = reader.text(config, "version");
  if (version.empty() || version == "gemm" || version == "GEMM") return;
  reader.refuse("version", in_quotes(version), "it is another layout of the values", "The version gemm is read.");
}

// Refuses W8A16 and W4A8, which no kernel computes. If the format is given, it decides instead of the bits:
// int-quantized layers have W8A8 kernels, and pack-quantized ones W4A16 kernels. "dense" layers are not quantized.
void check_activations(const ConfigReader& reader, const JsonNode& weights, const JsonNode* inputs,
                       std::string_view format) {
  const JsonNode* const found = weights.member("num_bits");
  const double bits = found != nullptr && found->is_number() ? found->number : 0.0;
  const bool is_stored = format == "int-quantized" || format == "pack-quantized" || format == "dense";
  const bool is_int8 = is_stored ? format == "int-quantized" : bits == 8.0;
  const bool is_int4 = is_stored ? format == "pack-quantized" : bits == 4.0;
  const bool is_given = inputs != nullptr && !inputs->is_null();
  const std::string_view read = "int8 layers with int8 activations (W8A8) and int4 layers without (W4A16) are read.";
  if (is_int8 && !is_given) {
    reader.refuse("input_activations", inputs == nullptr ? "missing" : "null",
                  "x of a layer with int8 weights is quantized to int8", read);
  }
  if (is_int4 && is_given) {
    reader.refuse("input_activations", kind_text(*inputs), "x of a layer with int4 weights is not quantized", read);
  }
}

// Checks only what the tensors of a layer don't determine.
void check_group(const ConfigReader& reader, const JsonNode& group, const std::string& config_format) {
  const JsonNode* const weights = group.member("weights");
  if (weights == nullptr || !weights->is_object()) return;
  const std::string type = reader.text(*weights, "type");
  if (!type.empty() && type != "int") reader.refuse("type of weights", in_quotes(type), "weights are integers");
  const JsonNode* const inputs = group.member("input_activations");
  const std::string format = reader.text(group, "format");
  check_activations(reader, *weights, inputs, format.empty() ? config_format : format);
  if (inputs == nullptr || !inputs->is_object()) return;
  reader.need_number(*inputs, "num_bits", 8, "x of a layer with int8 weights is quantized to int8");
  const JsonNode* const symmetric = inputs->member("symmetric");
  const JsonNode* const dynamic = inputs->member("dynamic");
  if (symmetric != nullptr && symmetric->kind == JsonNode::Kind::kFalse) {
    reader.refuse("symmetric of input_activations", "false", "x is quantized without a zero point");
  }
  if (dynamic != nullptr && dynamic->kind != JsonNode::Kind::kTrue) {
    reader.refuse("dynamic of input_activations", shown(*dynamic), "each row of x has a scale of its own");
  }
  const std::string strategy = reader.text(*inputs, "strategy");
  if (strategy.empty() || strategy == "token") return;
  reader.refuse("strategy of input_activations", in_quotes(strategy), "each row of x has a scale of its own");
}

void read_compressed_tensors(const ConfigReader& reader, const JsonNode& config) {
  const std::string format = reader.text(config, "format");
  const bool known = format.empty() || format == "int-quantized" || format == "pack-quantized" || format == "dense" ||
                     format == "mixed-precision";
  if (!known) reader.refuse("format", in_quotes(format), "it is another layout of the values");
  const JsonNode* const groups = config.member("config_groups");
  if (groups == nullptr || !groups->is_object()) return;
  for (const auto& [name, group] : groups->members) check_group(reader, group, format);
}

}  // namespace

void QuantizationConfig::check(const LayerTensors& layer) const {
  const LayerFormat format = layer.format;
  if (format == LayerFormat::kFloat) return;
  const QuantMethod of_layer = format == LayerFormat::kGptq  ? QuantMethod::kGptq
                               : format == LayerFormat::kAwq ? QuantMethod::kAwq
                                                             : QuantMethod::kCompressedTensors;
  if (of_layer == method) return;
  fail(ErrorCode::kFile, fmt::format("{} is of {}", layer.text(), layer_format_name(format)),
       fmt::format("{} says {}", path, method_name(method)), "Give the config.json that belongs to the file.");
}

std::optional<QuantizationConfig> parse_quantization_config(std::string_view text, const std::string& path) {
  const TextSource source{path, "JSON file", "It is the config.json of a model."};
  const JsonNode root = parse_json_object(text, source, kConfigLimits);
  const JsonNode* config = root.member("quantization_config");
  if (config == nullptr && root.member("bits") != nullptr) config = &root;  // a quantize_config.json
  if (config == nullptr || config->is_null()) return std::nullopt;
  const ConfigReader reader(path);
  if (!config->is_object()) {
    reader.refuse("quantization_config", kind_text(*config), "it must be an object", "Check how it was written.");
  }
  QuantizationConfig made{path};
  const std::string method = config == &root ? "gptq" : reader.text(*config, "quant_method");
  if (method == "gptq") {
    made.method = QuantMethod::kGptq;
    read_gptq(reader, *config, made);
  } else if (method == "awq") {
    made.method = QuantMethod::kAwq;
    read_awq(reader, *config);
  } else if (method == "compressed-tensors") {
    read_compressed_tensors(reader, *config);
  } else {
    reader.refuse("quant_method", method.empty() ? "missing" : in_quotes(method),
                  "compressed-tensors, gptq and awq are read",
                  {"Quantize the floating-point model with ", command("quantize"), "."});
  }
  return made;
}

std::optional<QuantizationConfig> read_quantization_config(const std::string& path) {
  return parse_quantization_config(read_text_file(path, kMostConfigBytes), path);
}

std::optional<QuantizationConfig> quantization_config_beside(const std::string& path) {
  const std::string config = (std::filesystem::path(path).parent_path() / "config.json").string();
  std::error_code error;
  if (!std::filesystem::exists(config, error)) return std::nullopt;
  return read_quantization_config(config);
}

}  // namespace ringattn
