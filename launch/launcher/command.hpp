// SPDX-License-Identifier: Apache-2.0
// The command that starts the ranks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "launch/launcher/options.hpp"

namespace ringattn::launcher {

struct LaunchCommand {
  Words words;  // mpirun or srun with its options, then the program with its own
  std::vector<std::pair<std::string, std::string>> settings;  // variables that the environment doesn't have
  std::size_t program = 0;                                    // index of the program in `words`
  int ranks = 0;                                              // 0: mpirun counts them
  bool slurm = false;                                         // srun, not mpirun
  bool local = true;                                          // all ranks are on this host
  Words hosts;                                                // hosts on which ranks start, if they are named
  int start_limit = 0;                                        // seconds until the first rank has begun; 0: any number
  std::string summary;                                        // "8 ranks (one for each GPU), 8 GPUs on this host"

  // The command in shell syntax.
  std::string text() const;
};

// Reads the environment, and adds a secret to it if the ranks need one. Throws Error.
LaunchCommand make_launch_command(const LaunchOptions& options);

}  // namespace ringattn::launcher
