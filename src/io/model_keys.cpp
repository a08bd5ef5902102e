// SPDX-License-Identifier: Apache-2.0
#include "io/model_keys.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "base/error.hpp"

namespace ringattn {

namespace {

// Objects that hold the text model of a multimodal model, outermost first.
constexpr std::string_view kTextObjects[] = {"thinker_config", "text_config", "llm_config", "language_config"};

const JsonNode* text_object(const JsonNode& file) {
  const JsonNode* node = &file;
  for (const std::string_view name : kTextObjects) {
    const JsonNode* const inner = node->member(name);
    if (inner != nullptr && inner->is_object()) node = inner;
  }
  return node;
}

std::string type_of(const JsonNode& object) {
  const JsonNode* const type = object.member("model_type");
  return type != nullptr && type->is_string() ? type->text : std::string();
}

bool is_whole(double value) { return value == std::floor(value) && std::abs(value) <= 0x1p53; }

}  // namespace

ModelKeys::ModelKeys(JsonNode file, std::string name)
    : file_(std::move(file)), name_(std::move(name)), text_(text_object(file_)), model_type_(type_of(*text_)) {
  if (model_type_.empty()) model_type_ = type_of(file_);
  for (const JsonNode* const object : {text_, static_cast<const JsonNode*>(&file_)}) {
    const JsonNode* const type = object->member("model_type");
    if (type == nullptr || type->is_null() || type->is_string()) continue;
    refuse("model_type", fmt::format("it is {}, not a string", kind_text(*type)));
  }
}

void ModelKeys::set_defaults(std::string_view defaults) {
  any_word(defaults, [&](std::string_view word) {
    const std::size_t equals = word.find('=');
    const std::string_view value = word.substr(equals + 1);
    JsonNode node;
    node.kind = value == "true"    ? JsonNode::Kind::kTrue
                : value == "false" ? JsonNode::Kind::kFalse
                                   : JsonNode::Kind::kNumber;
    std::from_chars(value.data(), value.data() + value.size(), node.number);
    defaults_.insert_or_assign(std::string(word.substr(0, equals)), std::move(node));
    return false;
  });
}

const JsonNode* ModelKeys::find(std::string_view key) const {
  const JsonNode* node = text_->at(key);
  // Older files keep the keys of the text model at the top level, and have an object that lacks them for newer keys.
  if (node == nullptr && text_->member("model_type") == nullptr) node = file_.at(key);
  if (node != nullptr) return node->is_null() ? nullptr : node;
  const auto known = defaults_.find(key);
  return known == defaults_.end() ? nullptr : &known->second;
}

void ModelKeys::refuse(std::string_view key, std::string_view why) const {
  fail(ErrorCode::kFile, fmt::format("{} of {} can't be used", key, name_), why,
       "Check the file, or give the value itself.");
}

std::optional<double> ModelKeys::number(std::string_view key) const {
  const JsonNode* const node = find(key);
  if (node == nullptr) return std::nullopt;
  if (node->kind == JsonNode::Kind::kOther) refuse(key, fmt::format("it is {}", kind_text(*node)));
  if (const std::string_view text = non_finite_text(*node); !text.empty()) {
    refuse(key, fmt::format("it is {}, which is not finite", text));
  }
  if (!node->is_number()) refuse(key, fmt::format("it is {}, not a number", kind_text(*node)));
  if (!std::isfinite(node->number)) refuse(key, "it is not finite");
  return node->number;
}

std::optional<std::int64_t> ModelKeys::count(std::string_view key) const {
  const std::optional<double> value = number(key);
  if (!value) return std::nullopt;
  if (*value < 1.0 || *value > static_cast<double>(kMaxModelCount) || !is_whole(*value)) {
    refuse(key, fmt::format("it is {}, not a whole number of 1 to {}", *value, kMaxModelCount));
  }
  return static_cast<std::int64_t>(*value);
}

bool ModelKeys::flag(std::string_view key, bool otherwise) const {
  const JsonNode* const node = find(key);
  if (node == nullptr) return otherwise;
  if (node->kind == JsonNode::Kind::kTrue) return true;
  if (node->kind == JsonNode::Kind::kFalse) return false;
  refuse(key, fmt::format("it is {}, not true or false", kind_text(*node)));
}

std::string_view ModelKeys::text(std::string_view key) const {
  const JsonNode* const node = find(key);
  return node != nullptr && node->is_string() ? std::string_view(node->text) : std::string_view();
}

const JsonNode* ModelKeys::list(std::string_view key) const {
  const JsonNode* const node = find(key);
  if (node == nullptr) return nullptr;
  if (!node->is_list()) refuse(key, fmt::format("it is {}, not a list", kind_text(*node)));
  if (node->list.size() > static_cast<std::size_t>(kMaxModelLayers)) {
    refuse(key, fmt::format("it has {} entries, more than {}", node->list.size(), kMaxModelLayers));
  }
  return node;
}

namespace {

const JsonNode& element(const ModelKeys& keys, std::string_view key, const JsonNode& list, std::int64_t index) {
  if (index < 0 || static_cast<std::size_t>(index) >= list.list.size()) {
    keys.refuse(key, fmt::format("it has {} entries, and none for layer {}", list.list.size(), index));
  }
  return list.list[static_cast<std::size_t>(index)];
}

}  // namespace

std::int64_t ModelKeys::integer_at(std::string_view key, const JsonNode& list, std::int64_t index) const {
  const JsonNode& node = element(*this, key, list, index);
  if (!node.is_number() || !is_whole(node.number)) {
    refuse(key, fmt::format("entry {} is {}, not a whole number", index,
                            node.is_number() ? fmt::format("{}", node.number) : kind_text(node)));
  }
  return static_cast<std::int64_t>(node.number);
}

std::int64_t ModelKeys::count_at(std::string_view key, const JsonNode& list, std::int64_t index) const {
  const std::int64_t value = integer_at(key, list, index);
  if (value < 1 || value > kMaxModelCount) {
    refuse(key, fmt::format("entry {} is {}, not a number of 1 to {}", index, value, kMaxModelCount));
  }
  return value;
}

const std::string& ModelKeys::text_at(std::string_view key, const JsonNode& list, std::int64_t index) const {
  const JsonNode& node = element(*this, key, list, index);
  if (!node.is_string()) refuse(key, fmt::format("entry {} is {}, not a string", index, kind_text(node)));
  return node.text;
}

bool ModelKeys::list_holds(std::string_view key, std::int64_t value) const {
  const JsonNode* const entries = list(key);
  if (entries == nullptr) return false;
  bool found = false;
  for (std::size_t i = 0; i < entries->list.size(); ++i) {
    found = integer_at(key, *entries, static_cast<std::int64_t>(i)) == value || found;
  }
  return found;
}

std::string_view ModelKeys::first_name(std::string_view keys) const {
  std::string_view found = keys.substr(0, keys.find(' '));
  any_word(keys, [&](std::string_view key) {
    if (!has(key)) return false;
    found = key;
    return true;
  });
  return found;
}

std::optional<std::int64_t> ModelKeys::first_of(std::string_view keys) const { return count(first_name(keys)); }

std::int64_t ModelKeys::needed(std::string_view keys) const {
  if (const auto value = first_of(keys)) return *value;
  fail(ErrorCode::kFile, fmt::format("{} doesn't say {}", name_, first_name(keys)), "the job's shape needs it",
       "Give the config.json of a model of that kind, or the value itself.");
}

std::optional<std::pair<double, double>> ModelKeys::range(std::string_view key) const {
  const JsonNode* const sides = find(key);
  if (sides == nullptr) return std::nullopt;
  const auto side = [&](std::size_t i, double infinite) {
    const JsonNode& node = sides->list[i];
    if (node.is_number()) return node.number;
    if (node.is_null() || node.is_object()) return infinite;  // {"__float__": "Infinity"}
    refuse(key, fmt::format("entry {} is {}, not a number", i, kind_text(node)));
  };
  if (sides->is_list() && sides->list.size() == 2) {
    const std::pair<double, double> limit{side(0, -INFINITY), side(1, INFINITY)};
    if (limit.first <= limit.second) return limit;
  }
  refuse(key, "it is not a least and a greatest value");
}

std::int64_t ModelKeys::product(std::string_view left_key, std::int64_t left, std::string_view right_key,
                                std::int64_t right) const {
  const std::int64_t product = left * right;  // counts: below 2^34
  if (product <= kMaxModelCount) return product;
  refuse(fmt::format("{} times {}", left_key, right_key),
         fmt::format("{} times {} is {}, more than {}", left, right, product, kMaxModelCount));
}

}  // namespace ringattn
