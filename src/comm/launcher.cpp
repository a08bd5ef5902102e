// SPDX-License-Identifier: Apache-2.0
#include "comm/launcher.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "comm/launcher_variables.hpp"
#include "comm/store_rank.hpp"

namespace ringattn {

namespace {

const char* variable_text(const char* name) { return name == nullptr ? nullptr : std::getenv(name); }

std::optional<int> first_number(const char* RankVariables::*name) {
  for (const RankVariables& row : kRankVariables) {
    if (row.use == RankUse::kStore) continue;
    if (const char* text = variable_text(row.*name)) return std::atoi(text);
  }
  return std::nullopt;
}

}  // namespace

bool launched_by_mpi() {
  return std::ranges::any_of(kRankVariables, [](const RankVariables& row) {
    return row.use == RankUse::kMpi && (variable_text(row.rank) != nullptr || variable_text(row.ranks) != nullptr);
  });
}

std::optional<int> launched_rank() { return first_number(&RankVariables::rank); }

std::optional<int> launched_ranks() { return first_number(&RankVariables::ranks); }

std::optional<int> launched_local_ranks() { return first_number(&RankVariables::here); }

bool launched_as_rank() { return store_requested() || launched_by_mpi(); }

bool prints_for_launcher() {
  if (!store_requested()) return !launched_by_mpi() || launched_rank().value_or(0) == 0;
  try {
    return store_rank().rank == 0;
  } catch (const Error&) {
    return true;  // it can't connect to others, and says why
  }
}

}  // namespace ringattn
