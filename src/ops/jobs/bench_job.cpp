// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/bench_job.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/size.hpp"

namespace ringattn {

namespace {

// Without members that are 0, because older lines leave some of them out.
std::vector<std::pair<std::string, BenchValue>> normalized(const BenchJob& job) {
  std::vector<std::pair<std::string, BenchValue>> members = job.members;
  std::erase_if(members, [](const auto& member) { return member.second == BenchValue(std::int64_t{0}); });
  std::ranges::sort(members);
  return members;
}

}  // namespace

std::int64_t BenchJob::number(std::string_view name) const {
  for (const auto& [member, value] : members) {
    if (member == name && std::holds_alternative<std::int64_t>(value)) return std::get<std::int64_t>(value);
  }
  return 0;
}

std::string BenchJob::label() const {
  std::string text = fmt::format("{}, {}, {}", counted(static_cast<std::uint64_t>(tokens), "token"),
                                 counted(static_cast<std::uint64_t>(batch), "sequence"), op);
  for (const auto& [name, value] : members) {
    if (const auto* const number = std::get_if<std::int64_t>(&value)) {
      if (*number != 0) text += fmt::format(", {} {}", name, *number);
    } else {
      text += ", " + std::get<std::string>(value);
    }
  }
  return text;
}

bool BenchJob::operator==(const BenchJob& other) const {
  const bool same_kind = (kind == BenchKind::kStep) == (other.kind == BenchKind::kStep);
  return same_kind && op == other.op && tokens == other.tokens && batch == other.batch && source == other.source &&
         normalized(*this) == normalized(other);
}

}  // namespace ringattn
