// SPDX-License-Identifier: Apache-2.0
#include "base/outcome.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "base/unfinished_file.hpp"

namespace ringattn {

namespace {

constinit std::atomic<bool> launched = false;
constinit std::atomic<int> channel = -1;
static_assert(std::atomic<int>::is_always_lock_free);  // required by the signal handler
constinit Outcome identity{};                          // this process's, as it has begun

// Calls ::bind or ::connect for a new socket. The address goes through /proc, because a directory's path may be longer
// than a socket's address.
template <typename Call>
int open_socket(const char* folder, const Call& call) noexcept {
  const int directory = ::open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return -1;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  *fmt::format_to_n(address.sun_path, sizeof(address.sun_path) - 1, "/proc/self/fd/{}/{}", directory, kOutcomeSocket)
       .out = '\0';
  int file = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (file >= 0 && call(file, reinterpret_cast<const sockaddr*>(&address), socklen_t{sizeof(address)}) != 0) {
    ::close(file);
    file = -1;
  }
  ::close(directory);
  return file;
}

// Returns true if the launcher has the message. Async-signal-safe.
bool tell_launcher(Outcome::State state, int number) noexcept {
  const int file = channel;
  if (file < 0) return false;
  Outcome outcome = identity;
  outcome.state = state;
  outcome.number = number;
  ssize_t sent = 0;
  do {
    sent = ::send(file, &outcome, sizeof(outcome), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == ssize_t{sizeof(outcome)};
}

}  // namespace

int bind_outcome_socket(const char* folder) noexcept {
  return open_socket(folder, [](int file, const sockaddr* address, socklen_t size) {
    return ::bind(file, address, size) == 0 ? ::listen(file, SOMAXCONN) : -1;
  });
}

int connect_outcome_socket(const char* folder) noexcept {
  return open_socket(folder, [](int file, const sockaddr* address, socklen_t size) {
    int result = 0;
    do {
      result = ::connect(file, address, size);
    } while (result != 0 && errno == EINTR);
    return result;
  });
}

void begin_outcome(std::optional<int> rank, int ranks_on_host) noexcept {
  const char* const folder = std::getenv(kOutcomesVariable);
  if (folder == nullptr) return;
  launched = true;
  identity.rank = rank.value_or(-1);
  identity.ranks_on_host = ranks_on_host;
  channel = connect_outcome_socket(folder);
  tell_launcher(Outcome::State::kBegun, 0);
  ::unsetenv(kOutcomesVariable);
}

void start_outcome(bool done) noexcept { tell_launcher(done ? Outcome::State::kBegun : Outcome::State::kStarting, 0); }

void leave_outcome(double seconds) noexcept {
  constexpr double kMostSeconds = 1e9;
  tell_launcher(Outcome::State::kLeaving, static_cast<int>(std::ceil(std::fmin(seconds, kMostSeconds))));
}

int end_outcome(int code) noexcept {
  if (!launched || tell_launcher(Outcome::State::kCode, code)) return code;
  return code == 0 ? 0 : kElsewhere + code;
}

void end_outcome_by_signal(int signal) noexcept {
  const int error = errno;
  tell_launcher(Outcome::State::kSignal, signal);
  errno = error;
}

void end_process(int code) noexcept {
  remove_unfinished_files();
  std::_Exit(end_outcome(code));
}

MessageClaim::MessageClaim() {
  // Variables of PMIx, through which mpirun and srun start ranks.
  const char* const folder = std::getenv("PMIX_SERVER_TMPDIR");
  const char* const job = std::getenv("PMIX_NAMESPACE");
  if (folder != nullptr && job != nullptr) file_ = fmt::format("{}/ringattn-message.{}", folder, job);
}

bool MessageClaim::try_claim() const noexcept {
  if (file_.empty()) return true;
  const int file = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return errno != EEXIST;
  ::close(file);
  return true;
}

}  // namespace ringattn
