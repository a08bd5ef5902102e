// SPDX-License-Identifier: Apache-2.0
#include "ops/common/op_plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/host.hpp"

namespace ringattn {

int planned_threads(const Options& options) {
  return options.threads > 0 ? options.threads : usable_processors().count;
}

std::string mebibytes_text(double bytes) { return fmt::format("{:.2f}", bytes / 0x1p20); }

std::string runs_text(std::span<const TokenRun> runs, bool all) {
  constexpr std::size_t kShownRuns = 4;
  std::string text;
  const std::size_t shown = all ? runs.size() : std::min(runs.size(), kShownRuns);
  for (std::size_t i = 0; i < shown; ++i) {
    text += fmt::format("{}{}:{}-{}", i == 0 ? "" : ", ", runs[i].sequence, runs[i].begin, runs[i].end);
  }
  if (shown < runs.size()) text += fmt::format(", … {} runs in all", runs.size());
  return text.empty() ? "nothing" : text;
}

}  // namespace ringattn
