// SPDX-License-Identifier: Apache-2.0
// How a process of a job ends: its launcher learns how, and one process of a host prints the failure.
//
// A launcher that runs jobs through mpirun or srun (launch/launcher) can't tell from their exit codes how the ranks
// ended: both use the same codes for errors of their own, and may crash or hang after the ranks have ended. It names a
// directory on its host in RINGATTN_OUTCOMES, with a socket (kOutcomeSocket, SOCK_SEQPACKET). A process that can
// connect to it sends an Outcome whenever its state changes; the connection ends with the process.
//
// A process that can't connect, because it runs on another host, reports its code in its exit status instead:
// kElsewhere + C if C isn't 0. Neither mpirun's and srun's own codes nor signals (128 + S) use that range.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringattn {

inline constexpr int kElsewhere = 64;
inline constexpr const char* kOutcomesVariable = "RINGATTN_OUTCOMES";
inline constexpr const char* kOutcomeSocket = "ranks";

// One message on the socket.
struct Outcome {
  enum class State : std::int32_t {
    kBegun,     // the process has begun, or gone on
    kStarting,  // it starts MPI, which may end it with a code of its own
    kLeaving,   // the job is done on all ranks, and the process has `number` seconds to end
    kCode,      // it exits with code `number`; the last one counts
    kSignal,    // signal `number` ends it
  };
  static constexpr std::uint32_t kFormat = 0x52410001;

  std::uint32_t format = kFormat;
  std::int32_t rank = -1;          // -1: its launcher doesn't say which
  std::int32_t ranks_on_host = 0;  // 0: its launcher doesn't say
  State state = State::kBegun;
  std::int32_t number = 0;
};

// A socket that is bound to the directory's address, or connected to it; -1: that failed.
int bind_outcome_socket(const char* folder) noexcept;
int connect_outcome_socket(const char* folder) noexcept;

// Connects and says that the process has begun. Must be called once, before anything else reads the environment,
// because it unsets RINGATTN_OUTCOMES. Without that variable this and the functions below tell nobody.
void begin_outcome(std::optional<int> rank, int ranks_on_host) noexcept;

// Says that the process starts MPI, or has started it.
void start_outcome(bool done) noexcept;

// Says that the job is done on all ranks, so that the process should have ended in `seconds`.
void leave_outcome(double seconds) noexcept;

// Says that the process exits with `code`, and returns the exit status to exit with.
[[nodiscard]] int end_outcome(int code) noexcept;

// Says that `signal` ends the process. Async-signal-safe.
void end_outcome_by_signal(int signal) noexcept;

// Ends a process that can't unwind its stack any more, because a peer or a driver may hang in a destructor: exits with
// `code` at once. Nothing is unwound and no buffer is flushed. Unfinished files of this process are removed
// (base/unfinished_file.hpp), and its launcher is told.
[[noreturn]] void end_process(int code) noexcept;

// Decides which of a host's ranks prints a failure when they can't communicate.
class MessageClaim {
 public:
  // Reads the environment. Construct it before MPI starts, because MPI changes the environment.
  MessageClaim();

  // Returns true for the first process of the job on this host that calls it. The first caller creates a file in the
  // directory that mpirun made for the job and removes after it. Without such a directory every caller is the first.
  bool try_claim() const noexcept;

 private:
  std::string file_;  // empty: there is no such directory
};

}  // namespace ringattn
