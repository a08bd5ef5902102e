// SPDX-License-Identifier: Apache-2.0
// The command line of `ringattn launch`: options of its own, then the command line of the ranks.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn::launcher {

using Words = std::vector<std::string>;

struct LaunchOptions {
  std::optional<int> ranks;
  std::string hostfile;
  std::string hosts;  // "node1:8,node2:8"
  std::string launcher = "mpirun";
  std::optional<int> start_limit;  // seconds; 0: none
  std::string bind_to;
  std::string map_by;
  bool oversubscribe = false;
  bool dry_run = false;
  bool help = false;
  Words passed_on;                 // -x, --mca and others, as mpirun takes them
  std::set<std::string> exported;  // names given with -x
  Words rank_arguments;            // "run --synthetic 7"
};

// Throws Error.
LaunchOptions read_launch_options(const Words& arguments);

// The lines of --help that describe the options.
std::string launch_options_help();

// A number of at most six digits without leading zeros, or nothing.
std::optional<int> whole_number(std::string_view text);
// Returns true for a host name that no remote shell mistakes for an option.
bool is_host_name(std::string_view text);
// The names of a list of hosts: NAME for "NAME:8". Also reads texts with one host per line.
Words host_names(const std::string& list);

}  // namespace ringattn::launcher
