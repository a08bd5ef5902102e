// SPDX-License-Identifier: Apache-2.0
#include "base/outcome.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace ringattn {

namespace {

constexpr const char* kVariable = "RINGATTN_OUTCOMES";

constinit std::atomic<bool> launched = false;
constinit std::atomic<int> file = -1;
static_assert(std::atomic<int>::is_always_lock_free);  // required by the signal handler

// Returns true if the whole line was written. Async-signal-safe.
bool append(const char* word, int number) noexcept {
  const int fd = file;
  if (fd < 0) return false;
  char line[32];
  const std::size_t length = std::strlen(word);
  std::memcpy(line, word, length);
  line[length] = ' ';
  char* const end = std::to_chars(line + length + 1, line + sizeof(line) - 1, number).ptr;
  *end = '\n';
  const ssize_t bytes = end + 1 - line;
  ssize_t written = 0;
  do {
    written = ::write(fd, line, static_cast<std::size_t>(bytes));
  } while (written < 0 && errno == EINTR);
  return written == bytes;
}

}  // namespace

void begin_outcome(std::optional<int> rank, int ranks_on_host) noexcept {
  const char* folder = std::getenv(kVariable);
  if (folder == nullptr) return;
  launched = true;
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, HOST_NAME_MAX);
  struct stat space = {};
  static_cast<void>(::stat("/proc/self/ns/pid", &space));
  char path[PATH_MAX];
  const auto text = fmt::format_to_n(path, sizeof(path) - 1, "{}/{}.{}.{}", folder, host, space.st_ino, ::getpid());
  *text.out = '\0';
  // O_EXCL: a file that exists already is not this process's.
  if (text.size < sizeof(path)) file = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (rank) append("rank", *rank);
  append("started", ranks_on_host);
  ::unsetenv(kVariable);
}

int end_outcome(int code) noexcept {
  if (!launched || append("code", code)) return code;
  return code == 0 ? 0 : kElsewhere + code;
}

void end_outcome_by_signal(int signal) noexcept {
  const int error = errno;
  append("signal", signal);
  errno = error;
}

}  // namespace ringattn
