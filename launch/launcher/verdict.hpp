// SPDX-License-Identifier: Apache-2.0
// The job's exit code, from the reports of its ranks, how mpirun or srun ended, and what the supervisor did. The job's
// output is not read for it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/outcome.hpp"

namespace ringattn::launcher {

inline constexpr int kLostDaemon = 205;  // mpirun's exit code if a daemon on another host is gone

// The reports of one rank. A rank that has begun and reported nothing else is silent.
struct RankOutcome {
  int rank = -1;          // -1: not known
  int ranks_on_host = 0;  // 0: not known
  bool alive = true;      // its process exists
  bool starts_mpi = false;
  std::optional<int> leaving_seconds;
  std::optional<int> code;
  bool signaled = false;
  bool stopped = false;  // mpirun has ended it, as the supervisor has observed

  void hear(const Outcome& outcome);
};

struct RankCounts {
  int started = 0;
  int expected = 0;  // number of ranks of this host; 0: not known
  int alive = 0;
  int left = 0;  // exited with code 0
  int told = 0;  // ended by a signal that they could still report
  int silent = 0;
  int stopped = 0;          // ranks without a code that a signal ended, as they reported or the supervisor has observed
  int stopped_unbegun = 0;  // processes that mpirun ended before they began
  bool starts_mpi = false;  // a silent rank is starting MPI, and mpirun has not ended it
  int mute_rank = -1;       // a silent rank, if its number is known
  // The exit code of the failed ranks, or 0. Usually all have the same code. If a failure kept them from agreeing, 6
  // may only be a consequence on the other ranks, so any other code takes precedence over 6.
  int worst = 0;
};

RankCounts count_ranks(const std::vector<RankOutcome>& ranks);

// Why the supervisor ended mpirun.
enum class Overdue { kNo, kUnstarted, kLate, kUnended };

struct JobEnd {
  std::string launcher = "mpirun";  // or srun
  int code = 0;                     // its exit code, or 128 + the signal that ended it
  bool killed = false;              // ended by a signal that was not the supervisor's
  bool local = true;                // all ranks are on this host
  int start_limit = 0;              // seconds
  int signal = 0;                   // received by the supervisor and forwarded
  Overdue overdue = Overdue::kNo;
  int unended_rank = -1;  // the rank that the supervisor had to end; -1: not known
  RankCounts ranks;
  std::string untaken;  // why stdout did not accept the job's output; empty: it did
};

// What to print, and the exit code.
struct Verdict {
  int code = 0;
  std::string message;  // an error; empty: none
  std::string note;     // printed without being an error
};
Verdict judge(const JobEnd& end);

}  // namespace ringattn::launcher
