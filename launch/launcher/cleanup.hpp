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

// Starts a program in a process group of its own, with /dev/null as stdin. `output` becomes its stdout; −1: its stdout
// and stderr are /dev/null. `settings` ("NAME=VALUE") are added to the environment, and RINGATTN_PROGRAM is removed.
// Returns −1, and sets errno, if that fails.
pid_t start_process(const Words& words, const Words& settings, int output);

// The processes of this host, and of this user, that were started with the setting "NAME=VALUE".
std::vector<pid_t> processes_with(const std::string& setting);

// Returns true if the process has a TCP connection.
bool has_connection(pid_t process);

// The files that mpirun, its daemons and its ranks leave behind when they are killed. The file names contain mpirun's
// process id and a job number, which one of the files contains.
class OpenMpiFiles {
 public:
  explicit OpenMpiFiles(pid_t mpirun) : mpirun_(mpirun) {}

  // Reads the number of the job, unless it is known.
  void note_job();
  // Removes the files on this host.
  void remove();
  // Starts to remove the files on the hosts that the command names, on all hosts at once, through the remote shell that
  // mpirun uses. Files remain on a host that can't be reached, and on one where a daemon of this job still runs,
  // because it removes them itself. Returns the processes that remove the files.
  std::vector<pid_t> begin_remote_removal(const LaunchCommand& command) const;

 private:
  const pid_t mpirun_;
  std::optional<int> job_;
};

}  // namespace ringattn::launcher
