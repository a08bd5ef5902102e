// SPDX-License-Identifier: Apache-2.0
// Libraries that end the process by themselves: Open MPI does where it can't start (no folder for its session, say),
// and OpenMP where it gets no threads. They leave with code 1, which means a wrong result here. OpenMP calls exit(),
// and Open MPI _exit(), which the program therefore defines.
#pragma once

#include <functional>

#include "base/error.hpp"

namespace ringattn {

// While it lives, an exit() or _exit() that a library calls becomes exit code 4, and `tell` is called with the error.
// One at a time.
class LibraryExitGuard {
 public:
  explicit LibraryExitGuard(std::function<void(const Error&)> tell);
  ~LibraryExitGuard() { stop(); }
  LibraryExitGuard(const LibraryExitGuard&) = delete;
  LibraryExitGuard& operator=(const LibraryExitGuard&) = delete;

  // The program ends by itself from here on, with its own code.
  static void stop() noexcept;
};

}  // namespace ringattn
