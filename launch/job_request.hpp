// SPDX-License-Identifier: Apache-2.0
// The library's requests and options, as a configuration means them.
#pragma once

#include <cstdint>
#include <string>

#include "launch/config.hpp"
#include "ops/attention/attention.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// Checks the input's flags against each other. Throws kUsage. `require_source`: one of --input and --synthetic must be
// given; otherwise the shape flags are enough.
void check_source(const Config& config, bool require_source);

// The file that is given, and what flags say of it.
FileInput file_input(const Config& config);

// Checks, and says what is to be opened.
InputRequest input_request(const Config& config, bool require_source);

// Synthetic input of another length.
SyntheticInput synthetic_input(const Config& config, std::int64_t seq);

// Throws kUsage.
Numerics numerics_of(const Config& config);

// The input, open: the three above. `target`: where blocks of keys are chosen by its rows.
JobInput open_input(const Config& config, bool require_source, const TopKDevice& target = {});

// Where the ranks of a world choose blocks, by the kernel that is asked for.
TopKDevice top_k_device(const Config& config, const Transport& world);

// Returns the input as it is. Latents in rows that could be a decode step become rows for ring attention where a
// setting was given that only ring attention has.
JobInput decode_or_requested_rows(JobInput input, const Config& config);

// Metadata of what decides the result of an op; where and how it was computed does not.
FileMetadata deciding_values(const Config& config, Op op);

// The machine model of --machine, slowed down to the pace that the environment sets. Throws kFile.
MachineModel machine_model(const Config& config);

// Throws kUsage and kFile.
Options library_options(const Config& config);

}  // namespace ringattn
