// SPDX-License-Identifier: Apache-2.0
// Records for the launcher that a process has begun, and how it ended. A launcher that runs jobs through mpirun or srun
// (launch/ringattn-mpirun) can't tell that from their exit codes. mpirun and srun use the same codes for errors of
// their own, and they may crash or hang after the ranks have ended.
//
// The launcher names a directory on its host in RINGATTN_OUTCOMES. A process that finds the directory creates its file
// HOST.NAMESPACE.PID there (NAMESPACE: the inode of /proc/self/ns/pid, in which PID is valid) and appends lines, each
// with a single write:
//
//   rank R      its rank, if its launcher says which
//   started N   it has begun; N is the number of ranks on its host, 0 if its launcher doesn't say
//   code C      it exits with code C; the last such line counts
//   signal S    signal S ends it
//
// A process that doesn't find the directory, because it runs on another host, reports its code in its exit status
// instead: kElsewhere + C if C isn't 0. Neither mpirun's and srun's own codes nor signals (128 + S) use that range.
#pragma once

#include <optional>

namespace ringattn {

inline constexpr int kElsewhere = 64;

// Creates the file and records that the process has begun. Must be called once, before anything else reads the
// environment, because it unsets RINGATTN_OUTCOMES. Without that variable this and the functions below do nothing.
void begin_outcome(std::optional<int> rank, int ranks_on_host) noexcept;

// Records that the process exits with `code`, and returns the exit status to exit with.
[[nodiscard]] int end_outcome(int code) noexcept;

// Records that `signal` ends the process. Async-signal-safe.
void end_outcome_by_signal(int signal) noexcept;

}  // namespace ringattn
