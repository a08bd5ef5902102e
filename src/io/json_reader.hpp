// SPDX-License-Identifier: Apache-2.0
// Reads untrusted JSON. Events instead of a document make duplicates visible, and limits are checked on the raw text
// before a parser allocates anything. Headers and indexes of safetensors files are read only through this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/quotes.hpp"

namespace ringattn {

// Prefix and suggestion of messages about a text: "PATH is not a valid KIND (why). Suggestion."
struct TextSource {
  std::string path;
  std::string_view kind;  // "safetensors file"
  std::string_view suggestion;

  // Throws kFile.
  [[noreturn]] void refuse(std::string_view why) const;
};

struct JsonLimits {
  int depth = 4;
  std::size_t members = 1024;  // of all objects together
  std::size_t string_bytes = std::size_t{1} << 24;
};

// Checks limits in one pass over text that arrives in pieces. Also refuses NUL bytes, at which parsers stop.
class JsonScan {
 public:
  JsonScan(const TextSource& source, const JsonLimits& limits) : source_(source), limits_(limits) {}

  // Throws kFile at the first byte that breaks a limit.
  void feed(std::string_view piece);

 private:
  const TextSource& source_;
  JsonLimits limits_;
  int depth_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
  std::size_t members_ = 0;
  std::size_t string_bytes_ = 0;
  std::size_t number_bytes_ = 0;
};

// Receives a text's values in order. Each function may throw.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;

  virtual void begin_object() = 0;
  virtual void end_object() = 0;
  virtual void begin_array() = 0;
  virtual void end_array() = 0;
  virtual void key(std::string& name) = 0;
  virtual void string(std::string& value) = 0;
  // A number written with digits only and below 2^64.
  virtual void integer(std::uint64_t value) = 0;
  // A number with a fraction or an exponent. `text`: as written.
  virtual void real(double value, std::string_view text);
  // Anything else; `what` describes it: "null", "true", "the number -1".
  virtual void other(std::string_view what) = 0;
};

// Parses text that JsonScan has accepted. Throws kFile unless it is exactly one JSON value in UTF-8 without a byte
// order mark.
void parse_json(std::string_view text, const TextSource& source, JsonEvents& events);

}  // namespace ringattn
