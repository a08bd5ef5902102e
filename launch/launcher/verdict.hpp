// SPDX-License-Identifier: Apache-2.0
// The job's exit code, from what its ranks said, how mpirun or srun ended, and what the supervisor did. Nothing is read
// out of what the job prints.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/outcome.hpp"

namespace ringattn::launcher {

inline constexpr int kLostDaemon = 205;  // mpirun's exit code if a daemon on another host is gone

// What one rank has said. A rank that has begun and said no more is silent.
struct RankOutcome {
  int rank = -1;          // -1: not known
  int ranks_on_host = 0;  // 0: not known
  bool alive = true;      // its process is there
  bool starts_mpi = false;
  std::optional<int> leaving_seconds;
  std::optional<int> code;
  bool signaled = false;
  bool stopped = false;  // mpirun has ended it, as the supervisor sees

  void hear(const Outcome& outcome);
};

struct RankCounts {
  int started = 0;
  int expected = 0;  // how many ranks of this host there should be; 0: not known
  int alive = 0;
  int left = 0;  // with code 0
  int told = 0;  // ended by a signal that they could still speak of
  int silent = 0;
  int stopped = 0;          // of those that said no code: ended by a signal, as they said or the supervisor sees
  int stopped_unbegun = 0;  // processes that mpirun ended before they began
  bool starts_mpi = false;  // a silent one does, and mpirun has not ended it
  int mute_rank = -1;       // one of the silent ones, if it is known
  // The code of those that failed, or 0. All leave with one code. If a failure kept them from agreeing, 6 may be what
  // the others made of it, so any other code counts before 6.
  int worst = 0;
};

RankCounts count_ranks(const std::vector<RankOutcome>& ranks);

// Why the supervisor ended mpirun.
enum class Overdue { kNo, kUnstarted, kLate, kUnended };

struct JobEnd {
  std::string launcher = "mpirun";  // or srun
  int code = 0;                     // its exit code, or 128 + the signal that ended it
  bool killed = false;              // a signal ended it, and not the supervisor's
  bool local = true;                // all ranks are on this host
  int start_limit = 0;              // seconds
  int signal = 0;                   // that the supervisor got, and passed on
  Overdue overdue = Overdue::kNo;
  int unended_rank = -1;  // that the supervisor had to end; -1: not known
  RankCounts ranks;
  std::string untaken;  // why stdout didn't take what the job printed; empty: it did
};

// What to print, and the exit code.
struct Verdict {
  int code = 0;
  std::string message;  // an error; empty: none
  std::string note;     // printed without being an error
};
Verdict judge(const JobEnd& end);

}  // namespace ringattn::launcher
