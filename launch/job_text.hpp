// SPDX-License-Identifier: Apache-2.0
// Context lines about a job, shared by the subcommands.
#pragma once

#include <string>

#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/attention/attention.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// What several shapes of a job have in common: all but the tokens.
std::string shape_text(const JobInput& input);
// Says that synthetic input lacks the attention sinks that the layer of --model-config has.
void note_model_sinks(const Screen& screen, const Config& config);

// "striped, stripe 128 tokens"
std::string layout_text(const LayoutRequest& request);

// "form: absorbed (1 query a sequence at most: absorbed up to 170)", of latents.
std::string form_text(const JobInput& input);
// Says that a cache is read as rows, or that latents in rows are not decoded, and why.
void print_read_rows(const Screen& screen, const JobInput& input);

// World, input, job, kernel, cache and plan of a decode step that is about to run.
void print_decode(const Screen& screen, const JobInput& input, const Decode& decode, const DecodePlanSummary& step,
                  const Report& report);
// The same of any job; of those that go around the ring the layout too.
void print_job(const Screen& screen, PreparedFileJob& prepared, const Report& report);

// "dense", "40 pages of 64 tokens, head-major": how the cache lies that a step reads.
std::string cache_text(const JobInput& input, const DecodeJob& job);
// "distributed by KV splits of 8192 keys": how the cache is divided among ranks.
std::string deal_text(const DecodePlanSummary& step);
// "rank 1 holds 131072 keys of 4 K/V heads, owns 8 rows".
std::string held_text(const DecodePlanSummary& step, std::size_t rank);

// What every op says first: program, world, input and job, and what computes it; then, with --verbose, where.
// `unread`: of the input file.
void print_head(const Screen& screen, const std::string& source, const UnreadTensors& unread, const std::string& job,
                const KernelEntry& kernel, int threads, const Report& report);
void print_unread(const Screen& screen, const UnreadTensors& unread);
void print_devices(const Screen& screen, const Report& report);

}  // namespace ringattn
