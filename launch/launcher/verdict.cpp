// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

namespace ringattn::launcher {

namespace {

constexpr int kSignalBase = 128;
constexpr int kMostSignal = 64;
constexpr int kMostCode = 7;

Verdict error(int code, const std::string& problem, const std::string& why, const std::string& suggestion) {
  return {code, fmt::format("{} ({}). {}", problem, why, suggestion), {}};
}

std::string name_of(int rank) { return rank >= 0 ? fmt::format("rank {}", rank) : "a rank"; }

bool stops(int signal) { return signal == SIGINT || signal == SIGTERM || signal == SIGHUP; }

}  // namespace

void RankOutcome::hear(const Outcome& outcome) {
  rank = outcome.rank;
  ranks_on_host = outcome.ranks_on_host;
  starts_mpi = outcome.state == Outcome::State::kStarting;
  switch (outcome.state) {
    case Outcome::State::kBegun:
    case Outcome::State::kStarting:
      break;
    case Outcome::State::kLeaving:
      leaving_seconds = outcome.number;
      break;
    case Outcome::State::kCode:
      code = outcome.number;
      break;
    case Outcome::State::kSignal:
      signaled = true;
      break;
  }
}

RankCounts count_ranks(const std::vector<RankOutcome>& ranks) {
  RankCounts counts;
  for (const RankOutcome& rank : ranks) {
    ++counts.started;
    counts.expected = std::max(counts.expected, rank.ranks_on_host);
    if (rank.alive) ++counts.alive;
    if (rank.code.value_or(0) != 0) {
      const int code = *rank.code;
      if (counts.worst == 0 || counts.worst == 6 || (code != 6 && code > counts.worst)) counts.worst = code;
    } else if (rank.signaled) {
      ++counts.told;
      ++counts.stopped;
    } else if (rank.code) {
      ++counts.left;
    } else {
      ++counts.silent;
      if (rank.stopped) ++counts.stopped;
      counts.starts_mpi = counts.starts_mpi || (rank.starts_mpi && !rank.stopped);
      counts.mute_rank = rank.rank;
    }
  }
  return counts;
}

Verdict judge(const JobEnd& end) {
  const RankCounts& ranks = end.ranks;
  const std::string& launcher = end.launcher;
  const int signal = end.code > kSignalBase && end.code <= kSignalBase + kMostSignal ? end.code - kSignalBase : 0;
  const bool all_begun = ranks.started >= ranks.expected;
  const Verdict well = end.untaken.empty() ? Verdict()
                                           : error(3, "the output can't be written to stdout", end.untaken,
                                                   "Redirect stdout to a file that can be written.");
  std::string late = "it went on after the ranks of this host had left";
  if (end.overdue == Overdue::kUnstarted) {
    late = end.local ? fmt::format("no rank had begun within {} s", end.start_limit)
                     : fmt::format("no rank on this host had begun within {} s, and no other host had answered",
                                   end.start_limit);
  }

  if (end.signal != 0) return {kSignalBase + end.signal, {}, {}};
  if (end.overdue == Overdue::kUnstarted) {
    return error(6, launcher + " was ended", late, "See whether the hosts answer; --start-limit gives them longer.");
  }
  // The code that the ranks reported counts, even if mpirun had to be ended. If something else killed mpirun, ranks
  // that were starting or connecting and went down with it blame MPI or a peer (4, 6).
  const bool blames_others = end.killed && (ranks.worst == 4 || ranks.worst == 6);
  if (ranks.worst > 0 && !blames_others) {
    const bool ended = end.overdue == Overdue::kLate;
    return {ranks.worst, {}, ended ? fmt::format("{} was ended ({}).", launcher, late) : ""};
  }
  if (end.overdue == Overdue::kUnended) {
    return error(6, name_of(end.unended_rank) + " did not end",
                 "the job was done on all ranks, and its files were complete",
                 "See whether something has stopped the process or holds it in a driver.");
  }
  if (end.overdue == Overdue::kLate) {
    if (ranks.left == ranks.started && all_begun) {
      return {well.code, well.message, fmt::format("{} was ended ({}).", launcher, late)};
    }
    return error(6, launcher + " was ended", late, "See the messages above, and the logs of the hosts.");
  }
  if (end.code > kElsewhere && end.code <= kElsewhere + kMostCode) return {end.code - kElsewhere, {}, {}};
  if (end.code == 0 && ranks.silent + ranks.told == 0) return well;
  // mpirun answers SIGINT, SIGTERM and SIGHUP alike: it ends its ranks by SIGTERM and SIGKILL, and leaves with 1.
  const int stopped = ranks.stopped + ranks.stopped_unbegun;
  const bool all_stopped = ranks.stopped == ranks.started && stopped > 0 && stopped >= ranks.expected;
  if ((end.killed && stops(signal)) || (end.code == 1 && all_stopped)) {
    return error(kSignalBase + SIGTERM, launcher + " was told to stop", "its ranks were ended by signal 15",
                 "Start again.");
  }
  // A rank that mpirun ends because of a silent rank can still report that.
  const std::string victim = end.killed ? launcher : ranks.silent == 1 ? name_of(ranks.mute_rank) : name_of(-1);
  constexpr int kFirstOfJob = 5;  // a program that can't be started also ends by a signal up to SIGTRAP
  if (signal > kFirstOfJob || (signal > 0 && ranks.started > 0)) {
    return error(6, victim + " was killed", fmt::format("by signal {}; {}'s own message is above", signal, launcher),
                 "Memory and the host's log are the first places to look.");
  }
  if (ranks.starts_mpi && signal == 0 && end.code != kLostDaemon) {
    return error(4, victim + " could not start MPI", "Open MPI's own message is above",
                 "Check its settings (OMPI_MCA_...), and the limits on files and processes (ulimit -a).");
  }
  if (launcher == "mpirun" && end.code == kLostDaemon) {
    return error(6, "a host was lost", "mpirun's own message is above", "Check the host, and start again.");
  }
  if (end.code >= 2 && end.code <= kMostCode) return {end.code, {}, {}};
  if (ranks.started > 0 && (end.code <= 1 || end.code > kSignalBase + kMostSignal)) {
    return error(6, victim + " left early or was killed",
                 fmt::format("{} exited with code {}, and no rank reported a failure", launcher, end.code),
                 "See the messages above, memory, and the host's log.");
  }
  if (end.code > kMostCode && end.code <= kSignalBase) {
    return error(7, fmt::format("a rank exited with code {}", end.code), "ringattn has no such code",
                 "Please report it with the output of ringattn info.");
  }
  return error(4, launcher + " could not start the ranks",
               fmt::format("it exited with code {}; its own message is above", end.code),
               "--dry-run prints the command.");
}

}  // namespace ringattn::launcher
