// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/ssm_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;  // of a sequence
constexpr std::int64_t kMaxUnits = std::int64_t{1} << 20;
constexpr std::int64_t kMaxOfAllRanks = std::int64_t{1} << 22;

// A unit of a sequence.
struct Piece {
  std::int32_t sequence = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t tokens() const { return end - begin; }
};

std::vector<Piece> pieces_of(std::span<const std::int64_t> lengths, std::int64_t unit) {
  std::vector<Piece> pieces;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s]; begin += unit) {
      pieces.push_back({static_cast<std::int32_t>(s), begin, std::min(lengths[s], begin + unit)});
    }
  }
  return pieces;
}

// Minimum number of ranks for pieces [i, end), if no rank has more than `most` tokens: [pieces + 1].
std::vector<std::int64_t> ranks_from(std::span<const Piece> pieces, std::int64_t most) {
  std::vector<std::int64_t> ranks(pieces.size() + 1, 0);
  std::size_t end = pieces.size();  // of the first rank's pieces, if they begin at i
  std::int64_t tokens = 0;
  for (std::size_t i = pieces.size(); i-- > 0;) {
    tokens += pieces[i].tokens();
    while (tokens > most) tokens -= pieces[--end].tokens();
    ranks[i] = ranks[end] + 1;
  }
  return ranks;
}

}  // namespace

ScanUnit scan_unit(const SsmJob& job) { return {kSsmUnit.tokens, kSsmUnit.name, op_noun(job)}; }

std::int64_t super_segments(std::int64_t length) { return (length + kSuperSegmentTokens - 1) / kSuperSegmentTokens; }

void check_ssm_size(std::int64_t sequences, std::int64_t units, int world, const ScanUnit& unit) {
  const std::int64_t most = std::min(kMaxUnits, kMaxOfAllRanks / std::max(world, 1));
  if (std::max(sequences, units) <= most) return;
  const auto ranks = static_cast<std::uint64_t>(world);
  fail(ErrorCode::kMemory, fmt::format("{} is too large for {}", unit.op, counted(ranks, "rank")),
       fmt::format("it has {} of {} tokens, at most {} are possible on this number of ranks",
                   counted(static_cast<std::uint64_t>(units), unit.name), unit.tokens, most),
       "Use fewer tokens or sequences, or fewer ranks.");
}

void check_ssm_size(std::span<const std::int64_t> lengths, int world, const ScanUnit& unit) {
  std::int64_t pieces = 0;
  for (const std::int64_t length : lengths) {
    pieces += (std::clamp<std::int64_t>(length, 0, kMaxTokens) + unit.tokens - 1) / unit.tokens;
  }
  check_ssm_size(static_cast<std::int64_t>(lengths.size()), pieces, world, unit);
}

Layout deal_ssm(std::span<const std::int64_t> lengths, int world, const ScanUnit& unit) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
  const std::vector<Piece> pieces = pieces_of(lengths, unit.tokens);
  std::int64_t left = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  // The smallest possible maximum of tokens per rank.
  std::int64_t most = 1;
  for (const Piece& piece : pieces) most = std::max(most, piece.tokens());
  for (std::int64_t high = std::max(left, most); most < high;) {
    const std::int64_t middle = most + (high - most) / 2;
    if (ranks_from(pieces, middle).front() <= world) {
      high = middle;
    } else {
      most = middle + 1;
    }
  }
  const std::vector<std::int64_t> needed = ranks_from(pieces, most);
  const auto count = static_cast<std::int64_t>(pieces.size());
  std::int64_t next = 0;  // index of the next piece
  for (int rank = 0; rank < world && next < count; ++rank) {
    const std::int64_t ranks_after = world - rank - 1;  // ranks after this one
    const double share = static_cast<double>(left) / static_cast<double>(ranks_after + 1);
    std::int64_t tokens = 0;
    for (; next < count; ++next) {
      const Piece& piece = pieces[static_cast<std::size_t>(next)];
      const bool full = tokens + piece.tokens() > most || count - next <= ranks_after;
      // Rounded to nearest, for an equal share of the rest.
      const bool enough = static_cast<double>(tokens) + static_cast<double>(piece.tokens()) / 2.0 > share;
      if (tokens > 0 && (full || (enough && needed[static_cast<std::size_t>(next)] <= ranks_after))) break;
      runs[static_cast<std::size_t>(rank)].push_back({piece.sequence, piece.begin, piece.end});
      tokens += piece.tokens();
    }
    left -= tokens;
  }
  return {lengths, std::move(runs)};
}

Layout stated_ssm_layout(std::span<const std::int64_t> lengths, const std::vector<std::vector<TokenRun>>& runs,
                         const ScanUnit& unit) {
  Layout layout(lengths, runs);
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const TokenRun& run : layout.runs(rank)) {
      if (run.begin % unit.tokens == 0) continue;  // then the run before it ends there, too
      fail(ErrorCode::kUsage, fmt::format("rank {} begins at token {} of sequence {}", rank, run.begin, run.sequence),
           fmt::format("it is not a multiple of {}, so two ranks would share a {}", unit.tokens, unit.name),
           fmt::format("Use runs of whole {}s, or omit them and move the rows to the default layout.", unit.name));
    }
  }
  return layout;
}

Layout ssm_layout(std::span<const std::int64_t> lengths, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                  int world, const ScanUnit& unit) {
  if (lengths.empty()) {
    fail(ErrorCode::kUsage, fmt::format("{} of no sequences", unit.op), "there is nothing to compute",
         "Give the sequences' lengths.");
  }
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] >= 0 && lengths[s] <= kMaxTokens) continue;
    fail(ErrorCode::kUsage, fmt::format("sequence {} of {} has {} tokens", s, unit.op, lengths[s]),
         "each has between 0 and 2^40", "Check the sequences' lengths.");
  }
  check_ssm_size(lengths, world, unit);
  if (!runs) return deal_ssm(lengths, world, unit);
  if (static_cast<int>(runs->size()) != world) {
    fail(ErrorCode::kUsage, fmt::format("runs of {}", counted(runs->size(), "rank")),
         fmt::format("there are {}", counted(static_cast<std::size_t>(world), "rank")),
         "State the tokens of each rank, none for those without.");
  }
  return stated_ssm_layout(lengths, *runs, unit);
}

Layout conv1d_layout(std::span<const std::int64_t> lengths,
                     const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world) {
  return ssm_layout(lengths, runs, world,
                    runs ? kConv1dUnit : ScanUnit{kSsmUnit.tokens, kSsmUnit.name, kConv1dUnit.op});
}

StateHops state_hops(const Layout& layout) {
  StateHops result;
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
      // Adjacent runs of one rank are merged, so the state comes from another rank, from its latest run.
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

StateHops gradient_hops(const Layout& layout) {
  const StateHops states = state_hops(layout);
  std::vector<int> last_steps(layout.cu().size() - 1, 0);  // [sequences]: step of the last run
  const auto sequence_of = [&](int rank, std::int64_t run) {
    return static_cast<std::size_t>(layout.runs(rank)[static_cast<std::size_t>(run)].sequence);
  };
  for (int rank = 0; rank < layout.world(); ++rank) {
    const std::vector<int>& steps = states.steps[static_cast<std::size_t>(rank)];
    for (std::size_t run = 0; run < steps.size(); ++run) {
      int& last = last_steps[sequence_of(rank, static_cast<std::int64_t>(run))];
      last = std::max(last, steps[run]);
    }
  }
  StateHops result;
  result.steps = states.steps;
  result.hops.resize(states.hops.size());
  for (int rank = 0; rank < layout.world(); ++rank) {
    std::vector<int>& steps = result.steps[static_cast<std::size_t>(rank)];
    for (std::size_t run = 0; run < steps.size(); ++run) {
      steps[run] = last_steps[sequence_of(rank, static_cast<std::int64_t>(run))] - steps[run];
    }
  }
  for (const std::vector<StateHop>& step : states.hops) {
    for (const StateHop& hop : step) {
      const int from_step = result.steps[static_cast<std::size_t>(hop.to)][static_cast<std::size_t>(hop.to_run)];
      result.hops[static_cast<std::size_t>(from_step)].push_back({hop.to, hop.from, hop.to_run, hop.from_run});
    }
  }
  return result;
}

std::int64_t states_received(const StateHops& hops, int rank) {
  std::int64_t received = 0;
  for (const std::vector<StateHop>& step : hops.hops) {
    received += std::ranges::count(step, rank, &StateHop::to);
  }
  return received;
}

StateOwners state_owners(const Layout& layout) {
  const std::span<const std::int64_t> cu = layout.cu();
  const std::span<const OwnedRun> runs = layout.owners();
  StateOwners owners;
  std::size_t run = 0;  // the first run that ends after the sequence's first token
  for (std::size_t s = 0; s + 1 < cu.size(); ++s) {
    const auto ends_before = [&](std::int64_t token) { return run < runs.size() && runs[run].end() <= token; };
    if (cu[s] == cu[s + 1]) {
      const int before = s > 0 ? owners.final.back() : runs.empty() ? 0 : runs.front().owner;
      owners.initial.push_back(before);
      owners.final.push_back(before);
      continue;
    }
    while (ends_before(cu[s])) ++run;
    owners.initial.push_back(runs[run].owner);
    while (ends_before(cu[s + 1] - 1)) ++run;
    owners.final.push_back(runs[run].owner);
  }
  return owners;
}

std::vector<std::int32_t> sequences_of(std::span<const int> owners, int rank) {
  std::vector<std::int32_t> sequences;
  for (std::size_t s = 0; s < owners.size(); ++s) {
    if (owners[s] == rank) sequences.push_back(static_cast<std::int32_t>(s));
  }
  return sequences;
}

Layout state_layout(std::span<const int> owners, int world) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
  for (std::size_t s = 0; s < owners.size(); ++s) {
    const auto at = static_cast<std::int64_t>(s);
    runs[static_cast<std::size_t>(owners[s])].push_back({0, at, at + 1});
  }
  const std::int64_t states[] = {static_cast<std::int64_t>(owners.size())};
  return {states, std::move(runs)};
}

Layout final_state_layout(const Layout& layout) { return state_layout(state_owners(layout).final, layout.world()); }

}  // namespace ringattn
