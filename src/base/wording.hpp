// SPDX-License-Identifier: Apache-2.0
// Text that names settings and commands without spelling them. The library knows that a smaller block would help; that
// its user writes "--block 4096" for it is known to the program alone. So a message keeps such names apart from its
// text, and whoever shows it gives the words.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

// One stretch of a text: literal text, a setting ("kernel", perhaps with the value "auto"), or a command ("info",
// perhaps with the setting "measure").
struct WordingPiece {
  enum class Kind : char { kText = 't', kSetting = 's', kCommand = 'c' };

  Kind kind = Kind::kText;
  std::string name;   // of kText: the text itself
  std::string value;  // of kSetting: the value; of kCommand: the setting; may be empty

  bool operator==(const WordingPiece&) const = default;
};

// How settings and commands are spelled. Settings have the library's names ("kv_heads").
struct Vocabulary {
  std::string (*setting)(std::string_view name, std::string_view value);
  std::string (*command)(std::string_view name, std::string_view setting);
};

// For callers of the library: "kernel = auto", "ringattn's info".
extern const Vocabulary kPlainVocabulary;

class Wording {
 public:
  Wording() = default;
  // Conversions, so that plain text is given as it is.
  Wording(const char* text) : Wording(std::string_view(text)) {}
  Wording(std::string_view text);
  Wording(const std::string& text) : Wording(std::string_view(text)) {}
  Wording(WordingPiece piece);
  // One after the other: {"Use ", setting("backend", "cpu"), ", or a build with CUDA."}.
  Wording(std::initializer_list<Wording> parts);

  Wording& operator+=(const Wording& other);

  bool empty() const { return pieces_.empty(); }
  const std::vector<WordingPiece>& pieces() const { return pieces_; }
  std::string text(const Vocabulary& vocabulary = kPlainVocabulary) const;

  bool operator==(const Wording&) const = default;

 private:
  std::vector<WordingPiece> pieces_;  // none has an empty name
};

WordingPiece setting(std::string_view name, std::string_view value = {});
WordingPiece setting(std::string_view name, std::int64_t value);
WordingPiece command(std::string_view name, std::string_view setting = {});

}  // namespace ringattn
