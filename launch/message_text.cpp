// SPDX-License-Identifier: Apache-2.0
#include "launch/message_text.hpp"

#include <algorithm>
#include <string_view>

#include "launch/config.hpp"

namespace ringattn {

namespace {

// Flags are the library's settings, with dashes.
std::string flag_name(std::string_view setting) {
  std::string flag(setting);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::string flag_text(std::string_view name, std::string_view value) {
  std::string flag = "--" + flag_name(name);
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

std::string program_text(const MessageTemplate& wording) { return wording.text({flag_text, command_text}); }

std::string program_text(const Error& error) { return program_text(error.message()); }

std::string program_text(const Error& error, const Config& config) {
  const MessageTemplate said = error.message();
  MessageTemplate message;
  for (const MessageFragment& fragment : said.fragments()) {
    const std::string flag = fragment.kind == MessageFragment::Kind::kSetting ? flag_name(fragment.name) : "";
    const Source source = flag.empty() ? Source::kDefault : config.value(flag).source;
    const std::string key(source == Source::kDefault ? "" : config.value(flag).row->key());
    if (source == Source::kEnvironment) {
      message += environment_variable(key);
      if (!fragment.value.empty()) message += "=" + fragment.value;
    } else if (source == Source::kFile) {
      message += fragment.value.empty() ? key : key + " = " + fragment.value;
      message += " in " + config.options.config;
    } else {
      message += fragment;
    }
  }
  return program_text(message);
}

}  // namespace ringattn
