// SPDX-License-Identifier: Apache-2.0
// Merges the errors found by all ranks.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "ops/attention_jobs/accuracy.hpp"

namespace ringattn {

void merge(const Accuracy& part, Accuracy& all) {
  all.rows += part.rows;
  all.compared += part.compared;
  if (part.error > all.error) {
    all.error = part.error;
    all.worst = part.worst;
  }
  all.same_precision_error = std::max(all.same_precision_error, part.same_precision_error);
  all.same_precision_lse_error = std::max(all.same_precision_lse_error, part.same_precision_lse_error);
  if (part.lse_error > all.lse_error || all.lse_allowed == 0.0) {
    all.lse_error = part.lse_error;
    all.lse_allowed = part.lse_allowed;
    all.worst_lse = part.worst_lse;
  }
  if (all.misplaced == 0) all.first_misplaced = part.first_misplaced;
  all.misplaced += part.misplaced;
}

Accuracy combine(const Collective& collective, const Accuracy& mine) {
  Accuracy all;
  const std::string_view bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
  for (const std::string& text : collective.world().all_gather(bytes, collective.timeouts().for_peer())) {
    merge(gathered_value<Accuracy>(text), all);
  }
  return all;
}

std::optional<RowError> first_wrong_row(const Collective& collective, const Accuracy& all,
                                        std::span<const RowError> mine) {
  const auto wrong = [&all](const RowError& row) {
    return row.misplaced || row.error > all.allowed() || row.lse_error > 1.0;
  };
  const auto found = std::find_if(mine.begin(), mine.end(), wrong);
  const bool here = found != mine.end();
  const std::string_view bytes(here ? reinterpret_cast<const char*>(&*found) : "", here ? sizeof(RowError) : 0);
  std::optional<RowError> first;
  for (const std::string& text : collective.gather(bytes)) {
    if (text.empty()) continue;
    const auto theirs = gathered_value<RowError>(text);
    const auto place = [](const RowError& row) { return std::pair(row.sample.token, row.sample.head); };
    if (!first || place(theirs) < place(*first)) first = theirs;
  }
  return first;
}

}  // namespace ringattn
