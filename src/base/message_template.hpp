// SPDX-License-Identifier: Apache-2.0
// Text that names settings and commands without spelling them. The library knows that a smaller block would help, but
// only the program knows that its user writes "--block 4096" for it. A message therefore keeps such names apart from
// its text, and the code that shows it spells them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

// One fragment of a text: literal text, a setting ("kernel", perhaps with the value "auto"), or a command ("info",
// perhaps with the setting "measure").
struct MessageFragment {
  enum class Kind : char { kText = 't', kSetting = 's', kCommand = 'c' };

  Kind kind = Kind::kText;
  std::string name;   // kText: the text itself
  std::string value;  // kSetting: the value; kCommand: the setting; may be empty

  bool operator==(const MessageFragment&) const = default;
};

// How settings and commands are spelled. Settings have the library's names ("kv_heads").
struct Vocabulary {
  std::string (*setting)(std::string_view name, std::string_view value);
  std::string (*command)(std::string_view name, std::string_view setting);
};

// The vocabulary for callers of the library: "kernel = auto", "ringattn's info".
extern const Vocabulary kPlainVocabulary;

class MessageTemplate {
 public:
  MessageTemplate() = default;
  // Implicit, so that plain text can be passed directly.
  MessageTemplate(const char* text) : MessageTemplate(std::string_view(text)) {}
  MessageTemplate(std::string_view text);
  MessageTemplate(const std::string& text) : MessageTemplate(std::string_view(text)) {}
  MessageTemplate(MessageFragment fragment);
  // Concatenates: {"Use ", setting("backend", "cpu"), ", or a build with CUDA."}.
  MessageTemplate(std::initializer_list<MessageTemplate> parts);

  MessageTemplate& operator+=(const MessageTemplate& other);

  bool empty() const { return fragments_.empty(); }
  const std::vector<MessageFragment>& fragments() const { return fragments_; }
  std::string text(const Vocabulary& vocabulary = kPlainVocabulary) const;

  bool operator==(const MessageTemplate&) const = default;

 private:
  std::vector<MessageFragment> fragments_;  // none has an empty name
};

MessageFragment setting(std::string_view name, std::string_view value = {});
MessageFragment setting(std::string_view name, std::int64_t value);
MessageFragment command(std::string_view name, std::string_view setting = {});

}  // namespace ringattn
