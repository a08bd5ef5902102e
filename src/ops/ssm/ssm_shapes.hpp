// SPDX-License-Identifier: Apache-2.0
// An SSM op in several shapes (numbers of ranks, runs, cut in two), whose results must have the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "ops/common/difference.hpp"
#include "ops/ssm/ssm.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

struct SsmShape {
  int ranks = 1;
  bool in_turn = false;  // ranks have units of tokens in turn, else neighbouring ones
  // Long sequences are scanned up to a unit in their middle, and then from the final states of that; with only
  // a convolution they continue from the last tokens.
  bool resumed = false;
};

// One for each number of ranks; where there are more units, another with runs in turn; where a sequence is longer than
// a unit, two that are resumed. The first is what the others are compared with. `unit`: the tokens after which a state
// may go from rank to rank.
std::vector<SsmShape> ssm_shapes(const std::vector<int>& ranks, std::span<const std::int64_t> lengths,
                                 std::int64_t unit = kSuperSegmentTokens);

// A unit of a sequence to each rank in turn.
std::vector<std::vector<TokenRun>> runs_in_turn(std::span<const std::int64_t> lengths, int ranks,
                                                std::int64_t unit = kSuperSegmentTokens);

// Rows of the runs of a and b, each of `row_bytes`, in ascending order of their packed tokens.
Buffer interleaved_rows(const Buffer& a, std::span<const PackedRun> a_runs, const Buffer& b,
                        std::span<const PackedRun> b_runs, std::int64_t row_bytes);

struct SsmShapeResult {
  std::int64_t states = 0;  // that are sent from rank to rank
  std::optional<Difference> difference;
};

// Runs the SSM op in every shape, in worlds split from `world`, and compares y and final states with those of the
// first; the input wants final states. `seconds`: what it is predicted to take on one rank. The result of each shape is
// given to `done` as soon as it is known. Collective. Throws what an SSM op throws.
void run_ssm_shapes(const SsmInput& input, const SsmOptions& options, std::span<const SsmShape> shapes,
                    Transport& world, double seconds,
                    const std::function<void(const SsmShape&, const SsmShapeResult&)>& done);

}  // namespace ringattn
