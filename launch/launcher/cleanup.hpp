// SPDX-License-Identifier: Apache-2.0
// Finds and removes what a job may leave behind: its processes, and the files of Open MPI, on this host and on others.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/launcher/command.hpp"

namespace ringattn::launcher {

// TMPDIR, or /tmp.
std::string temporary_folder();

// Starts a program in a process group of its own, with /dev/null as stdin. `output` becomes its stdout; −1: /dev/null
// becomes its stdout and stderr. `settings` ("NAME=VALUE") join the environment, without RINGATTN_PROGRAM. Returns −1,
// and sets errno, if that fails.
pid_t start_process(const Words& words, const Words& settings, int output);

// The processes of this host, and of this user, that were started with the setting "NAME=VALUE".
std::vector<pid_t> processes_with(const std::string& setting);

// Returns true if the process has a TCP connection.
bool has_connection(pid_t process);

// The files that mpirun, its daemons and its ranks leave when they are killed. Their names hold mpirun's process id,
// and a number of the job that one of the files tells.
class OpenMpiFiles {
 public:
  explicit OpenMpiFiles(pid_t mpirun) : mpirun_(mpirun) {}

  // Reads the number of the job, unless it is known.
  void note_job();
  // Removes the files on this host.
  void remove();
  // Begins to remove them on the hosts that the command names: the way mpirun gets there, all at once. A host that
  // can't be reached keeps them, and so does one on which a daemon of this job still runs, which removes them itself.
  // Returns the processes that do so.
  std::vector<pid_t> begin_remote_removal(const LaunchCommand& command) const;

 private:
  const pid_t mpirun_;
  std::optional<int> job_;
};

}  // namespace ringattn::launcher
