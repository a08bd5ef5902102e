// SPDX-License-Identifier: Apache-2.0
// Runs one job: starts mpirun or srun, makes sure that it ends, and removes what it leaves on this host.
//
// There are two processes. The front process is the one that the user started: it forks the supervisor, passes signals
// on to it and exits with its exit code. The supervisor is the parent of mpirun. If the front process is killed, the
// supervisor notices it by a pipe between them, and ends the job.
#pragma once

#include <string>

#include "launch/launcher/command.hpp"

namespace ringattn::launcher {

// Prints the job's messages, and returns its exit code. Throws Error.
int supervise(const LaunchCommand& command);

// Prints "ringattn-mpirun: error: message" on stderr.
void print_launch_error(const std::string& message);

}  // namespace ringattn::launcher
