// SPDX-License-Identifier: Apache-2.0
#include "base/unfinished_file.hpp"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/outcome.hpp"

namespace ringattn {

namespace {

enum State : int { kFree, kChanging, kNamed };

struct Slot {
  std::atomic<int> state = kFree;
  char path[PATH_MAX] = {};
};
static_assert(std::atomic<int>::is_always_lock_free);  // what a signal handler may touch

constinit std::array<Slot, kMostUnfinishedFiles> slots;

void end_by_signal(int signal) {
  remove_unfinished_files();
  end_outcome_by_signal(signal);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered when the handler returns
}

}  // namespace

UnfinishedFile::UnfinishedFile(const std::string& path) noexcept : slot_(kMostUnfinishedFiles) {
  if (path.size() >= sizeof(Slot::path)) return;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    int free = kFree;
    if (!slots[i].state.compare_exchange_strong(free, kChanging)) continue;
    std::memcpy(slots[i].path, path.c_str(), path.size() + 1);
    slots[i].state = kNamed;
    slot_ = i;
    return;
  }
}

UnfinishedFile::~UnfinishedFile() {
  if (slot_ < slots.size()) slots[slot_].state = kFree;
}

void remove_unfinished_files() noexcept {
  const int error = errno;
  for (const Slot& slot : slots) {
    if (slot.state == kNamed) ::unlink(slot.path);
  }
  errno = error;
}

void remove_unfinished_files_on_signals() noexcept {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction action = {};
    action.sa_handler = end_by_signal;
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace ringattn
