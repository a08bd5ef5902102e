// SPDX-License-Identifier: Apache-2.0
#include "attention/files/model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "attention/files/json_reader.hpp"
#include "base/error.hpp"
#include "base/text_file.hpp"

namespace ringattn {

namespace {

constexpr JsonLimits kLimits{16, std::size_t{1} << 16, std::size_t{1} << 16};
constexpr std::size_t kMostLayers = 1 << 16;
constexpr double kMostHeads = 1 << 16;  // or dims
constexpr double kFarthestWindow = 0x1p53;

TextSource config_source(std::string name) {
  return {std::move(name), "model config", "Give the config.json that lies beside a model's weights."};
}

// Python writes infinities and NaN bare, which is no JSON. They are read as null: of what is asked for, time_step_limit
// alone has some, where a side that is no number is no limit.
std::string without_infinities(std::string_view text) {
  std::string plain;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\' && i + 1 < text.size()) plain += text[i++];
      in_string = c != '"';
    } else {
      bool replaced = false;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        if (text.substr(i).starts_with(word)) {
          plain += "null";
          i += word.size() - 1;
          replaced = true;
          break;
        }
      }
      if (replaced) continue;
      in_string = c == '"';
    }
    plain += text[i];
  }
  return plain;
}

}  // namespace

// Keeps what stands directly in objects, by dotted key, and the lists that are asked for. Other lists are passed over.
// A key that stands twice in an object is refused: readers differ in which of them counts.
class ModelConfig::Reader final : public JsonEvents {
 public:
  Reader(const TextSource& source, ModelConfig& config) : source_(source), config_(config) {}

  void begin_object() override {
    if (arrays_ == 0) {
      prefixes_.push_back(prefixes_.empty() ? "" : path() + ".");
    } else {
      if (in("time_step_limit")) config_.dt_limit_.emplace_back();  // {"__float__": "Infinity"}
      ++arrays_;                                                    // of something in a list
    }
  }
  void end_object() override {
    if (arrays_ > 0) {
      --arrays_;
      return;
    }
    prefixes_.pop_back();
  }
  void begin_array() override {
    check_object("a list");
    if (arrays_++ > 0) return;
    constexpr std::string_view kText = "text_config.";
    list_ = path();
    if (list_.starts_with(kText)) {
      list_.erase(0, kText.size());
      if (seen_.contains(list_)) list_.clear();  // what stands at the top counts, as of single values
    }
    if (in("layer_types")) config_.layer_types_.clear();
    if (in("attn_layer_indices")) config_.attention_layers_.emplace();
    if (in("time_step_limit")) config_.dt_limit_.clear();
  }
  void end_array() override { --arrays_; }
  void key(std::string& name) override {
    if (arrays_ > 0) return;
    key_ = name;
    if (!seen_.insert(path()).second) source_.refuse(fmt::format("it names {} twice", in_quotes(path())));
  }
  void string(std::string& value) override {
    if (in("layer_types")) {
      check_length(config_.layer_types_.size());
      config_.layer_types_.push_back(value);
    }
    keep("a string", Value(std::move(value)));
  }
  void integer(std::uint64_t value) override { number(static_cast<double>(value)); }
  void real(double value, std::string_view) override { number(value); }
  void other(std::string_view what) override {
    if (in("time_step_limit")) config_.dt_limit_.emplace_back();
    keep(what, Value(Other{std::string(what)}));
  }

 private:
  std::string path() const { return prefixes_.back() + key_; }
  // Whether this stands directly in that list.
  bool in(std::string_view list) const { return arrays_ == 1 && list_ == list; }
  void check_length(std::size_t length) const {
    if (length == kMostLayers) source_.refuse(fmt::format("its {} are more than {}", list_, kMostLayers));
  }
  void number(double value) {
    if (in("time_step_limit")) config_.dt_limit_.emplace_back(value);
    if (in("attn_layer_indices")) {
      check_length(config_.attention_layers_->size());
      config_.attention_layers_->push_back(value);
    }
    keep("a number", Value(value));
  }
  void check_object(std::string_view what) const {
    if (prefixes_.empty()) source_.refuse(fmt::format("it is {}, not an object", what));
  }
  void keep(std::string_view what, Value value) {
    check_object(what);
    if (arrays_ > 0) return;
    config_.values_.emplace(path(), std::move(value));
  }

  const TextSource& source_;
  ModelConfig& config_;
  std::vector<std::string> prefixes_;  // of the open objects
  std::string key_;
  std::set<std::string> seen_;  // all keys, dotted
  std::string list_;            // the outermost open list; empty: passed over
  int arrays_ = 0;              // open lists, and objects in them
};

ModelConfig ModelConfig::open(const std::string& path) { return {read_text_file(path), path}; }

ModelConfig::ModelConfig(std::string_view text, std::string name) : name_(std::move(name)) {
  const TextSource source = config_source(name_);
  JsonScan scan(source, kLimits);
  scan.feed(text);
  Reader reader(source, *this);
  parse_json(without_infinities(text), source, reader);
}

void ModelConfig::refuse(std::string_view key, std::string_view why) const {
  fail(ErrorCode::kFile, fmt::format("{} of {} can't be used", key, name_), why,
       "Check the file, or give the value itself.");
}

const ModelConfig::Value* ModelConfig::find(std::string_view key) const {
  for (const std::string_view prefix : {"", "text_config."}) {
    const auto at = values_.find(fmt::format("{}{}", prefix, key));
    if (at == values_.end()) continue;
    const Other* const other = std::get_if<Other>(&at->second);
    if (other == nullptr || other->text != "null") return &at->second;
  }
  return nullptr;
}

std::optional<double> ModelConfig::number(std::string_view key) const {
  const Value* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const double* const number = std::get_if<double>(value)) return *number;
  const Other* const other = std::get_if<Other>(value);
  refuse(key, fmt::format("it is {}, not a number", other == nullptr ? "a string" : other->text));
}

std::optional<int> ModelConfig::count(std::string_view key) const {
  const std::optional<double> value = number(key);
  if (!value) return std::nullopt;
  if (*value < 1.0 || *value > kMostHeads || *value != std::floor(*value)) {
    refuse(key, fmt::format("it is {}, not a whole number of 1 to {}", *value, kMostHeads));
  }
  return static_cast<int>(*value);
}

int ModelConfig::needed(std::string_view key) const {
  if (const std::optional<int> value = count(key)) return *value;
  fail(ErrorCode::kFile, fmt::format("{} doesn't say {}", name_, key), "the job's shape needs it",
       "Give the config.json of a model of that kind, or the value itself.");
}

bool ModelConfig::is_true(std::string_view key) const {
  const Value* const value = find(key);
  const Other* const other = value == nullptr ? nullptr : std::get_if<Other>(value);
  return other != nullptr && other->text == "true";
}

bool ModelConfig::is_latent() const { return find("kv_lora_rank") != nullptr; }

void ModelConfig::check_attends_to_all() const {
  const std::optional<int> chosen = count("index_topk");
  if (!chosen) return;
  fail(ErrorCode::kUnsupported, fmt::format("the attention of {} can't be computed", name_),
       fmt::format("its queries attend to index_topk = {} chosen tokens alone", *chosen),
       "Give its dims themselves for attention to all tokens.");
}

int ModelConfig::heads() const { return needed("num_attention_heads"); }
int ModelConfig::kv_heads() const {
  const std::optional<int> heads_said = count("num_key_value_heads");
  return heads_said ? *heads_said : heads();
}

int ModelConfig::head_dim() const {
  if (const std::optional<int> dim = count("head_dim")) return *dim;
  const int hidden = needed("hidden_size");
  if (hidden % heads() != 0) {
    refuse("hidden_size",
           fmt::format("it is {}, which {} heads don't divide, and there is no head_dim", hidden, heads()));
  }
  return hidden / heads();
}

int ModelConfig::latent_dim() const { return needed("kv_lora_rank"); }
int ModelConfig::nope_dim() const { return needed("qk_nope_head_dim"); }
int ModelConfig::rope_dim() const { return needed("qk_rope_head_dim"); }
int ModelConfig::latent_dim_v() const { return needed("v_head_dim"); }

std::optional<int> ModelConfig::first_of(std::initializer_list<std::string_view> keys) const {
  for (const std::string_view key : keys) {
    if (const std::optional<int> value = count(key)) return value;
  }
  return std::nullopt;
}

bool ModelConfig::has_attention() const { return find("num_attention_heads") != nullptr; }
bool ModelConfig::has_scans() const { return first_of({"mamba_d_state", "ssm_state_size", "state_size"}).has_value(); }

bool ModelConfig::scans_channels() const {
  return has_scans() && !first_of({"mamba_n_heads", "mamba_num_heads", "num_heads"});
}

int ModelConfig::scan_heads() const {
  if (const auto heads = first_of({"mamba_n_heads", "mamba_num_heads", "num_heads"})) return *heads;
  if (const auto channels = count("intermediate_size"); channels && !has_attention()) return *channels;
  return first_of({"mamba_expand", "expand"}).value_or(2) * needed("hidden_size");
}

int ModelConfig::scan_head_dim() const {
  const Value* const said = find("mamba_d_head");
  const bool by_itself = said != nullptr && std::holds_alternative<std::string>(*said);  // "auto"
  if (!by_itself) {
    if (const auto dim = first_of({"mamba_d_head", "mamba_head_dim"})) return *dim;
    if (const auto dim = count("head_dim"); dim && !has_attention()) return *dim;
  }
  const int inner = first_of({"mamba_expand", "expand"}).value_or(2) * needed("hidden_size");
  if (inner % scan_heads() != 0) {
    refuse("hidden_size", fmt::format("{} times it are {}, which {} heads don't divide",
                                      first_of({"mamba_expand", "expand"}).value_or(2), inner, scan_heads()));
  }
  return inner / scan_heads();
}

int ModelConfig::scan_state_dim() const {
  if (const auto dim = first_of({"mamba_d_state", "ssm_state_size"})) return *dim;
  return needed("state_size");
}

int ModelConfig::scan_conv_channels() const {
  if (scans_channels()) return scan_heads();
  return scan_heads() * scan_head_dim() + 2 * scan_groups() * scan_state_dim();
}

int ModelConfig::scan_conv_width() const { return first_of({"mamba_d_conv", "conv_kernel"}).value_or(4); }

int ModelConfig::scan_groups() const { return first_of({"mamba_n_groups", "n_groups"}).value_or(1); }

std::optional<std::pair<double, double>> ModelConfig::dt_limit() const {
  if (dt_limit_.empty()) return std::nullopt;
  const std::pair<double, double> limit{dt_limit_.front().value_or(-INFINITY), dt_limit_.back().value_or(INFINITY)};
  if (dt_limit_.size() != 2 || !(limit.first <= limit.second)) {
    refuse("time_step_limit", "it is no least and most value of dt");
  }
  return limit;
}

std::optional<bool> ModelConfig::layer_scans(std::int64_t layer) const {
  const auto index = static_cast<std::size_t>(layer);
  const Value* const said = find("hybrid_override_pattern");
  const std::string* const pattern = said == nullptr ? nullptr : std::get_if<std::string>(said);
  const double count_said = number("num_hidden_layers").value_or(INFINITY);
  const double layers = pattern != nullptr      ? static_cast<double>(pattern->size())
                        : !layer_types_.empty() ? static_cast<double>(layer_types_.size())
                        : attention_layers_     ? count_said
                                                : INFINITY;
  if (static_cast<double>(layer) >= layers) {
    fail(ErrorCode::kUsage, setting("layer", layer), fmt::format("{} has layers 0 to {}", name_, layers - 1.0),
         "Name one of these.");
  }
  if (pattern == nullptr && layer_types_.empty()) {
    if (!attention_layers_) return std::nullopt;
    return std::ranges::find(*attention_layers_, static_cast<double>(layer)) == attention_layers_->end();
  }
  const std::string kind = pattern != nullptr ? std::string(1, (*pattern)[index]) : layer_types_[index];
  if (kind == "M" || kind == "mamba" || kind == "mamba2") return true;
  if (kind == "*" || kind == "attention" || kind.ends_with("_attention")) return false;
  fail(ErrorCode::kUsage, setting("layer", layer),
       fmt::format("that layer of {} is {}, neither attention nor a scan", name_, in_quotes(kind)),
       "Name another, or leave it out and name the op.");
}

double ModelConfig::softcap() const {
  const double cap = number("attn_logit_softcapping").value_or(0.0);
  if (!(cap >= 0.0)) refuse("attn_logit_softcapping", fmt::format("it is {}", cap));
  return cap;
}

std::optional<double> ModelConfig::softmax_scale() const {
  if (const auto scalar = number("query_pre_attn_scalar")) {
    if (!(*scalar > 0.0)) refuse("query_pre_attn_scalar", fmt::format("it is {}", *scalar));
    return 1.0 / std::sqrt(*scalar);
  }
  if (!is_latent()) return std::nullopt;
  for (const std::string_view scaling : {"rope_scaling", "rope_parameters"}) {
    const std::string factor_key = fmt::format("{}.factor", scaling);
    const double all_dims = number(fmt::format("{}.mscale_all_dim", scaling)).value_or(0.0);
    const double factor = number(factor_key).value_or(1.0);
    if (all_dims == 0.0 || factor <= 1.0) continue;
    const double mscale = 0.1 * all_dims * std::log(factor) + 1.0;
    return mscale * mscale / std::sqrt(static_cast<double>(nope_dim() + rope_dim()));
  }
  return std::nullopt;
}

std::int64_t ModelConfig::named_layer(std::optional<std::int64_t> layer, std::string_view differ) const {
  if (layer) return *layer;
  fail(ErrorCode::kUsage, fmt::format("{} has layers of several kinds", name_), differ,
       {"Name one with ", setting("layer", 0), "."});
}

// Whether the layer is one of those that the window belongs to.
bool ModelConfig::slides(std::optional<std::int64_t> layer) const {
  if (find("use_sliding_window") != nullptr && !is_true("use_sliding_window")) return false;
  if (!layer_types_.empty()) {
    const bool alike = std::all_of(layer_types_.begin(), layer_types_.end(),
                                   [&](const std::string& type) { return type == layer_types_.front(); });
    const std::int64_t index = alike ? layer.value_or(0) : named_layer(layer, "its layer_types differ");
    const std::string& type = layer_types_[static_cast<std::size_t>(index)];
    if (type == "sliding_attention") return true;
    if (type == "full_attention") return false;
    fail(ErrorCode::kFile, fmt::format("layer {} of {} is {}", index, name_, in_quotes(type)),
         "sliding_attention and full_attention are possible", {"Name another with ", setting("layer"), "."});
  }
  if (const auto pattern = count("sliding_window_pattern")) {
    return (named_layer(layer, fmt::format("every layer but one of {} has a window", *pattern)) + 1) % *pattern != 0;
  }
  const Value* const type = find("model_type");
  const std::string* const model = type == nullptr ? nullptr : std::get_if<std::string>(type);
  if (model != nullptr && *model == "gemma2") {
    return named_layer(layer, "every other layer, from the first on, has a window") % 2 == 0;
  }
  if (const auto first = number("max_window_layers"); first && is_true("use_sliding_window") && *first > 0.0) {
    const auto layers = number("num_hidden_layers");
    if (layers && *first >= *layers) return false;
    return static_cast<double>(named_layer(layer, fmt::format("those from {} on have a window", *first))) >= *first;
  }
  return true;
}

std::optional<std::int64_t> ModelConfig::sliding_window(std::optional<std::int64_t> layer) const {
  const double layers =
      layer_types_.empty() ? number("num_hidden_layers").value_or(INFINITY) : static_cast<double>(layer_types_.size());
  if (layer && static_cast<double>(*layer) >= layers) {
    fail(ErrorCode::kUsage, setting("layer", *layer), fmt::format("{} has layers 0 to {}", name_, layers - 1.0),
         "Name one of these.");
  }
  const std::optional<double> window = number("sliding_window");
  if (!window) return std::nullopt;
  if (*window < 1.0 || *window > kFarthestWindow) refuse("sliding_window", fmt::format("it is {}", *window));
  if (!slides(layer)) return std::nullopt;
  return static_cast<std::int64_t>(*window);
}

}  // namespace ringattn
