// SPDX-License-Identifier: Apache-2.0
// Writes JSON as text, in the order of the calls: reports, traces, golden files. Numbers that JSON can't represent
// (NaN, ±∞) become null, and bytes that are not UTF-8 become U+FFFD.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

class JsonWriter {
 public:
  // `pretty`: one member per line, two spaces per level. Otherwise one line without spaces.
  explicit JsonWriter(bool pretty = true) : pretty_(pretty) {}

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  // `flat`: the array's elements stay on one line.
  JsonWriter& begin_array(bool flat = false);
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool truth) { return literal(truth ? "true" : "false"); }
  JsonWriter& value(double number);
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>) JsonWriter& value(Integer number) { return literal(std::to_string(number)); }
  JsonWriter& null() { return literal("null"); }

  template <typename Value>
  JsonWriter& member(std::string_view name, const Value& content) {
    return key(name).value(content);
  }

  // The text so far. It is complete once every object and array is closed.
  const std::string& text() const { return text_; }

 private:
  struct Level {
    bool empty = true;
    bool flat = false;
  };

  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  JsonWriter& literal(std::string_view text);
  void separate();
  void new_line();

  bool pretty_;
  bool after_key_ = false;
  std::vector<Level> levels_;
  std::string text_;
};

}  // namespace ringattn
