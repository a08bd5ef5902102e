// SPDX-License-Identifier: Apache-2.0
// Golden files of `ringattn verify`, for any op.
#pragma once

#include <string>

#include "comm/collective.hpp"
#include "launch/options.hpp"
#include "launch/screen.hpp"
#include "ops/jobs/golden.hpp"

namespace ringattn {

// Called before anything is computed. Checks that the file is valid and belongs to this job and program. Rank 0 reads
// it for all ranks, so that all come to the same verdict. Collective.
Golden read_golden(const Collective& collective, const std::string& path, const Golden& now);

// Whether the digests equal the recorded ones. Prints those that differ.
bool check_golden(const Screen& screen, const std::string& path, const Golden& recorded, const Golden& now);

// Writes the golden file of --record. Collective.
void write_golden(const Screen& screen, const Collective& collective, const JobOptions& options, const Golden& golden);

}  // namespace ringattn
