// SPDX-License-Identifier: Apache-2.0
// A world in the plan of an op whose ranks own adjacent tokens: SSM ops, the gated delta rule, and gradients of these.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/json_writer.hpp"
#include "ops/common/op_plan.hpp"
#include "ops/reshard/reshard.hpp"
#include "ops/ssm/ssm_plan_summary.hpp"

namespace ringattn {

struct ContiguousPlan {
  const Layout& layout;
  SsmMemory memory;                    // on the rank that needs most
  std::vector<std::int64_t> received;  // [ranks] bytes
  double token_flops = 0.0;
  std::int64_t unit_tokens = 0;                  // ranks own whole units of this many tokens
  std::optional<std::int64_t> state_bytes = {};  // of one sequence
  std::optional<double> balance = {};            // maximum over mean of the ranks' tokens
  std::optional<double> seconds = {};            // absent: not estimated
  std::optional<double> passing_seconds = {};    // to pass states through all ranks
  std::optional<AttentionReshard> reshard = {};  // from attention's layout, and back

  std::int64_t tokens() const { return layout.cu().back(); }
};

// Bytes that each rank receives as states of `state_bytes`: [ranks].
std::vector<std::int64_t> state_bytes_received(const StateHops& hops, int world, std::int64_t state_bytes);

// Adds the lines of a PlanRow: which rank owns and receives what.
void add_owners(const ContiguousPlan& plan, bool verbose, PlanRow& row);
// Writes the plan's object of a report.
void write_contiguous_plan(JsonWriter& json, const ContiguousPlan& plan);

// The row of an op whose states pass from rank to rank, and its columns. `state`: "state", "halo".
std::vector<Cell> state_plan_columns(const std::string& state);
PlanRow state_plan_row(const ContiguousPlan& plan, std::int64_t states_moved, bool details, bool verbose);

}  // namespace ringattn
