// SPDX-License-Identifier: Apache-2.0
#include "base/wording.hpp"

#include <utility>

namespace ringattn {

namespace {

using Kind = WordingPiece::Kind;

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

Wording::Wording(std::string_view text) {
  if (!text.empty()) pieces_.push_back({Kind::kText, std::string(text), {}});
}

Wording::Wording(WordingPiece piece) {
  if (!piece.name.empty()) pieces_.push_back(std::move(piece));
}

Wording::Wording(std::initializer_list<Wording> parts) {
  for (const Wording& part : parts) *this += part;
}

Wording& Wording::operator+=(const Wording& other) {
  pieces_.insert(pieces_.end(), other.pieces_.begin(), other.pieces_.end());
  return *this;
}

std::string Wording::text(const Vocabulary& vocabulary) const {
  std::string text;
  for (const WordingPiece& piece : pieces_) {
    switch (piece.kind) {
      case Kind::kText:
        text += piece.name;
        break;
      case Kind::kSetting:
        text += vocabulary.setting(piece.name, piece.value);
        break;
      case Kind::kCommand:
        text += vocabulary.command(piece.name, piece.value);
        break;
    }
  }
  return text;
}

WordingPiece setting(std::string_view name, std::string_view value) {
  return {Kind::kSetting, std::string(name), std::string(value)};
}

WordingPiece setting(std::string_view name, std::int64_t value) { return setting(name, std::to_string(value)); }

WordingPiece command(std::string_view name, std::string_view setting) {
  return {Kind::kCommand, std::string(name), std::string(setting)};
}

}  // namespace ringattn
