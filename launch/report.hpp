// SPDX-License-Identifier: Apache-2.0
// The report of a run or verify (--json): the same members whether it went well or not, null where it didn't get that
// far.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "launch/commands.hpp"
#include "ops/attention/attention.hpp"
#include "ops/common/accuracy.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/loaded_job.hpp"
#include "ops/common/output.hpp"
#include "ops/ssm/ssm_accuracy.hpp"
#include "ops/ssm/ssm_file_job.hpp"

namespace ringattn {

class JsonWriter;

// What a rank tells rank 0.
struct RankFigures {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // of attention; of SSM ops: waiting for states
  double flops = 0.0;
  std::size_t memory_peak = 0;
  std::size_t memory_planned = 0;
  std::int64_t tokens = 0;
  std::int64_t bytes_received = 0;
  std::int64_t bytes_sent = 0;
  NonFinite non_finite;  // of SSM ops: of all rows, as q
};

struct PlanFigures {
  std::int64_t blocks = 0;
  std::string layout;
  std::int64_t stripe = 0;          // 0: differs between sequences
  std::int64_t bytes_moved = 0;     // received, by all ranks together
  std::size_t memory_per_rank = 0;  // of the neediest rank
  std::optional<double> estimated_seconds;
  // Decode only. `blocks` counts the KV splits of the longest sequence; `stripe` is the length of one KV split.
  std::optional<DecodeMemory> memory;
  double bytes_read = 0.0;  // of the cache, by all ranks together
  std::string form;         // of latents; else empty
  // MLA with ring attention only.
  struct MlaFigures {
    int heads_at_a_time = 0;
    std::int64_t bytes_moved_expanded = 0;  // what would be moved if K and V of all heads were sent
  };
  std::optional<MlaFigures> latents;
  // SSM only. `blocks` counts the runs of all ranks; `stripe` is the length of a super-segment.
  std::optional<SsmMemory> ssm_memory;
};

struct Report {
  std::string command;
  const Invocation* invocation = nullptr;
  int ranks = 0;  // 0: the ranks never met
  std::string transport;
  std::vector<std::string> hosts;    // of each rank
  std::vector<std::string> devices;  // of each rank
  std::optional<Job> job;
  Op op = Op::kAttention;          // of `job`
  std::optional<MlaSpec> latents;  // of kMla, whose job is that of the expanded keys and values
  std::optional<SsmJob> ssm;       // of SSM ops, which have no `job`
  std::string kernel;
  std::string kernel_reason;
  std::optional<PlanFigures> plan;
  std::vector<RankFigures> figures;  // of each rank; empty: nothing was computed
  double flops = 0.0;                // of the job
  std::optional<Digests> digests;
  std::optional<SsmDigests> ssm_digests;
  std::optional<Accuracy> accuracy;  // against fp64
  std::optional<SsmAccuracy> ssm_accuracy;
  std::string verdict;  // "ok", "pass", "fail", "unfinished"; empty: none
  std::optional<Error> error;

  double slowest_seconds() const;
  double max_exposed_comm_seconds() const;
  double flops_per_second_per_rank() const;
  std::size_t memory_peak() const;  // of the neediest rank
  NonFinite non_finite() const;     // of all ranks together
};

std::string report_text(const Report& report);

// The members that every document of the program starts with: schema, tool, argv, config, environment. `shape`: of the
// input, where one is given and has been opened.
void write_document_head(JsonWriter& json, std::string_view command, const Invocation& invocation,
                         const FileShape& shape = {});

// Bytes on a rank: a member "memory".
void write_memory(JsonWriter& json, const DecodeMemory& memory);
void write_memory(JsonWriter& json, const SsmMemory& memory);

// What an SSM op computes: members of an object "job".
void write_ssm_spec(JsonWriter& json, const SsmSpec& spec);

// Where --json leads.
void write_report(const Report& report);

// What a report says until it says more.
std::string unfinished_report_text(const Invocation& invocation, std::string_view command);

// The report of a command that failed before it had anything else to report. Throws nothing: the failure itself matters
// more.
void report_failure(const Invocation& invocation, std::string_view command, const Error& error) noexcept;
// Runs a command's job with a report of its own. When it throws, rank 0 reports what was found out until then.
int run_reported(std::string_view command, const Invocation& invocation, Transport& world,
                 const std::function<int(Report&)>& job);

// Collective; every rank gets all.
void gather_world(Report& report, PreparedFileJob& prepared, Transport& world, const Collective& collective);
void gather_figures(Report& report, PreparedFileJob& prepared, const RankResult& result, Transport& world,
                    const Collective& collective);
// The same for a decode step of `decode`.
void gather_decode(Report& report, const JobInput& input, Decode& decode, const DecodePlanSummary& step,
                   Transport& world, const Collective& collective);
void gather_decode_figures(Report& report, Decode& decode, const DecodePlanSummary& step, const RankResult& result,
                           Transport& world, const Collective& collective);

// The same for an SSM op.
void gather_ssm(Report& report, PreparedSsm& prepared, Transport& world, const Collective& collective);
void gather_ssm_figures(Report& report, PreparedSsm& prepared, const SsmRankResult& result, Transport& world,
                        const Collective& collective);

}  // namespace ringattn
