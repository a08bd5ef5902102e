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
  bool in_turn = false;  // ranks get units of tokens round-robin, else adjacent ones
  // Long sequences are scanned up to a unit in their middle, and the rest is then scanned from these final states. If
  // there is only a convolution, the rest continues from the last tokens.
  bool resumed = false;
};

// One shape for each number of ranks. If there are enough units, also one with round-robin runs. If a sequence is
// longer than a unit, also two that are resumed. The others are compared with the first one. `unit`: the number of
// tokens after which a state may be sent from rank to rank.
std::vector<SsmShape> ssm_shapes(const std::vector<int>& ranks, std::span<const std::int64_t> lengths,
                                 std::int64_t unit = kSuperSegmentTokens);

// Distributes units of the sequences to the ranks round-robin.
std::vector<std::vector<TokenRun>> runs_in_turn(std::span<const std::int64_t> lengths, int ranks,
                                                std::int64_t unit = kSuperSegmentTokens);

// Rows of the runs of a and b, each of `row_bytes`, in ascending order of their packed tokens.
Buffer interleaved_rows(const Buffer& a, std::span<const PackedRun> a_runs, const Buffer& b,
                        std::span<const PackedRun> b_runs, std::int64_t row_bytes);

struct SsmShapeResult {
  std::int64_t states = 0;  // number of states that are sent between ranks
  std::optional<Difference> difference;
};

// Runs the SSM op in every shape, in worlds split from `world`, and compares y and final states with those of the
// first; the input must request final states. `seconds`: the predicted time on one rank. The result of each shape is
// passed to `done` as soon as it is known. Collective. Throws the errors of an SSM op.
void run_ssm_shapes(const SsmInput& input, const SsmOptions& options, std::span<const SsmShape> shapes,
                    Transport& world, double seconds,
                    const std::function<void(const SsmShape&, const SsmShapeResult&)>& done);

}  // namespace ringattn
