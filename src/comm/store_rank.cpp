// SPDX-License-Identifier: Apache-2.0
#include "comm/store_rank.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string_view>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "comm/launcher_variables.hpp"

namespace ringattn {

namespace {

constexpr const char* kStore = "RINGATTN_STORE";

// Treats a variable set to an empty text as unset.
std::optional<std::string> variable_value(const char* name) {
  std::optional<std::string> value = environment_value(name);
  return value && value->empty() ? std::nullopt : value;
}

int number_of(const char* name, const std::string& text, int min_value, int max_value) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < min_value || number > max_value) {
    fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", name, text),
         fmt::format("it takes a whole number from {} to {}", min_value, max_value), "Check what starts the ranks.");
  }
  return number;
}

const RankVariables& find_row() {
  const RankVariables* half = nullptr;
  for (const RankVariables& row : kRankVariables) {
    if (row.ranks == nullptr) continue;
    if (variable_value(row.rank) && variable_value(row.ranks)) return row;
    if (half == nullptr && variable_value(row.rank)) half = &row;
  }
  fail(ErrorCode::kUsage, fmt::format("{} is set, and {}", kStore, half == nullptr ? "no rank is" : "no world size is"),
       half == nullptr ? std::string("neither RANK nor SLURM_PROCID says which rank this process is")
                       : fmt::format("{} is, and {} is not", half->rank, half->ranks),
       "Start the ranks with torchrun or srun, or set RANK and WORLD_SIZE for each.");
}

std::string job_name() {
  if (auto job = variable_value("RINGATTN_JOB")) return *job;
  std::string job;
  if (const auto torchrun = variable_value("TORCHELASTIC_RUN_ID")) {
    job = fmt::format("torchrun {}", *torchrun);
  } else if (const auto slurm = variable_value("SLURM_JOB_ID")) {
    job = fmt::format("Slurm {}.{}", *slurm, variable_value("SLURM_STEP_ID").value_or("batch"));
  }
  return job.substr(0, kMaxJobName);
}

}  // namespace

bool store_requested() { return variable_value(kStore).has_value(); }

StoreRank store_rank() {
  StoreRank mine;
  const std::string store = variable_value(kStore).value_or("");
  const std::optional<StoreAddress> address = parse_store_address(store);
  if (!address) {
    fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", kStore, store), "it takes HOST:PORT, of rank 0's host",
         "Give it such an address, with a port that nothing else uses.");
  }
  mine.address = *address;
  const RankVariables& row = find_row();
  mine.size = number_of(row.ranks, *variable_value(row.ranks), 1, kMaxStoreRanks);
  mine.rank = number_of(row.rank, *variable_value(row.rank), 0, mine.size - 1);
  mine.job = job_name();
  return mine;
}

}  // namespace ringattn
