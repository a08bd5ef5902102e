// SPDX-License-Identifier: Apache-2.0
// A JSON text as a tree, for small files that are read key by key.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_reader.hpp"

namespace ringattn {

// One JSON value.
struct JsonNode {
  enum class Kind : char { kNull, kFalse, kTrue, kNumber, kString, kList, kObject, kOther };

  Kind kind = Kind::kNull;
  double number = 0.0;  // kNumber: integers above 2^53 are rounded
  std::string text;     // kString; kOther: a description of the value, such as "a negative number"
  std::vector<JsonNode> list;
  std::map<std::string, JsonNode, std::less<>> members;

  bool is_null() const { return kind == Kind::kNull; }
  bool is_number() const { return kind == Kind::kNumber; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_list() const { return kind == Kind::kList; }
  bool is_object() const { return kind == Kind::kObject; }
  // The object's member with that name, or nullptr.
  const JsonNode* member(std::string_view name) const;
  // The member at the end of a path of names with dots between them.
  const JsonNode* at(std::string_view path) const;
};

// "NaN", "Infinity" or "-Infinity" if the node is one of these; otherwise empty.
std::string_view non_finite_text(const JsonNode& node);
// "a string", "true", "a list", "NaN": what a value is, for messages.
std::string kind_text(const JsonNode& node);

// Infinity, -Infinity and NaN, which Python writes bare and JSON does not allow, become {"__float__": "Infinity"}, as
// some libraries write them. Throws kFile for what JsonScan and parse_json() refuse, for a value that is not an object,
// and for a key that appears twice in one object, because readers differ in which of the two they use.
JsonNode parse_json_object(std::string_view text, const TextSource& source, const JsonLimits& limits);

}  // namespace ringattn
