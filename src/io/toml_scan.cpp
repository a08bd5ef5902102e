// SPDX-License-Identifier: Apache-2.0
#include "io/toml_scan.hpp"

namespace ringattn {

namespace {

class TomlScan {
 public:
  explicit TomlScan(std::string_view text) : text_(text) {}

  std::optional<TomlRefusal> run() {
    while (at_ < text_.size()) {
      if (const std::string_view why = step(); !why.empty()) return TomlRefusal{line_, std::string(why)};
    }
    return std::nullopt;
  }

 private:
  bool ahead(std::string_view part) const { return text_.substr(at_).starts_with(part); }

  // Consumes the text at `at_`: a string, or one byte outside of strings. Returns why it is refused, or an empty text.
  std::string_view step() {
    if (ends_lines_otherwise()) return "it holds a control character or a line separator that is not a newline";
    const char c = text_[at_];
    if (c == '\n') in_comment_ = false;
    if (in_comment_) {
      ++at_;
      return {};
    }
    if (c == '"' || c == '\'') {
      skip_string(c);
      return {};
    }
    ++at_;
    switch (c) {
      case '#':
        in_comment_ = true;
        break;
      case '\n':
        ++line_;
        dots_ = 0;
        break;
      case '=':
      case ',':
        dots_ = 0;
        break;
      case '[':
      case '{':
        dots_ = 0;
        if (++depth_ > TomlLimits::kNesting) return kTooNested;
        break;
      case ']':
      case '}':
        dots_ = 0;
        --depth_;
        break;
      case '.':
        if (++dots_ >= TomlLimits::kSegments) return kTooLong;
        break;
      default:
        break;
    }
    return {};
  }

  // Characters at which some readers end a line, and with it a comment, and others don't.
  bool ends_lines_otherwise() const {
    const auto byte = static_cast<unsigned char>(text_[at_]);
    if (byte == '\r') return !ahead("\r\n");
    return (byte < 0x20 && byte != '\t' && byte != '\n') || ahead("\xc2\x85") || ahead("\xe2\x80\xa8") ||
           ahead("\xe2\x80\xa9");
  }

  // A one-line string ends at the end of its line at the latest. A multi-line string may end with two quotes of its own
  // before the three that close it.
  void skip_string(char quote) {
    const bool escapes = quote == '"';
    const std::string three(3, quote);
    const bool several = ahead(three);
    at_ += several ? 3 : 1;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (several && ahead(three)) {
        at_ += 3;
        for (int more = 0; more < 2 && at_ < text_.size() && text_[at_] == quote; ++more) ++at_;
        return;
      }
      if (!several && c == '\n') return;
      if (c == '\n') ++line_;
      ++at_;
      if (!several && c == quote) return;
      if (escapes && c == '\\' && at_ < text_.size() && text_[at_] != '\n') ++at_;
    }
  }

  static constexpr std::string_view kTooLong = "a key has more than 8 segments";
  static constexpr std::string_view kTooNested = "it is nested deeper than 8 levels";
  static_assert(TomlLimits::kSegments == 8 && TomlLimits::kNesting == 8);

  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
  int depth_ = 0;
  bool in_comment_ = false;
  int dots_ = 0;  // dots in the key or value that is being read
};

}  // namespace

std::optional<TomlRefusal> find_toml_excess(std::string_view text) { return TomlScan(text).run(); }

}  // namespace ringattn
