// SPDX-License-Identifier: Apache-2.0
// Golden files of `ringattn verify`, whichever op they are of.
#pragma once

#include <string>

#include "comm/collective.hpp"
#include "launch/options.hpp"
#include "launch/screen.hpp"
#include "ops/jobs/golden.hpp"

namespace ringattn {

// Before anything is computed: the file is sound, and of this job and program. Rank 0 reads it for all, so that they
// come to one verdict. Collective.
Golden read_golden(const Collective& collective, const std::string& path, const Golden& now);

// Whether the digests are those that were recorded; says which are not.
bool check_golden(const Screen& screen, const std::string& path, const Golden& recorded, const Golden& now);

// To --record. Collective.
void write_golden(const Screen& screen, const Collective& collective, const JobOptions& options, const Golden& golden);

}  // namespace ringattn
