// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/scan_deal.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/scan.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  // of a sequence

}  // namespace

Layout deal_scan(std::span<const std::int64_t> lengths, int world) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
  const auto total = static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
  std::int64_t packed = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s]; begin += kSuperSegmentTokens) {
      const std::int64_t end = std::min(lengths[s], begin + kSuperSegmentTokens);
      // The rank that would have the middle of it, were tokens dealt one by one. Exact: tokens are below 2^52.
      const double middle = static_cast<double>(packed + begin) + static_cast<double>(end - begin) / 2.0;
      const int rank = std::min(world - 1, static_cast<int>(middle * world / total));
      runs[static_cast<std::size_t>(rank)].push_back({static_cast<std::int32_t>(s), begin, end});
    }
    packed += lengths[s];
  }
  return {lengths, std::move(runs)};
}

Layout stated_scan(std::span<const std::int64_t> lengths, const std::vector<std::vector<TokenRun>>& runs) {
  Layout layout(lengths, runs);
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const TokenRun& run : layout.runs(rank)) {
      if (run.begin % kSuperSegmentTokens == 0) continue;  // and so its neighbour ends there
      fail(ErrorCode::kUsage, fmt::format("rank {} begins at token {} of sequence {}", rank, run.begin, run.sequence),
           fmt::format("it is no multiple of {}, so two ranks would share a super-segment", kSuperSegmentTokens),
           "State runs of whole super-segments, or leave them out and move the rows to the layout that is dealt.");
    }
  }
  return layout;
}

Layout scan_layout(std::span<const std::int64_t> lengths, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                   int world) {
  if (lengths.empty()) {
    fail(ErrorCode::kUsage, "a scan of no sequences", "there is nothing to scan", "Give the sequences' lengths.");
  }
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] > 0 && lengths[s] <= kMostTokens) continue;
    fail(ErrorCode::kUsage, fmt::format("sequence {} of a scan has {} tokens", s, lengths[s]),
         "each has at least one, and at most 2^40", "Leave empty sequences out.");
  }
  if (!runs) return deal_scan(lengths, world);
  if (static_cast<int>(runs->size()) != world) {
    fail(ErrorCode::kUsage, fmt::format("runs of {}", counted(runs->size(), "rank")),
         fmt::format("there are {}", counted(static_cast<std::size_t>(world), "rank")),
         "State the tokens of each rank, none for those without.");
  }
  return stated_scan(lengths, *runs);
}

ScanHops scan_hops(const Layout& layout) {
  ScanHops result;
  result.steps.resize(static_cast<std::size_t>(layout.world()));
  const std::span<const std::int64_t> cu = layout.cu();
  std::size_t sequence = 0;
  const OwnedRun* before = nullptr;  // of the same sequence
  for (const OwnedRun& run : layout.owners()) {
    while (run.token >= cu[sequence + 1]) {
      ++sequence;
      before = nullptr;
    }
    std::vector<int>& steps = result.steps[static_cast<std::size_t>(run.owner)];
    if (before == nullptr) {
      steps.push_back(0);
    } else {
      // Neighbours of one rank are one run, so the state comes from another rank, whose latest run it is.
      const std::vector<int>& theirs = result.steps[static_cast<std::size_t>(before->owner)];
      const auto hop = static_cast<std::size_t>(theirs.back());
      if (result.hops.size() <= hop) result.hops.resize(hop + 1);
      result.hops[hop].push_back({before->owner, run.owner, static_cast<std::int64_t>(theirs.size()) - 1,
                                  static_cast<std::int64_t>(steps.size())});
      steps.push_back(theirs.back() + 1);
    }
    before = &run;
  }
  return result;
}

std::int64_t states_received(const ScanHops& hops, int rank) {
  std::int64_t received = 0;
  for (const std::vector<StateHop>& step : hops.hops) {
    received += std::ranges::count(step, rank, &StateHop::to);
  }
  return received;
}

Layout final_state_layout(const Layout& layout) {
  const std::span<const std::int64_t> cu = layout.cu();
  std::vector<std::vector<TokenRun>> ending(static_cast<std::size_t>(layout.world()));
  std::size_t sequence = 0;
  for (const OwnedRun& run : layout.owners()) {
    while (run.token >= cu[sequence + 1]) ++sequence;
    if (run.end() != cu[sequence + 1]) continue;
    const auto s = static_cast<std::int64_t>(sequence);
    ending[static_cast<std::size_t>(run.owner)].push_back({0, s, s + 1});
  }
  const std::int64_t sequences[] = {static_cast<std::int64_t>(cu.size()) - 1};
  return {sequences, std::move(ending)};
}

}  // namespace ringattn
