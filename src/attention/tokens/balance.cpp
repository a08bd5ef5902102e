// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/balance.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace ringattn {

namespace {

using RankRuns = std::vector<std::vector<TokenRun>>;

// The runs of one sequence, with their ranks.
std::vector<std::vector<std::pair<std::size_t, TokenRun>>> by_sequence(const Layout& layout, std::size_t sequences) {
  std::vector<std::vector<std::pair<std::size_t, TokenRun>>> runs(sequences);
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const TokenRun& run : layout.runs(rank)) {
      runs[static_cast<std::size_t>(run.sequence)].emplace_back(static_cast<std::size_t>(rank), run);
    }
  }
  return runs;
}

}  // namespace

JobLayout balance_stripes(const Batch& batch, const QueryWork& work, JobLayout layout) {
  const std::int64_t stripe = layout.request.stripe;
  const auto world = static_cast<std::size_t>(layout.queries.world());
  if (layout.request.kind != LayoutKind::kStriped || stripe == 0 || world == 1) return layout;
  const std::size_t sequences = batch.sequences.size();
  const auto queries_of = by_sequence(layout.queries, sequences);
  const auto keys_of = by_sequence(layout.keys, sequences);
  RankRuns queries(world);
  RankRuns keys(world);
  std::vector<double> loads(world, 0.0);
  std::vector<std::size_t> ranks(world);
  for (std::size_t s = 0; s < sequences; ++s) {
    const auto keep = [s](const auto& dealt, RankRuns& runs) {
      for (const auto& [rank, run] : dealt[s]) runs[rank].push_back(run);
    };
    const bool split = std::ranges::any_of(
        queries_of[s], [&](const auto& owned) { return owned.first != queries_of[s].front().first; });
    const Sequence& of = batch.sequences[s];
    const bool alike = of.q_len == of.k_len;
    if (!split || !alike) keep(keys_of, keys);
    if (!split) {
      keep(queries_of, queries);
      for (const auto& [rank, run] : queries_of[s]) loads[rank] += work(run);
      continue;
    }
    std::vector<std::pair<double, TokenRun>> round;
    for (std::int64_t begin = 0; begin < of.q_len;) {
      round.clear();
      for (std::size_t i = 0; i < world && begin < of.q_len; ++i) {
        const TokenRun run{static_cast<std::int32_t>(s), begin, begin + std::min(stripe, of.q_len - begin)};
        round.emplace_back(work(run), run);
        begin = run.end;
      }
      std::ranges::stable_sort(round, [](const auto& a, const auto& b) { return a.first > b.first; });
      std::iota(ranks.begin(), ranks.end(), std::size_t{0});
      std::ranges::stable_sort(ranks, [&](std::size_t a, std::size_t b) { return loads[a] < loads[b]; });
      for (std::size_t i = 0; i < round.size(); ++i) {
        const auto& [pairs, run] = round[i];
        loads[ranks[i]] += pairs;
        queries[ranks[i]].push_back(run);
        if (alike) keys[ranks[i]].push_back(run);
      }
    }
  }
  return {layout.request, Layout(batch.q_lengths(), std::move(queries)), Layout(batch.k_lengths(), std::move(keys))};
}

}  // namespace ringattn
