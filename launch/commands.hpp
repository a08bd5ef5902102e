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

// What a subcommand works with. `arguments` is the whole command line, for reports.
struct Invocation {
  Config config;
  std::vector<std::string> arguments;
  bool first_process = true;          // without a world: this process speaks for all
  std::string transport_reason;       // what was passed over, and why
  ReportFile* report_file = nullptr;  // set before a command runs
};

// Ranks that verify makes in this process where neither --ranks nor mpirun says how many.
inline constexpr int kLargestLocalWorld = 7;

struct CommandRow {
  std::string_view name;
  unsigned bit;  // of FlagRow::commands
  std::string_view summary;
  std::string_view examples[2];
  std::string_view description;
  // Whether it needs ranks for this configuration; otherwise it runs once, without a world, on the first process. What
  // that one prints and its code are the job's: the others leave with 0.
  bool (*needs_world)(const Config& config);
  // How many ranks to make in this process; nothing: one, or those that mpirun has started.
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
