// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/quantize_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/quotes.hpp"
#include "base/temporary_folder.hpp"
#include "base/text_file.hpp"
#include "io/json_tree.hpp"
#include "io/layer_tensors.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/linear/round_to_nearest.hpp"
#include "ops/linear/weight_source.hpp"

namespace ringattn {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModelFile = "model.safetensors";
constexpr std::string_view kConfigFile = "config.json";
constexpr std::string_view kMethod = "compressed-tensors";
constexpr std::string_view kWeightEnding = ".weight";
constexpr std::string_view kHead = "lm_head";
constexpr std::string_view kBlanks = " \t\r\n";  // of JSON
constexpr JsonLimits kModelConfigLimits{16, std::size_t{1} << 18, std::size_t{1} << 24};
constexpr std::size_t kMostModelConfigBytes = std::size_t{1} << 24;
constexpr std::int64_t kPieceBytes = std::int64_t{64} << 20;  // of a tensor, read at a time
// Models whose layers are Conv1D modules, with W [in_features, out_features].
constexpr std::string_view kTransposed[] = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"};
constexpr std::string_view kEmbeddings[] = {"wte", "wpe", "shared", "relative_attention_bias"};
constexpr std::string_view kOthers[] = {"gate", "router", "conv1d"};
constexpr std::string_view kCopiedEndings[] = {".json", ".txt", ".model", ".jinja"};

// The input's file, its folder if a folder was named, and its config's text.
struct ModelFiles {
  std::string weights;
  std::optional<fs::path> folder;
  std::string config_path;  // empty: there is none
  std::string config = "{}";
};

ModelFiles find_model(const std::string& input) {
  ModelFiles files;
  std::error_code error;
  files.weights = weights_file(input);
  if (fs::is_directory(input, error)) files.folder = input;
  const fs::path config = fs::path(files.weights).parent_path() / kConfigFile;
  if (!fs::exists(config, error)) return files;
  files.config_path = config.string();
  files.config = read_text_file(files.config_path, kMostModelConfigBytes);
  return files;
}

void check_config(const ModelFiles& files) {
  if (files.config_path.empty()) return;
  const TextSource source{files.config_path, "JSON file", "It is the config.json of a model."};
  const JsonNode root = parse_json_object(files.config, source, kModelConfigLimits);
  const JsonNode* const quantized = root.member("quantization_config");
  if (quantized != nullptr && !quantized->is_null()) {
    fail(ErrorCode::kFile, fmt::format("{} has quantization_config", files.config_path),
         "the model is quantized already", "Quantize the floating-point model.");
  }
  const JsonNode* const type = root.member("model_type");
  if (type == nullptr || std::ranges::find(kTransposed, type->text) == std::end(kTransposed)) return;
  fail(ErrorCode::kFile, fmt::format("{}: model_type is {}", files.config_path, in_quotes(type->text)),
       "its layers store [in_features, out_features] (Conv1D), which compressed-tensors does not quantize",
       "Quantize a model of nn.Linear layers.");
}

std::string_view last_name(std::string_view layer) { return layer.substr(layer.rfind('.') + 1); }

// Throws unless the folder is empty or holds the output of an earlier call. check_output_folder() knows files only by
// name.
void check_earlier_output(const std::string& output) {
  std::error_code error;
  if (!fs::exists(output, error)) return;
  const fs::path config = fs::path(output) / kConfigFile;
  if (fs::exists(config, error)) {
    const TextSource source{config.string(), "JSON file", "Choose another name for the output."};
    const JsonNode root =
        parse_json_object(read_text_file(source.path, kMostModelConfigBytes), source, kModelConfigLimits);
    const JsonNode* const method = root.at("quantization_config.quant_method");
    if (method != nullptr && method->text == kMethod) return;
  }
  fail(ErrorCode::kFile, fmt::format("can't write {}", output),
       fmt::format("it exists and has no {} of {}", kConfigFile, kMethod),
       "Choose another name; only an earlier output is replaced.");
}

bool is_embedding(std::string_view layer) {
  const std::string_view last = last_name(layer);
  return last.find("embed") != std::string_view::npos || std::ranges::find(kEmbeddings, last) != std::end(kEmbeddings);
}

// A name to ignore, in the form of compressed-tensors: the name of a layer, or "re:" and a regular expression for its
// beginning. The end of a layer's name, starting at a dot, also counts.
class IgnoredName {
 public:
  explicit IgnoredName(const std::string& name) : name_(name) {
    if (!name.starts_with(kExpression)) return;
    try {
      expression_.emplace(name.substr(kExpression.size()));
    } catch (const std::regex_error& error) {
      fail(ErrorCode::kUsage, {setting("ignore"), fmt::format(" has {}", in_quotes(name))}, error.what(),
           "Give a regular expression after re:, or the name of a layer.");
    }
  }

  const std::string& name() const { return name_; }
  bool matches(const std::string& layer) const {
    if (expression_) return std::regex_search(layer, *expression_, std::regex_constants::match_continuous);
    return layer == name_ || (layer.ends_with(name_) && layer[layer.size() - name_.size() - 1] == '.');
  }

 private:
  static constexpr std::string_view kExpression = "re:";
  std::string name_;
  std::optional<std::regex> expression_;
};

struct Selection {
  std::vector<std::string> layers, left;
};

Selection select(const SafetensorsFile& file, const QuantizeJob& job) {
  Selection selection;
  const std::vector<IgnoredName> names(job.ignore.begin(), job.ignore.end());
  std::vector<bool> used(names.size(), false);
  for (const std::string_view name : file.names()) {
    for (const std::string_view quantized : {".weight_packed", ".qweight", ".weight_scale", ".SCB", ".weight.absmax"}) {
      if (!name.ends_with(quantized)) continue;
      fail(ErrorCode::kFile, fmt::format("{} has {}", file.path(), in_quotes(name)), "the model is quantized already",
           "Quantize the floating-point model.");
    }
    if (!name.ends_with(kWeightEnding)) continue;
    const TensorInfo& info = *file.tensor(name).info;
    if (info.shape.size() != 2 || !attention_dtype(info.dtype) || info.bytes() == 0) continue;
    const std::string layer(name.substr(0, name.size() - kWeightEnding.size()));
    bool left = is_embedding(layer) || std::ranges::find(kOthers, last_name(layer)) != std::end(kOthers);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!names[i].matches(layer)) continue;
      used[i] = left = true;
    }
    (left ? selection.left : selection.layers).push_back(layer);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (used[i] || names[i].name() == kHead) continue;  // tied models have no lm_head
    const std::vector<std::string_view> layers(selection.layers.begin(), selection.layers.end());
    const std::string nearest = nearest_name(names[i].name(), layers.data(), layers.size());
    fail(ErrorCode::kUsage, {setting("ignore"), fmt::format(" names {}", in_quotes(names[i].name()))},
         fmt::format("no layer of {} is called so", file.path()),
         nearest.empty() ? "Give whole names, or their ends from a dot on." : fmt::format("Did you mean {}?", nearest));
  }
  if (!selection.layers.empty()) return selection;
  fail(ErrorCode::kFile, fmt::format("{} has no linear layers to quantize", file.path()),
       "none of its tensors is a matrix NAME.weight of F32, BF16 or F16 that is neither ignored nor an embedding",
       "Check the file.");
}

std::string tensor_of(const std::string& layer, std::string_view tensor) { return fmt::format("{}.{}", layer, tensor); }

// The tensors of a quantized layer.
void plan_layer(const std::string& layer, const TensorInfo& weight, WeightFormat format,
                std::vector<OutputTensor>& tensors) {
  const std::int64_t rows = weight.shape[0];
  const std::int64_t features = weight.shape[1];
  if (format == WeightFormat::kInt8) {
    if (features > kMaxInt8K) {
      fail(ErrorCode::kFile, fmt::format("layer {} has {} input features", in_quotes(layer), features),
           fmt::format("sums of int8 products fit into 32 bits up to {}", kMaxInt8K),
           {"Leave it out with ", setting("ignore"), "."});
    }
    tensors.push_back({tensor_of(layer, "weight"), FileDtype::kI8, {rows, features}});
    tensors.push_back({tensor_of(layer, "weight_scale"), weight.dtype, {rows, 1}});
    return;
  }
  if (features % kInt4Group != 0) {
    fail(ErrorCode::kFile, fmt::format("layer {} has {} input features", in_quotes(layer), features),
         fmt::format("int4 weights have groups of {}", kInt4Group),
         {"Leave it out with ", setting("ignore", layer), ", or use ", setting("format", "int8"), "."});
  }
  tensors.push_back({tensor_of(layer, "weight_packed"), FileDtype::kI32, {rows, features / 8}});
  tensors.push_back({tensor_of(layer, "weight_scale"), weight.dtype, {rows, features / kInt4Group}});
  tensors.push_back({tensor_of(layer, "weight_shape"), FileDtype::kI64, {2}});
}

// Names for `ignore`: all layers that are not quantized, because `targets` names all Linear modules, and a tensor
// doesn't say whether its module is one. The lm_head of a tied model has no tensor, but is a Linear too.
std::vector<std::string> ignored_names(const Selection& selection) {
  std::vector<std::string> names = selection.left;
  const auto is_head = [](const std::string& layer) { return last_name(layer) == kHead; };
  if (std::ranges::none_of(names, is_head) && std::ranges::none_of(selection.layers, is_head)) {
    names.emplace_back(kHead);
  }
  return names;
}

// The properties of the layers that compressed-tensors and vLLM need.
std::string quantization_config(const QuantizeJob& job, const std::vector<std::string>& ignored) {
  const bool int8 = job.format == WeightFormat::kInt8;
  JsonWriter json;
  const auto integers = [&](int bits, std::string_view strategy, bool dynamic) {
    json.begin_object().member("num_bits", bits).member("type", "int").member("symmetric", true);
    json.member("strategy", strategy).key("group_size");
    if (strategy == "group") {
      json.value(kInt4Group);
    } else {
      json.null();
    }
    json.member("dynamic", dynamic).end_object();
  };
  json.begin_object().member("quant_method", kMethod);
  json.member("format", compressed_format(job.format)).member("quantization_status", "compressed");
  json.key("config_groups").begin_object().key("group_0").begin_object();
  json.key("targets").begin_array(true).value("Linear").end_array();
  json.key("weights");
  integers(int8 ? 8 : 4, int8 ? "channel" : "group", false);
  json.key("input_activations");
  if (int8) {
    integers(8, "token", true);
  } else {
    json.null();
  }
  json.key("output_activations").null().end_object().end_object();
  json.key("ignore").begin_array();
  for (const std::string& layer : ignored) json.value(layer);
  json.end_array().key("kv_cache_scheme").null().end_object();
  return json.text();
}

// Offset of the value of the object's own member quantization_config, or npos if it has none. Nested configs, such as
// that of a vision model's text model, also have members of that name.
std::size_t own_quantization(const std::string& config) {
  int depth = 0;
  for (std::size_t at = 0; at < config.size(); ++at) {
    if (config[at] == '{' || config[at] == '[') ++depth;
    if (config[at] == '}' || config[at] == ']') --depth;
    if (config[at] != '"') continue;
    const std::size_t begin = at++;
    while (config[at] != '"') at += config[at] == '\\' ? 2 : 1;
    if (depth != 1 || std::string_view(config).substr(begin, at + 1 - begin) != "\"quantization_config\"") continue;
    const std::size_t colon = config.find_first_not_of(kBlanks, at + 1);
    if (config[colon] == ':') return config.find_first_not_of(kBlanks, colon + 1);
  }
  return std::string::npos;
}

// Replaces a null quantization_config (check_config()), or inserts one before the other members. These are not
// rewritten.
std::string with_member(const std::string& config, const std::string& member) {
  std::string indented;
  for (const char c : std::string_view(member).substr(0, member.rfind('}') + 1)) {
    indented += c;
    if (c == '\n') indented += "  ";
  }
  const std::size_t null = own_quantization(config);
  if (null != std::string::npos) return std::string(config).replace(null, std::string_view("null").size(), indented);
  const std::size_t open = config.find('{') + 1;
  const std::size_t next = config.find_first_not_of(kBlanks, open);
  const bool empty = config[next] == '}';
  return fmt::format("{}\n  \"quantization_config\": {}{}{}", config.substr(0, open), indented, empty ? "\n" : ",",
                     config.substr(empty ? next : open));
}

// One layer's weight, quantized piece by piece.
class LayerQuantizer {
 public:
  LayerQuantizer(const QuantizeJob& job, std::string layer, const TensorSource& weight, SafetensorsWriter& writer)
      : job_(job),
        layer_(std::move(layer)),
        weight_(weight),
        writer_(writer),
        dtype_(*attention_dtype(weight.info->dtype)),
        rows_(weight.info->shape[0]),
        features_(weight.info->shape[1]) {}

  QuantizedLayer run() {
    const std::int64_t row_bytes = weight_row_bytes(WeightFormat::kFloat, dtype_, features_);
    const std::int64_t at_once = std::clamp<std::int64_t>(kPieceBytes / row_bytes, 1, rows_);
    std::vector<std::byte> raw(static_cast<std::size_t>(at_once * row_bytes));
    for (std::int64_t begin = 0; begin < rows_; begin += at_once) {
      const std::int64_t count = std::min(at_once, rows_ - begin);
      const std::span<std::byte> piece(raw.data(), static_cast<std::size_t>(count * row_bytes));
      weight_.shard->read(*weight_.info, begin * row_bytes, piece);
      quantize(piece, begin, count);
    }
    writer_.write_bytes(tensor_of(layer_, "weight_scale"), scales_);
    if (job_.format == WeightFormat::kInt4) {
      const std::array<std::int64_t, 2> shape{rows_, features_};
      writer_.write_bytes(tensor_of(layer_, "weight_shape"), std::as_bytes(std::span(shape)));
    }
    const std::int64_t values = rows_ * weight_row_bytes(job_.format, dtype_, features_);
    return {layer_,
            rows_,
            features_,
            weight_.info->bytes(),
            values + static_cast<std::int64_t>(scales_.size()),
            squares_ > 0.0 ? std::sqrt(errors_ / squares_) : 0.0};
  }

 private:
  void quantize(std::span<const std::byte> raw, std::int64_t first, std::int64_t count) {
    const std::int64_t packed_row = weight_row_bytes(job_.format, dtype_, features_);
    const std::int64_t row_of_scales = row_scales(job_.format, features_);
    const auto size = [](std::int64_t number) { return static_cast<std::size_t>(number); };
    std::vector<std::byte> packed(size(count * packed_row));
    std::vector<float> scales(size(count * row_of_scales));
    std::vector<double> errors(size(count)), squares(size(count));
    const RoundingOptions options{job_.format, dtype_, job_.search_mse};
#pragma omp parallel num_threads(job_.threads)
    {
      std::vector<float> values(size(features_));
      std::vector<std::int8_t> integers(size(features_));
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < count; ++row) {
        const std::byte* const from = raw.data() + size(row * features_) * size_of(dtype_);
        bool finite = true;
        double sum = 0.0;
        for (std::size_t k = 0; k < values.size(); ++k) {
          values[k] = load_element(from + k * size_of(dtype_), dtype_);
          finite = finite && std::isfinite(values[k]);
          sum += static_cast<double>(values[k]) * static_cast<double>(values[k]);
        }
        squares[size(row)] = finite ? sum : std::numeric_limits<double>::quiet_NaN();
        if (!finite) continue;
        errors[size(row)] = quantize_row(values, options, integers, packed.data() + row * packed_row,
                                         scales.data() + row * row_of_scales);
      }
    }
    for (std::int64_t row = 0; row < count; ++row) {
      if (std::isnan(squares[size(row)])) {
        fail(ErrorCode::kFile,
             fmt::format("layer {} has NaN or infinite weights, in row {}", in_quotes(layer_), first + row),
             "they have no quantized value", {"Leave it out with ", setting("ignore", layer_), ", or mend the model."});
      }
      errors_ += errors[size(row)];
      squares_ += squares[size(row)];
    }
    const std::string_view tensor = job_.format == WeightFormat::kInt8 ? "weight" : "weight_packed";
    writer_.write_part(tensor_of(layer_, tensor), first * packed_row, packed);
    const std::size_t at = scales_.size();
    scales_.resize(at + scales.size() * size_of(dtype_));
    for (std::size_t i = 0; i < scales.size(); ++i)
      store_element(&scales_[at + i * size_of(dtype_)], dtype_, scales[i]);
  }

  const QuantizeJob& job_;
  std::string layer_;
  TensorSource weight_;
  SafetensorsWriter& writer_;
  Dtype dtype_;
  std::int64_t rows_;
  std::int64_t features_;
  std::vector<std::byte> scales_;  // of the weight's dtype
  double errors_ = 0.0;
  double squares_ = 0.0;
};

void copy_tensor(const TensorSource& tensor, SafetensorsWriter& writer) {
  std::vector<std::byte> piece;
  for (std::int64_t at = 0; at < tensor.info->bytes(); at += kPieceBytes) {
    piece.resize(static_cast<std::size_t>(std::min(kPieceBytes, tensor.info->bytes() - at)));
    tensor.shard->read(*tensor.info, at, piece);
    writer.write_part(tensor.info->name, at, piece);
  }
}

// Copies the tokenizer, the generation config and similar files.
std::vector<std::string> copy_other_files(const ModelFiles& files, const std::string& output) {
  std::vector<std::string> copied;
  if (!files.folder) return copied;
  std::error_code error;
  for (auto entry = fs::directory_iterator(*files.folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool known =
        std::ranges::any_of(kCopiedEndings, [&](std::string_view ending) { return name.ends_with(ending); });
    if (!known || name == kConfigFile || name.ends_with(kIndexSuffix) || !entry->is_regular_file(error)) continue;
    fs::copy_file(entry->path(), fs::path(output) / name, error);
    if (error) break;
    copied.push_back(name);
  }
  if (error) {
    fail(ErrorCode::kFile, fmt::format("can't copy the files of {}", files.folder->string()), error.message(),
         "Check the space on the output's file system.");
  }
  std::ranges::sort(copied);
  return copied;
}

}  // namespace

std::string_view compressed_format(WeightFormat format) {
  return format == WeightFormat::kInt8 ? "int-quantized" : "pack-quantized";
}

void check_quantize_output(const std::string& path, bool replace) {
  check_output_folder(path, replace, std::string(kModelFile));
}

QuantizeResult quantize_model(const QuantizeJob& job) {
  const ModelFiles files = find_model(job.input);
  check_config(files);
  std::error_code no_folder;
  if (fs::equivalent(fs::absolute(files.weights).parent_path(), job.output, no_folder) && !no_folder) {
    fail(ErrorCode::kUsage, {setting("output", job.output), " is the folder of the input"},
         "it would be written over what is read", "Choose another name.");
  }
  if (job.replace) check_earlier_output(job.output);
  const SafetensorsFile file(files.weights);
  const Selection selection = select(file, job);
  QuantizeResult result;
  result.left = selection.left;

  std::map<std::string, std::string> layer_of_weight;
  for (const std::string& layer : selection.layers) layer_of_weight.emplace(tensor_of(layer, "weight"), layer);
  std::vector<OutputTensor> tensors;
  for (const std::string_view name : file.names()) {
    const TensorInfo& info = *file.tensor(name).info;
    result.bytes_before += info.bytes();
    const auto layer = layer_of_weight.find(std::string(name));
    if (layer == layer_of_weight.end()) {
      tensors.push_back({info.name, info.dtype, info.shape});
    } else {
      plan_layer(layer->second, info, job.format, tensors);
    }
  }
  const SafetensorsPlan plan = plan_safetensors(std::move(tensors), {{"format", "pt"}});
  result.bytes_after = plan.header.data_bytes;

  TemporaryFolder folder(job.output);
  const auto in_folder = [&](std::string_view name) { return (fs::path(folder.path()) / name).string(); };
  write_text_file(in_folder(kConfigFile), with_member(files.config, quantization_config(job, ignored_names(selection))),
                  false, "output");
  result.copied = copy_other_files(files, folder.path());
  const auto writer = SafetensorsWriter::create(plan, in_folder(kModelFile), false);
  for (const std::string_view name : file.names()) {
    const TensorSource tensor = file.tensor(name);
    const auto layer = layer_of_weight.find(std::string(name));
    if (layer == layer_of_weight.end()) {
      copy_tensor(tensor, *writer);
    } else {
      result.layers.push_back(LayerQuantizer(job, layer->second, tensor, *writer).run());
    }
  }
  writer->commit();
  folder.publish(job.replace);
  return result;
}

}  // namespace ringattn
