// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <algorithm>
#include <numeric>
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

void fail(ErrorCode code, std::string_view problem, std::string_view why, std::string_view suggestion) {
  std::string message(problem);
  if (!why.empty()) message.append(" (").append(why).append(")");
  message.append(".");
  if (!suggestion.empty()) message.append(" ").append(suggestion);
  throw Error(code, std::move(message));
}

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Of capitals and small letters alike.
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
  // Of three letters, two others make another name.
  const std::size_t most = name.size() <= 3 ? 1 : std::max<std::size_t>(2, name.size() / 3);
  std::size_t best_distance = most + 1;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t distance = edit_distance(name, candidates[i]);
    const bool alike = distance < std::max(name.size(), candidates[i].size());  // else no letter is the same
    if (alike && distance < best_distance) {
      best_distance = distance;
      best = candidates[i];
    }
  }
  return std::string(best);
}

}  // namespace ringattn
