// SPDX-License-Identifier: Apache-2.0
// What a process tells the launcher that started it: that it has begun, and how it ended. A launcher that runs jobs
// through mpirun or srun (launch/ringattn-mpirun) can't know either from their exit codes alone, which are their own as
// well, and they may crash or hang after the ranks have ended.
//
// The launcher names a folder of its host in RINGATTN_OUTCOMES. A process that finds the folder appends lines to its
// file HOST.NAMESPACE.PID there (NAMESPACE: the inode of /proc/self/ns/pid, which says where PID means something), one
// write each:
//
//   rank R      its rank, where its starter says it
//   started N   it has begun; N is the number of ranks on its host, 0 if its starter doesn't say
//   code C      it leaves with code C; the last such line counts
//   signal S    signal S ends it
//
// A process that doesn't find the folder, because it runs on another host, puts its code into its exit status:
// kElsewhere + C where C isn't 0, a range that neither mpirun's nor srun's own codes nor signals (128 + S) share.
#pragma once

#include <optional>

namespace ringattn {

inline constexpr int kElsewhere = 64;

// Opens the file and says that the process has begun. Called once, before anything reads the environment: it takes
// RINGATTN_OUTCOMES out of it. Without that variable this and the functions below do nothing.
void begin_outcome(std::optional<int> rank, int ranks_on_host) noexcept;

// Says that the process leaves with `code`, and returns the exit status to leave with.
[[nodiscard]] int end_outcome(int code) noexcept;

// Says that `signal` ends the process. Async-signal-safe.
void end_outcome_by_signal(int signal) noexcept;

}  // namespace ringattn
