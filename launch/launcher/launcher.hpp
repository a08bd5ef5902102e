// SPDX-License-Identifier: Apache-2.0
// `ringattn launch`: starts ranks through mpirun or srun, ends the job even if they hang or crash, and exits with the
// job's exit code. options.hpp reads the command line, machine.hpp and command.hpp choose the command, supervisor.hpp
// runs it, and verdict.hpp finds the code.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ringattn::launcher {

// The subcommand. Uses no MPI. `arguments` are those after the subcommand's name. Returns the exit code.
int launch_main(const std::vector<std::string>& arguments);

std::string launch_help();

}  // namespace ringattn::launcher

namespace ringattn {

inline constexpr std::string_view kLaunchCommand = "launch";
inline constexpr std::string_view kLaunchSummary = "start a job's ranks on this host or several, by mpirun or srun";

}  // namespace ringattn
