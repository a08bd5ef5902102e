// SPDX-License-Identifier: Apache-2.0
// How ranks deal the tokens of a scan, and how states travel from one to the next. Pure: no ranks run here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/tokens/layout.hpp"

namespace ringattn {

// Before tables of many entries are made: throws kMemory where a scan of so many sequences with so many super-segments
// needs more than ranks have tables for.
void check_ssm_size(std::int64_t sequences, std::int64_t super_segments, int world);
void check_ssm_size(std::span<const std::int64_t> lengths, int world);
// The super-segments of a sequence.
std::int64_t super_segments(std::int64_t length);

// Whole super-segments (kernels/ssm.hpp) in order, neighbours to each rank: the rank with most tokens has as few as
// can be, and the others near an equal share of the rest. With fewer super-segments than ranks the first have one each.
Layout deal_ssm(std::span<const std::int64_t> lengths, int world);

// The caller's own runs. Throws kUsage when they are not a layout of these tokens, or cut a super-segment.
Layout stated_ssm_layout(std::span<const std::int64_t> lengths, const std::vector<std::vector<TokenRun>>& runs);

// What ranks of a scan have: stated runs where there are some, else those that are dealt. Sequences may be empty.
// Throws kUsage, also for no sequences and for runs of another number of ranks; kMemory where check_ssm_size() does.
Layout ssm_layout(std::span<const std::int64_t> lengths, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                  int world);

// The state between two runs of a sequence, which different ranks have. Runs are numbered as in Layout::runs().
struct StateHop {
  int from = 0;  // ranks
  int to = 0;
  std::int64_t from_run = 0;  // of rank `from`
  std::int64_t to_run = 0;    // of rank `to`

  bool operator==(const StateHop&) const = default;
};

struct StateHops {
  // [ranks][runs]: runs of the same sequence that stand before the run, which is SsmRun::step.
  std::vector<std::vector<int>> steps;
  // [most steps − 1]: hop s is from runs of step s to runs of step s + 1; ascending by token.
  std::vector<std::vector<StateHop>> hops;
};

StateHops state_hops(const Layout& layout);

// How many states a rank receives.
std::int64_t states_received(const StateHops& hops, int rank);

// Which rank has each sequence's initial state, and which its final one: [sequences]. They are the ranks of its first
// and of its last token. An empty sequence passes its state through on the rank of the token before it on the packed
// axis; where there is none, on the rank of the token after it; where no sequence has tokens, on rank 0.
struct StateOwners {
  std::vector<int> initial;
  std::vector<int> final;
};

StateOwners state_owners(const Layout& layout);

// The sequences of one owner, ascending.
std::vector<std::int32_t> sequences_of(std::span<const int> owners, int rank);

// Final states as a layout of one sequence, whose token s is the state of sequence s: [sequences] owners.
Layout state_layout(std::span<const int> owners, int world);
Layout final_state_layout(const Layout& layout);

}  // namespace ringattn
