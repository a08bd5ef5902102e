// SPDX-License-Identifier: Apache-2.0
// What ranks, and rows, have seen apart, as one.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "attention/check/accuracy.hpp"

namespace ringattn {

void merge(const Accuracy& part, Accuracy& all) {
  all.rows += part.rows;
  all.compared += part.compared;
  if (part.error > all.error) {
    all.error = part.error;
    all.worst = part.worst;
  }
  all.straightforward_error = std::max(all.straightforward_error, part.straightforward_error);
  all.straightforward_lse_error = std::max(all.straightforward_lse_error, part.straightforward_lse_error);
  if (part.lse_error > all.lse_error || all.lse_allowed == 0.0) {
    all.lse_error = part.lse_error;
    all.lse_allowed = part.lse_allowed;
    all.worst_lse = part.worst_lse;
  }
  if (all.misplaced == 0) all.first_misplaced = part.first_misplaced;
  all.misplaced += part.misplaced;
}

Accuracy combine(const Meeting& meeting, const Accuracy& mine) {
  Accuracy all;
  const std::string_view bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
  for (const std::string& text : meeting.world().all_gather(bytes, meeting.patience().for_peer())) {
    merge(told_value<Accuracy>(text), all);
  }
  return all;
}

std::optional<RowError> first_wrong_row(const Meeting& meeting, const Accuracy& all, std::span<const RowError> mine) {
  const auto wrong = [&all](const RowError& row) {
    return row.misplaced || row.error > all.allowed() || row.lse_error > 1.0;
  };
  const auto found = std::find_if(mine.begin(), mine.end(), wrong);
  const bool here = found != mine.end();
  const std::string_view bytes(here ? reinterpret_cast<const char*>(&*found) : "", here ? sizeof(RowError) : 0);
  std::optional<RowError> first;
  for (const std::string& text : meeting.gather(bytes)) {
    if (text.empty()) continue;
    const auto theirs = told_value<RowError>(text);
    const auto place = [](const RowError& row) { return std::pair(row.sample.token, row.sample.head); };
    if (!first || place(theirs) < place(*first)) first = theirs;
  }
  return first;
}

}  // namespace ringattn
