// SPDX-License-Identifier: Apache-2.0
// How the tokens of an SSM job, or of a gated delta rule, are distributed, and which states ranks pass on. Pure: no
// ranks run here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// What is never divided between ranks.
struct ScanUnit {
  std::int64_t tokens = 0;  // units begin at multiples of this, counted from the sequence's first token
  std::string_view name;    // in messages
  std::string_view op;      // in messages, with its article
};

inline constexpr ScanUnit kSsmUnit{kSuperSegmentTokens, "super-segment", "an SSM"};
inline constexpr ScanUnit kGatedDeltaUnit{kSegmentTokens, "segment", "a gated delta rule"};
// A convolution's bits do not depend on units, but each run needs the width − 1 tokens that the next one reads.
inline constexpr ScanUnit kConv1dUnit{kSegmentTokens, "segment", "a causal conv1d"};

// The unit of a job. Messages name the job's op.
ScanUnit scan_unit(const SsmJob& job);

// Call before large tables are allocated. Throws kMemory if a job with this many sequences and units exceeds the
// maximum table sizes.
void check_ssm_size(std::int64_t sequences, std::int64_t units, int world, const ScanUnit& unit = kSsmUnit);
void check_ssm_size(std::span<const std::int64_t> lengths, int world, const ScanUnit& unit = kSsmUnit);
// Number of super-segments of a sequence.
std::int64_t super_segments(std::int64_t length);

// Whole units in order, contiguous for each rank. Minimizes the tokens of the rank with most, and gives the others
// nearly equal shares of the rest. With fewer units than ranks the first ranks have one each.
Layout deal_ssm(std::span<const std::int64_t> lengths, int world, const ScanUnit& unit = kSsmUnit);

// The caller's own runs. Throws kUsage if they are not a layout of these tokens, or cut a unit.
Layout stated_ssm_layout(std::span<const std::int64_t> lengths, const std::vector<std::vector<TokenRun>>& runs,
                         const ScanUnit& unit = kSsmUnit);

// The layout of a job: the stated runs, or deal_ssm(). Sequences may be empty. Throws kUsage, also for no sequences and
// for runs of another number of ranks; kMemory as check_ssm_size() does.
Layout ssm_layout(std::span<const std::int64_t> lengths, const std::optional<std::vector<std::vector<TokenRun>>>& runs,
                  int world, const ScanUnit& unit = kSsmUnit);
// The layout of a convolution: the stated runs, of whole segments, or an SSM's layout.
Layout conv1d_layout(std::span<const std::int64_t> lengths,
                     const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world);

// A state that is sent between two consecutive runs of a sequence, on different ranks. Run indices are those of
// Layout::runs().
struct StateHop {
  int from = 0;  // ranks
  int to = 0;
  std::int64_t from_run = 0;  // of rank `from`
  std::int64_t to_run = 0;    // of rank `to`

  bool operator==(const StateHop&) const = default;
};

struct StateHops {
  // [ranks][runs]: number of earlier runs of the same sequence. This is SsmRun::step.
  std::vector<std::vector<int>> steps;
  // [max steps − 1]: hops[s] are from runs of step s to runs of step s + 1, ascending by token.
  std::vector<std::vector<StateHop>> hops;
};

StateHops state_hops(const Layout& layout);
// The same for gradients of states, which go from the last run of a sequence to the first: a run's step is the number
// of later runs, and hops are from its run to the one before.
StateHops gradient_hops(const Layout& layout);

// Number of states that a rank receives.
std::int64_t states_received(const StateHops& hops, int rank);

// The ranks that have the initial and the final state of each sequence: [sequences]. They hold its first and its last
// token. An empty sequence passes its state through on the rank of the token before it on the packed axis, or else of
// the token after it, or else on rank 0.
struct StateOwners {
  std::vector<int> initial;
  std::vector<int> final;
};

StateOwners state_owners(const Layout& layout);

// The sequences of one owner, ascending.
std::vector<std::int32_t> sequences_of(std::span<const int> owners, int rank);

// States as a layout of one sequence whose token s is the state of sequence s. `owners`: [sequences].
Layout state_layout(std::span<const int> owners, int world);
Layout final_state_layout(const Layout& layout);

}  // namespace ringattn
