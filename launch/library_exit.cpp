// SPDX-License-Identifier: Apache-2.0
#include "launch/library_exit.hpp"

#include <atomic>
#include <cstdlib>
#include <utility>

#include "base/end_process.hpp"

namespace ringattn {

namespace {

std::atomic<bool> watching{false};

std::function<void(const Error&)>& listener() {
  static auto* const function = new std::function<void(const Error&)>;  // never destroyed: exit() destroys statics
  return *function;
}

void at_exit() {
  if (!watching.exchange(false)) return;
  const Error error(ErrorCode::kUnsupported, "a library ended the program",
                    "Open MPI or OpenMP, whose own message stands above",
                    "Check that TMPDIR names a folder that can be written to, and the limits on processes and memory "
                    "(ulimit -a).");
  listener()(error);
  end_process(static_cast<int>(error.code()));
}

}  // namespace

LibraryExitWatch::LibraryExitWatch(std::function<void(const Error&)> tell) {
  listener() = std::move(tell);
  static const int registered = std::atexit(at_exit);
  watching = registered == 0;
}

void LibraryExitWatch::stop() noexcept { watching = false; }

}  // namespace ringattn
