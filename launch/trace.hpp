// SPDX-License-Identifier: Apache-2.0
// A run's timeline in the Trace Event Format that Perfetto and chrome://tracing open: a process for each rank, with a
// row each for transfers, waiting and computing.
#pragma once

#include <string>
#include <vector>

#include "comm/collective.hpp"
#include "ops/attention/attention.hpp"
#include "ops/ssm/ssm_timeline.hpp"

namespace ringattn {

// `blocks` of each rank; the times of a rank start with its own run().
std::string trace_text(const std::vector<std::vector<BlockTimes>>& ranks, const std::vector<std::string>& hosts);

// The same for an SSM op: rows for segment states, outputs, waiting, and transfers of states.
std::string trace_text(const std::vector<std::vector<SsmPhase>>& ranks, const std::vector<std::string>& hosts);

// Every rank's parts of an SSM op. Collective.
std::vector<std::vector<SsmPhase>> gather_ssm_phases(const std::vector<SsmPhase>& mine, const Collective& collective);

// Every rank's block times. Collective.
std::vector<std::vector<BlockTimes>> gather_block_times(const std::vector<BlockTimes>& mine,
                                                        const Collective& collective);

}  // namespace ringattn
