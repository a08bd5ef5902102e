// SPDX-License-Identifier: Apache-2.0
// A run's timeline in the Trace Event Format that Perfetto and chrome://tracing open: a process for each rank, with a
// row for each lane of the op.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

// The events of every rank. Collective.
std::vector<std::vector<TraceEvent>> gather_timeline(const std::vector<TraceEvent>& mine, const Collective& collective);
// `ranks`: the events of each. The times of a rank start with its own run().
std::string trace_text(const std::vector<std::string_view>& lanes, const std::vector<std::vector<TraceEvent>>& ranks,
                       const std::vector<std::string>& hosts);

}  // namespace ringattn
