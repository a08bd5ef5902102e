// SPDX-License-Identifier: Apache-2.0
// The table of subcommands. A subcommand is one row here and one file.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/transport.hpp"
#include "launch/config.hpp"
#include "launch/report_file.hpp"

namespace ringattn {

// The input of a subcommand. `arguments` is the whole command line, for reports.
struct Invocation {
  Config config;
  std::vector<std::string> arguments;
  bool first_process = true;          // without a world: this process prints for all
  std::string transport_reason;       // transports that were passed over, and why
  ReportFile* report_file = nullptr;  // set before a command runs
};

// The number of ranks that verify makes in this process if neither --ranks nor mpirun sets it.
inline constexpr int kLargestLocalWorld = 7;

struct CommandRow {
  std::string_view name;
  unsigned bit;  // of FlagRow::commands
  std::string_view summary;
  std::string_view examples[2];
  std::string_view description;
  // Whether the command needs ranks for this configuration. Otherwise it runs once, without a world, on the first
  // process. That process prints for the job and returns its exit code, and the other processes exit with 0.
  bool (*needs_world)(const Config& config);
  // The number of ranks to make in this process. Nothing: one rank, or those that mpirun has started.
  std::optional<int> (*ranks)(const Config& config);
  // Runs on every rank (`world`), or once with nullptr. Returns the exit code; throws Error.
  int (*main)(const Invocation& invocation, Transport* world);
};

std::span<const CommandRow> command_table();

// "run, verify and plan", for the bits of FlagRow::commands.
std::string command_names(unsigned bits);

int run_main(const Invocation& invocation, Transport* world);
int verify_main(const Invocation& invocation, Transport* world);
int plan_main(const Invocation& invocation, Transport* world);
int bench_main(const Invocation& invocation, Transport* world);
int file_op_main(const Invocation& invocation, Transport* world);
int info_main(const Invocation& invocation, Transport* world);

}  // namespace ringattn
