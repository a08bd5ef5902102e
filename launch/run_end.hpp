// SPDX-License-Identifier: Apache-2.0
// How `ringattn run` ends, whatever its op.
#pragma once

#include <functional>
#include <string>

#include "comm/collective.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"

namespace ringattn {

// Instead of the job. Collective; returns the exit code.
int end_dry_run(const Screen& screen, Report& report, const Collective& collective);

// Behind the job: the first rank prints its result, says where output and trace are, and writes trace and report.
// `trace` gives the text of a trace that is wanted. Collective; returns the exit code.
int end_run(const Screen& screen, Report& report, const Collective& collective,
            const std::function<void()>& print_result, const std::function<std::string()>& trace);

}  // namespace ringattn
