// SPDX-License-Identifier: Apache-2.0
// Reads JSON through nlohmann's SAX interface: its DOM keeps the last of duplicate keys and turns huge integers into
// doubles.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/quotes.hpp"
#include "io/flat_table.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMaxDepth = 8;

class FlatHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<FlatEntry> entries;
  std::string refusal;

  bool null() override { return refuse("a null", "values are text, numbers, true or false"); }
  bool boolean(bool value) override { return add(FlatKind::kTruth, value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return add(FlatKind::kInteger, fmt::format("{}", value)); }
  bool number_unsigned(number_unsigned_t value) override { return add(FlatKind::kInteger, fmt::format("{}", value)); }
  bool number_float(number_float_t value, const string_t&) override {
    return add(FlatKind::kReal, fmt::format("{}", value));
  }
  bool string(string_t& value) override { return add(FlatKind::kText, value); }
  bool binary(binary_t&) override { return refuse("binary data", ""); }
  bool start_array(std::size_t) override { return refuse("a list", "values are text, numbers, true or false"); }
  bool end_array() override { return true; }

  bool start_object(std::size_t) override {
    if (prefixes_.size() == kMaxDepth) return refuse("too many levels", "8 at most");
    prefixes_.push_back(prefixes_.empty() ? "" : path() + ".");
    return true;
  }
  bool key(string_t& name) override {
    key_ = name;
    if (!seen_.insert(path()).second) {
      refusal = fmt::format("the key \"{}\" is given twice", shortened(path()));
      return false;
    }
    return true;
  }
  bool end_object() override {
    std::string ended = std::move(prefixes_.back());
    prefixes_.pop_back();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    refusal = fmt::format("a syntax error at byte {}", position);
    return false;
  }

 private:
  std::string path() const { return prefixes_.back() + key_; }
  bool refuse(std::string_view what, std::string_view why) {
    refusal = prefixes_.empty() ? fmt::format("it is {}", what) : fmt::format("\"{}\" is {}", shortened(path()), what);
    if (!why.empty()) refusal += fmt::format("; {}", why);
    return false;
  }
  bool add(FlatKind kind, std::string text) {
    if (prefixes_.empty()) {
      refusal = "it is not an object";
      return false;
    }
    entries.push_back({path(), std::move(text), kind, 0});
    return true;
  }

  std::vector<std::string> prefixes_;
  std::string key_;
  std::set<std::string> seen_;
};

}  // namespace

std::vector<FlatEntry> parse_json_table(std::string_view text, std::string_view name, ErrorCode code,
                                        const MessageTemplate& suggestion) {
  FlatHandler handler;
  if (text.find('\0') != std::string_view::npos) {
    handler.refusal = "it holds a NUL byte";
  } else if (text.starts_with("\xEF\xBB\xBF")) {
    handler.refusal = "it starts with a byte order mark";
  } else {
    nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  }
  if (!handler.refusal.empty()) {
    fail(code, fmt::format("{} is not a valid JSON table", name), handler.refusal, suggestion);
  }
  return std::move(handler.entries);
}

}  // namespace ringattn
