// SPDX-License-Identifier: Apache-2.0
#include "ops/common/values.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <optional>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

// Names of dtypes in PyTorch and NumPy, and other names of ops.
struct OtherValue {
  std::string_view other;
  std::string_view value;
};

constexpr OtherValue kOtherValues[] = {
    {"bfloat16", "bf16"}, {"float16", "fp16"},          {"half", "fp16"},
    {"f16", "fp16"},      {"float32", "fp32"},          {"float", "fp32"},
    {"f32", "fp32"},      {"prefill", "attention"},     {"latent", "mla"},
    {"mamba2", "ssd"},    {"mamba1", "selective_scan"}, {"mamba", "selective_scan"},
};

// Parses the whole text as a number; nothing if it is none.
template <typename Number>
std::optional<Number> whole_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string size_accepted(std::string_view unit, std::int64_t min_value, std::int64_t max_value) {
  std::string accepted = fmt::format("a number of {} such as 4096, 8k or 2m", unit);
  if (min_value > 0) accepted += fmt::format(", at least {}", min_value);
  if (max_value != std::numeric_limits<std::int64_t>::max()) accepted += fmt::format(", at most {}", max_value);
  return accepted;
}

// Appends first, first · factor, … up to last.
void append_range(std::string_view text, std::size_t dash, std::string_view unit, std::int64_t min_value,
                  std::int64_t max_value, std::vector<std::int64_t>& values) {
  const std::size_t star = text.find('*', dash);
  if (star == std::string_view::npos) {
    throw BadValue{"a list such as 8k,64k or a range with a factor such as 8k-2m*2"};
  }
  const std::int64_t first =
      parse_size_value(text.substr(0, dash), unit, std::max<std::int64_t>(min_value, 1), max_value);
  const std::int64_t last = parse_size_value(text.substr(dash + 1, star - dash - 1), unit, min_value, max_value);
  const std::int64_t factor = parse_integer(text.substr(star + 1), 2, 1 << 20);
  if (last < first) throw BadValue{"a range that ascends, such as 8k-2m*2"};
  for (std::int64_t value = first;; value *= factor) {
    values.push_back(value);
    if (value > last / factor) break;
  }
}

}  // namespace

std::int64_t parse_size_value(std::string_view text, std::string_view unit, std::int64_t min_value,
                              std::int64_t max_value) {
  const std::optional<std::int64_t> value = parse_size(text);
  if (!value || *value < min_value || *value > max_value) throw BadValue{size_accepted(unit, min_value, max_value)};
  return *value;
}

std::vector<std::int64_t> parse_size_list(std::string_view text, std::string_view unit, std::int64_t min_value,
                                          std::int64_t max_value) {
  std::vector<std::int64_t> values;
  for (;;) {
    const std::size_t comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    if (const std::size_t dash = entry.find('-'); dash != std::string_view::npos && dash > 0) {
      append_range(entry, dash, unit, min_value, max_value, values);
    } else {
      values.push_back(parse_size_value(entry, unit, min_value, max_value));
    }
    if (values.size() > 1000) throw BadValue{"a list of at most 1000 values"};
    if (comma == std::string_view::npos) return values;
    text.remove_prefix(comma + 1);
  }
}

std::int64_t parse_integer(std::string_view text, std::int64_t min_value, std::int64_t max_value) {
  const auto value = whole_number<std::int64_t>(text);
  if (!value || *value < min_value || *value > max_value) {
    throw BadValue{max_value == std::numeric_limits<std::int64_t>::max()
                       ? fmt::format("a whole number, at least {}", min_value)
                       : fmt::format("a whole number from {} to {}", min_value, max_value)};
  }
  return *value;
}

std::uint64_t parse_seed(std::string_view text) {
  const auto value = whole_number<std::uint64_t>(text);
  if (!value) throw BadValue{"a seed from 0 to 2^64 - 1"};
  return *value;
}

double parse_real(std::string_view text, double min_value, double max_value) {
  const auto value = whole_number<double>(text);
  if (!value || !std::isfinite(*value) || *value < min_value || *value > max_value) {
    std::string accepted = "a finite number";
    if (min_value > std::numeric_limits<double>::lowest()) accepted += fmt::format(", at least {}", min_value);
    if (max_value < std::numeric_limits<double>::max()) accepted += fmt::format(", at most {}", max_value);
    throw BadValue{accepted};
  }
  return *value;
}

std::size_t parse_choice(std::string_view text, std::span<const std::string_view> choices) {
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (text == choices[i]) return i;
  }
  const auto* const other = std::ranges::find(kOtherValues, text, &OtherValue::other);
  const bool meant = other != std::end(kOtherValues) && std::ranges::find(choices, other->value) != choices.end();
  const std::string nearest = meant ? std::string(other->value) : nearest_name(text, choices.data(), choices.size());
  throw BadValue{join_choices(choices), nearest.empty() ? "" : fmt::format("Did you mean \"{}\"?", nearest)};
}

bool parse_switch(std::string_view text) {
  if (text == "on" || text == "true" || text == "1") return true;
  if (text == "off" || text == "false" || text == "0") return false;
  throw BadValue{"on or off (also true, false, 1, 0)"};
}

std::string parse_text(std::string_view text, std::string_view what) {
  if (text.empty()) throw BadValue{std::string(what)};
  if (text.find('\0') != std::string_view::npos) throw BadValue{fmt::format("{} without a NUL byte", what)};
  return std::string(text);
}

std::string join_choices(std::span<const std::string_view> choices) {
  std::string text;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i];
  }
  return text;
}

}  // namespace ringattn
