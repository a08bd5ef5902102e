// SPDX-License-Identifier: Apache-2.0
#include "base/message_template.hpp"

#include <utility>

namespace ringattn {

namespace {

using Kind = MessageFragment::Kind;

std::string plain_setting(std::string_view name, std::string_view value) {
  std::string text(name);
  if (!value.empty()) text.append(" = ").append(value);
  return text;
}

std::string plain_command(std::string_view name, std::string_view setting) {
  std::string text = "ringattn's ";
  text.append(name);
  if (!setting.empty()) text.append(" with ").append(setting);
  return text;
}

}  // namespace

constinit const Vocabulary kPlainVocabulary{plain_setting, plain_command};

MessageTemplate::MessageTemplate(std::string_view text) {
  if (!text.empty()) fragments_.push_back({Kind::kText, std::string(text), {}});
}

MessageTemplate::MessageTemplate(MessageFragment fragment) {
  if (!fragment.name.empty()) fragments_.push_back(std::move(fragment));
}

MessageTemplate::MessageTemplate(std::initializer_list<MessageTemplate> parts) {
  for (const MessageTemplate& part : parts) *this += part;
}

MessageTemplate& MessageTemplate::operator+=(const MessageTemplate& other) {
  fragments_.insert(fragments_.end(), other.fragments_.begin(), other.fragments_.end());
  return *this;
}

std::string MessageTemplate::text(const Vocabulary& vocabulary) const {
  std::string text;
  for (const MessageFragment& fragment : fragments_) {
    switch (fragment.kind) {
      case Kind::kText:
        text += fragment.name;
        break;
      case Kind::kSetting:
        text += vocabulary.setting(fragment.name, fragment.value);
        break;
      case Kind::kCommand:
        text += vocabulary.command(fragment.name, fragment.value);
        break;
    }
  }
  return text;
}

MessageFragment setting(std::string_view name, std::string_view value) {
  return {Kind::kSetting, std::string(name), std::string(value)};
}

MessageFragment setting(std::string_view name, std::int64_t value) { return setting(name, std::to_string(value)); }

MessageFragment command(std::string_view name, std::string_view setting) {
  return {Kind::kCommand, std::string(name), std::string(setting)};
}

}  // namespace ringattn
