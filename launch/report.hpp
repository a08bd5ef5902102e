// SPDX-License-Identifier: Apache-2.0
// The report of a run or verify (--json). It has the same members on success and on failure. Members that were not
// determined are null.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "launch/commands.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

class JsonWriter;

struct Report {
  std::string command;
  const Invocation* invocation = nullptr;

  int ranks = 0;  // 0: the ranks never connected
  std::string transport;
  std::vector<std::string> hosts;       // of each rank
  std::vector<std::string> devices;     // of each rank
  std::vector<std::string> processors;  // that each rank may run on, e.g. "0-15"; empty: ranks compute on GPUs

  std::shared_ptr<OpJob> job;  // null: its input was not opened
  std::optional<PlanFigures> plan;
  std::vector<RankFigures> figures;  // of each rank; empty: nothing was computed
  std::vector<ResultDigest> digests;
  std::function<void(JsonWriter&)> accuracy;  // writes the comparison with fp64; empty: there was none
  std::string verdict;                        // "ok", "pass", "fail", "unfinished"; empty: none
  std::optional<Error> error;

  double slowest_seconds() const;
  double max_exposed_comm_seconds() const;
  double flops_per_second_per_rank() const;
  std::size_t memory_peak() const;  // maximum over the ranks
  NonFinite non_finite() const;     // of all ranks together
};

std::string report_text(const Report& report);

// The members that every document of the program starts with: schema, tool, argv, config, environment. `shape`: the
// shape of the input, if one is given and has been opened.
void write_document_head(JsonWriter& json, std::string_view command, const Invocation& invocation,
                         const InputShape& shape = {});

// Writes the report to the file or stream of --json.
void write_report(const Report& report);

// The text of a report until the job writes its own.
std::string unfinished_report_text(const Invocation& invocation, std::string_view command);

// The report of a command that failed before it had anything else to report. Does not throw, because the failure itself
// matters more.
void report_failure(const Invocation& invocation, std::string_view command, const Error& error) noexcept;
// Runs a command's job with its own report. If the job throws, rank 0 reports what is known so far.
int run_reported(std::string_view command, const Invocation& invocation, Transport& world,
                 const std::function<int(Report&)>& job);

// Prepares report.job on the world, and gathers the hosts, devices and plans of all ranks. Collective.
void prepare_job(Report& report, const Options& options, Transport& world, const Collective& collective);
// Gathers the figures of a run. Collective; every rank gets all.
void gather_figures(Report& report, RankFigures mine, const Transport& world, const Collective& collective);

}  // namespace ringattn
