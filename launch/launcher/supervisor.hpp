// SPDX-License-Identifier: Apache-2.0
// Runs one job: starts mpirun or srun, sees to it that it ends, and removes what it leaves on this host.
//
// Two processes do so. The front process is the one that the user started: it forks the supervisor, passes signals on
// to it and leaves with its exit code. The supervisor is the parent of mpirun. When the front process is killed, a pipe
// between them tells the supervisor, which then ends the job.
#pragma once

#include <string>

#include "launch/launcher/command.hpp"

namespace ringattn::launcher {

// Returns the job's exit code, after printing what there is to say. Throws Error.
int supervise(const LaunchCommand& command);

// Prints "ringattn-mpirun: error: message" on stderr.
void print_launch_error(const std::string& message);

}  // namespace ringattn::launcher
