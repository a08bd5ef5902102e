// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

namespace ringattn {

std::string_view error_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kWrongResult:
      return "wrong_result";
    case ErrorCode::kUsage:
      return "usage";
    case ErrorCode::kFile:
      return "file";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kMemory:
      return "memory";
    case ErrorCode::kPeer:
      return "peer";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "internal";
}

namespace {

MessageTemplate whole_message(const MessageTemplate& problem, const MessageTemplate& why,
                              const MessageTemplate& suggestion) {
  MessageTemplate message = problem;
  if (!why.empty()) message += {" (", why, ")"};
  // A problem that is a whole message ends with its own punctuation.
  const std::string text = message.text();
  if (!text.empty() && std::string_view(".?!").find(text.back()) == std::string_view::npos) message += ".";
  if (!suggestion.empty()) message += {" ", suggestion};
  return message;
}

// Removes the bytes up to the next NUL from `bytes` and returns them.
std::string take_text(std::string_view& bytes) {
  const std::string_view text = bytes.substr(0, bytes.find('\0'));
  bytes.remove_prefix(std::min(bytes.size(), text.size() + 1));
  return std::string(text);
}

}  // namespace

Error::Error(ErrorCode code, MessageTemplate problem, MessageTemplate why, MessageTemplate suggestion)
    : std::runtime_error(whole_message(problem, why, suggestion).text()),
      code_(code),
      parts_(std::make_shared<const Parts>(Parts{std::move(problem), std::move(why), std::move(suggestion)})) {}

MessageTemplate Error::message() const { return whole_message(problem(), why(), suggestion()); }

void fail(ErrorCode code, const MessageTemplate& problem, const MessageTemplate& why,
          const MessageTemplate& suggestion) {
  throw Error(code, problem, why, suggestion);
}

// Format: code, rank and host (both empty without a location), then the three parts. A fragment is its kind, its name
// and its value, each text followed by a NUL. A NUL in place of a kind ends the part.
std::string pack_error(const Error& error) {
  std::string bytes(1, static_cast<char>(error.code()));
  const auto append = [&bytes](std::string text) {
    std::replace(text.begin(), text.end(), '\0', ' ');  // a name read from a file may contain any byte
    bytes.append(text).push_back('\0');
  };
  append(error.location() == nullptr ? std::string() : std::to_string(error.location()->rank));
  append(error.location() == nullptr ? std::string() : error.location()->host);
  for (const MessageTemplate* part : {&error.problem(), &error.why(), &error.suggestion()}) {
    for (const MessageFragment& fragment : part->fragments()) {
      bytes.push_back(static_cast<char>(fragment.kind));
      append(fragment.name);
      append(fragment.value);
    }
    bytes.push_back('\0');
  }
  return bytes;
}

Error unpack_error(std::string_view bytes) {
  // No byte from a network becomes an exit code that the program doesn't have.
  const int number = bytes.empty() ? 0 : static_cast<unsigned char>(bytes.front());
  const bool known =
      number >= static_cast<int>(ErrorCode::kWrongResult) && number <= static_cast<int>(ErrorCode::kInternal);
  const auto code = known ? static_cast<ErrorCode>(number) : ErrorCode::kPeer;
  bytes.remove_prefix(std::min<std::size_t>(bytes.size(), 1));
  const std::string rank = take_text(bytes);
  std::string host = take_text(bytes);
  MessageTemplate parts[3];
  for (MessageTemplate& part : parts) {
    while (!bytes.empty()) {
      const char kind = bytes.front();
      bytes.remove_prefix(1);
      if (kind == '\0') break;
      std::string name = take_text(bytes);
      std::string value = take_text(bytes);
      const bool named = kind == static_cast<char>(MessageFragment::Kind::kSetting) ||
                         kind == static_cast<char>(MessageFragment::Kind::kCommand);
      part += MessageFragment{named ? static_cast<MessageFragment::Kind>(kind) : MessageFragment::Kind::kText,
                              std::move(name), std::move(value)};
    }
  }
  if (parts[0].empty() && code == ErrorCode::kPeer) parts[0] = "a rank failed and did not say why";
  Error error(code, std::move(parts[0]), std::move(parts[1]), std::move(parts[2]));
  int number_of_rank = 0;
  const auto [end, wrong] = std::from_chars(rank.data(), rank.data() + rank.size(), number_of_rank);
  const bool located = wrong == std::errc() && end == rank.data() + rank.size() && number_of_rank >= 0;
  if (located) error.set_location({number_of_rank, std::move(host)});
  return error;
}

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Case-insensitive.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (lower(a[i - 1]) == lower(b[j - 1]) ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view name, const std::string_view* candidates, std::size_t count) {
  std::string_view best;
  // With three letters, two substitutions make a different name.
  const std::size_t max_distance = name.size() <= 3 ? 1 : std::max<std::size_t>(2, name.size() / 3);
  std::size_t best_distance = max_distance + 1;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t distance = edit_distance(name, candidates[i]);
    const bool alike = distance < std::max(name.size(), candidates[i].size());  // otherwise no letter is the same
    if (alike && distance < best_distance) {
      best_distance = distance;
      best = candidates[i];
    }
  }
  return std::string(best);
}

}  // namespace ringattn
