// SPDX-License-Identifier: Apache-2.0
// The keys of a model's config.json, read with the checks that each value needs. All functions throw kFile, naming the
// key, for an invalid value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json_tree.hpp"

namespace ringattn {

inline constexpr std::int64_t kMaxModelCount = 1 << 16;   // heads, or dims
inline constexpr std::int64_t kMaxModelLayers = 1 << 12;  // real models have up to a few hundred

class ModelKeys {
 public:
  // Uses the text model's object: the file itself or, in a multimodal model, text_config, llm_config, language_config
  // or thinker_config.text_config. `name` stands for the file in messages.
  ModelKeys(JsonNode file, std::string name);
  ModelKeys(const ModelKeys&) = delete;
  ModelKeys& operator=(const ModelKeys&) = delete;

  const std::string& name() const { return name_; }
  // model_type of the text model or, if it has none, of the whole model; empty if the file has neither.
  const std::string& model_type() const { return model_type_; }
  const JsonNode& object() const { return *text_; }

  // Sets values for keys that the file omits, as "key=number key=false": the defaults of the model's class.
  void set_defaults(std::string_view defaults);

  // Keys may be paths with dots ("rope_scaling.factor"). Returns nullptr for a key that is null, or that is absent and
  // has no default.
  const JsonNode* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  std::optional<double> number(std::string_view key) const;
  std::optional<std::int64_t> count(std::string_view key) const;  // 1 to kMaxModelCount
  // A boolean value; `otherwise` if the key is absent.
  bool flag(std::string_view key, bool otherwise = false) const;
  // A string; empty for other values.
  std::string_view text(std::string_view key) const;
  // nullptr if absent.
  const JsonNode* list(std::string_view key) const;
  // A checked element of a list. `key` names the list.
  std::int64_t count_at(std::string_view key, const JsonNode& list, std::int64_t index) const;
  std::int64_t integer_at(std::string_view key, const JsonNode& list, std::int64_t index) const;
  const std::string& text_at(std::string_view key, const JsonNode& list, std::int64_t index) const;
  bool list_holds(std::string_view key, std::int64_t value) const;  // a list of whole numbers

  // `keys`: names separated by spaces. The first that the file has is used.
  std::optional<std::int64_t> first_of(std::string_view keys) const;
  std::string_view first_name(std::string_view keys) const;  // the name that is used, or else the first
  std::int64_t needed(std::string_view keys) const;

  // The two bounds of a range such as time_step_limit, possibly infinite.
  std::optional<std::pair<double, double>> range(std::string_view key) const;

  // `product`: left · right, which are named by their keys. Throws kFile if it exceeds kMaxModelCount.
  std::int64_t product(std::string_view left_key, std::int64_t left, std::string_view right_key,
                       std::int64_t right) const;

  [[noreturn]] void refuse(std::string_view key, std::string_view why) const;

 private:
  JsonNode file_;
  std::string name_;
  const JsonNode* text_;
  std::string model_type_;
  std::map<std::string, JsonNode, std::less<>> defaults_;
};

// Calls `each(word)` for words separated by single spaces until it returns true. Returns whether it did.
template <typename Each>
bool any_word(std::string_view words, const Each& each) {
  while (!words.empty()) {
    const std::size_t space = words.find(' ');
    if (each(words.substr(0, space))) return true;
    words.remove_prefix(space == std::string_view::npos ? words.size() : space + 1);
  }
  return false;
}

}  // namespace ringattn
