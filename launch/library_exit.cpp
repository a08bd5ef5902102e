// SPDX-License-Identifier: Apache-2.0
#include "launch/library_exit.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "base/end_process.hpp"

namespace ringattn {

namespace {

std::atomic<bool> watching{false};
std::atomic<pid_t> watched{0};  // the process: one that a library has forked ends as it likes

std::function<void(const Error&)>& listener() {
  static auto* const function = new std::function<void(const Error&)>;  // never destroyed: exit() destroys statics
  return *function;
}

void at_exit() {
  if (::getpid() != watched || !watching.exchange(false)) return;
  const Error error(ErrorCode::kUnsupported, "a library ended the program",
                    "Open MPI or OpenMP, whose own message stands above",
                    "Check that TMPDIR names a folder that can be written to, and the limits on processes and memory "
                    "(ulimit -a).");
  listener()(error);
  end_process(static_cast<int>(error.code()));
}

}  // namespace

LibraryExitGuard::LibraryExitGuard(std::function<void(const Error&)> tell) {
  listener() = std::move(tell);
  static const int registered = std::atexit(at_exit);
  watched = ::getpid();
  watching = registered == 0;
}

void LibraryExitGuard::stop() noexcept { watching = false; }

}  // namespace ringattn

// Libraries call this definition in the program in place of libc's.
extern "C" void _exit(int status) {
  ringattn::at_exit();
  for (;;) ::syscall(SYS_exit_group, status);
}
