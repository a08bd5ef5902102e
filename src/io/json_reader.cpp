// SPDX-License-Identifier: Apache-2.0
#include "io/json_reader.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kLongestNumber = 512;  // characters; the parser buffers a whole number

}  // namespace

void TextSource::refuse(std::string_view why) const {
  fail(ErrorCode::kFile, fmt::format("{} is not a valid {}", path, kind), why, suggestion);
}

void JsonScan::feed(std::string_view piece) {
  for (const char c : piece) {
    if (c == '\0') source_.refuse("its JSON holds a byte of value 0");
    if (in_string_) {
      if (++string_bytes_ > limits_.string_bytes) {
        source_.refuse(fmt::format("its JSON holds a string of more than {} bytes", limits_.string_bytes));
      }
      if (escaped_) {
        escaped_ = false;
      } else if (c == '\\') {
        escaped_ = true;
      } else if (c == '"') {
        in_string_ = false;
      }
      continue;
    }
    const bool of_number = (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '+' || c == 'e' || c == 'E';
    number_bytes_ = of_number ? number_bytes_ + 1 : 0;
    if (number_bytes_ > kLongestNumber) {
      source_.refuse(fmt::format("its JSON holds a number of more than {} characters", kLongestNumber));
    }
    switch (c) {
      case '"':
        in_string_ = true;
        string_bytes_ = 0;
        break;
      case '{':
      case '[':
        if (++depth_ > limits_.depth) {
          source_.refuse(fmt::format("its JSON is nested deeper than {} levels", limits_.depth));
        }
        break;
      case '}':
      case ']':
        --depth_;
        break;
      case ':':
        if (++members_ > limits_.members) {
          source_.refuse(fmt::format("its JSON has more than {} members", limits_.members));
        }
        break;
      default:
        break;
    }
  }
}

namespace {

// nlohmann's event interface. Its functions return false to stop.
class Bridge {
 public:
  using Json = nlohmann::json;

  Bridge(const TextSource& source, JsonEvents& events) : source_(source), events_(events) {}

  bool null() { return other("null"); }
  bool boolean(bool value) { return other(value ? "true" : "false"); }
  bool number_integer(Json::number_integer_t) { return other("a negative number"); }
  bool number_unsigned(Json::number_unsigned_t value) {
    events_.integer(value);
    return true;
  }
  bool number_float(Json::number_float_t value, const Json::string_t& text) {
    events_.real(value, text);
    return true;
  }
  bool string(Json::string_t& value) {
    events_.string(value);
    return true;
  }
  bool binary(Json::binary_t&) { return other("binary data"); }
  bool start_object(std::size_t) {
    events_.begin_object();
    return true;
  }
  bool key(Json::string_t& name) {
    events_.key(name);
    return true;
  }
  bool end_object() {
    events_.end_object();
    return true;
  }
  bool start_array(std::size_t) {
    events_.begin_array();
    return true;
  }
  bool end_array() {
    events_.end_array();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
    source_.refuse(fmt::format("it isn't JSON in UTF-8 at byte {} of the text", position));
  }

 private:
  bool other(std::string_view what) {
    events_.other(what);
    return true;
  }

  const TextSource& source_;
  JsonEvents& events_;
};

}  // namespace

void JsonEvents::real(double, std::string_view text) { other(fmt::format("the number {}", text.substr(0, 40))); }

void parse_json(std::string_view text, const TextSource& source, JsonEvents& events) {
  if (text.starts_with("\xef\xbb\xbf")) source.refuse("its JSON starts with a byte order mark");
  Bridge bridge(source, events);
  nlohmann::json::sax_parse(text.begin(), text.end(), &bridge);
}

}  // namespace ringattn
