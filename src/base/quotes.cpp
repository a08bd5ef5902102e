// SPDX-License-Identifier: Apache-2.0
#include "base/quotes.hpp"

#include <fmt/format.h>

namespace ringattn {

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 80;
  std::string quoted = "`";
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '`') {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + (text.size() > kShown ? "…`" : "`");
}

std::string shortened(std::string_view text, std::size_t bytes) {
  return text.size() <= bytes ? std::string(text) : fmt::format("{}…", text.substr(0, bytes));
}

}  // namespace ringattn
