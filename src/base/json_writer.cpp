// SPDX-License-Identifier: Apache-2.0
#include "base/json_writer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <iterator>

namespace ringattn {

namespace {

// Length of the well-formed UTF-8 sequence that `text` starts with (Unicode 15, table 3-7); 0 if it starts with none.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto follows = [&](std::size_t i, unsigned low = 0x80, unsigned high = 0xBF) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const unsigned low = first == 0xE0 ? 0xA0 : 0x80;
    const unsigned high = first == 0xED ? 0x9F : 0xBF;
    return follows(1, low, high) && follows(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const unsigned low = first == 0xF0 ? 0x90 : 0x80;
    const unsigned high = first == 0xF4 ? 0x8F : 0xBF;
    return follows(1, low, high) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

void append_quoted(std::string& target, std::string_view text) {
  target += '"';
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) {
      target += "\\ufffd";
      text.remove_prefix(1);
      continue;
    }
    const char c = text.front();
    if (c == '"' || c == '\\') {
      target += '\\';
      target += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(target), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      target += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  target += '"';
}

}  // namespace

JsonWriter& JsonWriter::begin_array(bool flat) {
  open('[');
  levels_.back().flat = flat || !pretty_;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  append_quoted(text_, name);
  text_ += pretty_ ? ": " : ":";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  append_quoted(text_, text);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  return std::isfinite(number) ? literal(fmt::format("{}", number)) : null();
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  levels_.push_back({true, !pretty_ || (!levels_.empty() && levels_.back().flat)});
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  const Level level = levels_.back();
  levels_.pop_back();
  if (!level.empty && !level.flat) new_line();
  text_ += bracket;
  if (levels_.empty() && pretty_) text_ += '\n';
  return *this;
}

JsonWriter& JsonWriter::literal(std::string_view text) {
  separate();
  text_ += text;
  return *this;
}

void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (levels_.empty()) return;
  Level& level = levels_.back();
  if (!level.empty) text_ += level.flat && pretty_ ? ", " : ",";
  if (!level.flat) new_line();
  level.empty = false;
}

void JsonWriter::new_line() {
  text_ += '\n';
  text_.append(levels_.size() * 2, ' ');
}

}  // namespace ringattn
