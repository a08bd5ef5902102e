// SPDX-License-Identifier: Apache-2.0
#include "launch/wording.hpp"

#include <algorithm>
#include <string_view>

namespace ringattn {

namespace {

// Flags are the library's settings, with dashes.
std::string flag_text(std::string_view name, std::string_view value) {
  std::string flag = "--";
  flag += name;
  std::replace(flag.begin(), flag.end(), '_', '-');
  if (!value.empty()) flag.append(" ").append(value);
  return flag;
}

std::string command_text(std::string_view name, std::string_view setting) {
  std::string text = "`ringattn ";
  text += name;
  if (!setting.empty()) text.append(" ").append(flag_text(setting, {}));
  return text + '`';
}

}  // namespace

std::string program_text(const Wording& wording) { return wording.text({flag_text, command_text}); }

std::string program_text(const Error& error) { return program_text(error.message()); }

}  // namespace ringattn
