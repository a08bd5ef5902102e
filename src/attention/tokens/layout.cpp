// SPDX-License-Identifier: Apache-2.0
// Checks and merges the runs of every rank. deal.cpp distributes a job's tokens.
#include "attention/tokens/layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

// Checks the runs of one rank, and merges adjacent ones.
std::vector<TokenRun> join_runs(int rank, std::span<const std::int64_t> lengths, std::span<const TokenRun> runs) {
  std::vector<TokenRun> joined;
  for (const TokenRun& run : runs) {
    const auto refuse = [&](std::string_view why, std::string_view suggestion) {
      fail(ErrorCode::kUsage,
           fmt::format("rank {} states tokens [{}, {}) of sequence {}", rank, run.begin, run.end, run.sequence), why,
           suggestion);
    };
    if (run.sequence < 0 || static_cast<std::size_t>(run.sequence) >= lengths.size()) {
      refuse(fmt::format("the job has {}", counted(lengths.size(), "sequence")), "Sequences count from 0.");
    }
    const std::int64_t length = lengths[static_cast<std::size_t>(run.sequence)];
    if (run.begin < 0 || run.begin >= run.end || run.end > length) {
      refuse(fmt::format("a run holds at least one of the sequence's {} tokens", length),
             "State [begin, end) with 0 <= begin < end, and leave empty runs out.");
    }
    if (!joined.empty()) {
      TokenRun& last = joined.back();
      if (run.sequence < last.sequence || (run.sequence == last.sequence && run.begin < last.end)) {
        refuse(fmt::format("after tokens up to {} of sequence {}", last.end, last.sequence),
               "Runs ascend by sequence and token.");
      }
      if (run.sequence == last.sequence && run.begin == last.end) {
        last.end = run.end;
        continue;
      }
    }
    joined.push_back(run);
  }
  return joined;
}

constexpr std::string_view kOnce = "State each token on exactly one rank.";

// "token 5 of sequence 2" for a packed token.
std::string token_name(std::span<const std::int64_t> cu, std::int64_t packed) {
  const auto next = std::upper_bound(cu.begin(), cu.end(), packed);
  return fmt::format("token {} of sequence {}", packed - *std::prev(next), next - cu.begin() - 1);
}

}  // namespace

std::string_view layout_name(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::kStriped:
      return "striped";
    case LayoutKind::kZigzag:
      return "zigzag";
    case LayoutKind::kContiguous:
      return "contiguous";
  }
  return "striped";
}

Layout::Layout(std::span<const std::int64_t> lengths, std::vector<std::vector<TokenRun>> runs)
    : packed_begin_(lengths.size() + 1, 0), runs_(std::move(runs)), rows_(runs_.size()) {
  if (runs_.empty()) {
    fail(ErrorCode::kUsage, "a layout of no ranks", "a world has at least one",
         "State one list of runs for each rank.");
  }
  std::partial_sum(lengths.begin(), lengths.end(), packed_begin_.begin() + 1);
  for (std::size_t rank = 0; rank < runs_.size(); ++rank) {
    runs_[rank] = join_runs(static_cast<int>(rank), lengths, runs_[rank]);
    std::vector<std::int64_t>& rows = rows_[rank];
    rows.reserve(runs_[rank].size() + 1);
    rows.push_back(0);
    for (const TokenRun& run : runs_[rank]) {
      owners_.push_back({packed_begin_[static_cast<std::size_t>(run.sequence)] + run.begin, run.tokens(),
                         static_cast<int>(rank), rows.back()});
      rows.push_back(rows.back() + run.tokens());
    }
  }
  std::sort(owners_.begin(), owners_.end(), [](const OwnedRun& a, const OwnedRun& b) {
    return a.token != b.token ? a.token < b.token : a.owner < b.owner;
  });
  // Every run lies inside its sequence, so the axis is covered exactly once if each run starts where the last one
  // ended.
  std::int64_t covered = 0;
  int last_owner = 0;
  for (const OwnedRun& run : owners_) {
    if (run.token > covered) break;
    if (run.token < covered) {
      fail(ErrorCode::kUsage, fmt::format("{} belongs to two ranks", token_name(packed_begin_, run.token)),
           fmt::format("ranks {} and {} state it", std::min(last_owner, run.owner), std::max(last_owner, run.owner)),
           kOnce);
    }
    covered = run.end();
    last_owner = run.owner;
  }
  if (covered < packed_begin_.back()) {
    fail(ErrorCode::kUsage, fmt::format("{} belongs to no rank", token_name(packed_begin_, covered)),
         "the runs of all ranks together hold every token", kOnce);
  }
}

std::vector<std::int64_t> Layout::positions(int rank) const {
  std::vector<std::int64_t> result(static_cast<std::size_t>(tokens(rank)));
  auto next = result.begin();
  for (const TokenRun& run : runs(rank)) {
    std::iota(next, next + run.tokens(), run.begin);
    next += run.tokens();
  }
  return result;
}

std::vector<std::int64_t> Layout::packed_tokens(int rank) const {
  std::vector<std::int64_t> result(static_cast<std::size_t>(tokens(rank)));
  auto next = result.begin();
  for (const TokenRun& run : runs(rank)) {
    std::iota(next, next + run.tokens(), packed_begin_[static_cast<std::size_t>(run.sequence)] + run.begin);
    next += run.tokens();
  }
  return result;
}

std::int64_t Layout::rows_before(int rank, std::int64_t packed_token) const {
  const std::span<const TokenRun> all = runs(rank);
  const auto packed_begin = [this](const TokenRun& run) {
    return packed_begin_[static_cast<std::size_t>(run.sequence)] + run.begin;
  };
  const auto after = std::partition_point(all.begin(), all.end(),
                                          [&](const TokenRun& run) { return packed_begin(run) < packed_token; });
  if (after == all.begin()) return 0;
  const TokenRun& run = *std::prev(after);
  return run_rows(rank)[static_cast<std::size_t>(after - all.begin() - 1)] +
         std::min(run.tokens(), packed_token - packed_begin(run));
}

void Layout::shard(int rank, const std::byte* packed, std::byte* rows, std::int64_t token_bytes) const {
  for (const TokenRun& run : runs(rank)) {
    const std::int64_t bytes = run.tokens() * token_bytes;
    const std::int64_t first = packed_begin_[static_cast<std::size_t>(run.sequence)] + run.begin;
    std::memcpy(rows, packed + first * token_bytes, static_cast<std::size_t>(bytes));
    rows += bytes;
  }
}

void Layout::unshard(int rank, const std::byte* rows, std::byte* packed, std::int64_t token_bytes) const {
  for (const TokenRun& run : runs(rank)) {
    const std::int64_t bytes = run.tokens() * token_bytes;
    const std::int64_t first = packed_begin_[static_cast<std::size_t>(run.sequence)] + run.begin;
    std::memcpy(packed + first * token_bytes, rows, static_cast<std::size_t>(bytes));
    rows += bytes;
  }
}

}  // namespace ringattn
