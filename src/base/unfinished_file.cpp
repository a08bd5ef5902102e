// SPDX-License-Identifier: Apache-2.0
#include "base/unfinished_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/outcome.hpp"
#include "base/unfinished_folder.hpp"

namespace ringattn {

namespace {

enum State : int { kFree, kCreating, kNamed };

struct Slot {
  std::atomic<int> state = kFree;
  std::atomic<bool> is_folder = false;  // set while kCreating
  char path[PATH_MAX] = {};
};
static_assert(std::atomic<int>::is_always_lock_free);  // required by the signal handler

// First the files that this process creates, then files of other processes.
constinit std::array<Slot, kMaxUnfinishedFiles + kMaxSharedFiles> slots;
constinit std::atomic<bool> ending = false;

constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Blocks these signals in this thread while the object lives, so that a handler can run only in another thread, which
// may wait for this one.
class ScopedSignalBlock {
 public:
  ScopedSignalBlock() noexcept {
    sigset_t blocked;
    ::sigemptyset(&blocked);
    for (const int signal : kEndingSignals) ::sigaddset(&blocked, signal);
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~ScopedSignalBlock() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  ScopedSignalBlock(const ScopedSignalBlock&) = delete;
  ScopedSignalBlock& operator=(const ScopedSignalBlock&) = delete;

 private:
  sigset_t before_;
};

int create(const char* path) noexcept {
  return uninterrupted([&] { return ::open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
}

// Creating a file takes microseconds. A file system that hangs is not waited for.
void wait_while_creating(const Slot& slot) noexcept {
  constexpr timespec kPause{0, 1'000'000};
  for (int pauses = 0; slot.state == kCreating && pauses < 500; ++pauses) ::nanosleep(&kPause, nullptr);
}

void end_by_signal(int signal) {
  remove_unfinished_files();
  end_outcome_by_signal(signal);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered when the handler returns
}

}  // namespace

void remove_folder_of_files(const char* path) noexcept {
  const int folder = uninterrupted([&] { return ::open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
  if (folder < 0) return;
  alignas(dirent64) char entries[4096];
  for (long bytes = 0; (bytes = ::syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0;) {
    for (long at = 0; at < bytes;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(entries + at);
      ::unlinkat(folder, entry->d_name, 0);  // "." and ".." are refused
      at += entry->d_reclen;
    }
  }
  ::close(folder);
  ::rmdir(path);
}

UnfinishedFolder::UnfinishedFolder(const std::string& path) noexcept : slot_(slots.size()) {
  const ScopedSignalBlock signals;
  for (std::size_t i = 0; i < kMaxUnfinishedFiles && path.size() < sizeof(Slot::path); ++i) {
    int free = kFree;
    if (!slots[i].state.compare_exchange_strong(free, kCreating)) continue;
    if (ending) {
      slots[i].state = kFree;
      while (true) ::pause();
    }
    std::memcpy(slots[i].path, path.c_str(), path.size() + 1);
    slots[i].is_folder = true;
    created_ = ::mkdir(slots[i].path, 0777) == 0;
    if (!created_) slots[i].is_folder = false;
    slots[i].state = created_ ? kNamed : kFree;
    if (created_) slot_ = i;
    return;
  }
  created_ = ::mkdir(path.c_str(), 0777) == 0;
}

UnfinishedFolder::~UnfinishedFolder() {
  if (slot_ >= slots.size()) return;
  slots[slot_].state = kCreating;  // nobody else takes it
  slots[slot_].is_folder = false;
  slots[slot_].state = kFree;
}

UnfinishedFile::UnfinishedFile(const std::string& path, FileDescriptor& file) noexcept : slot_(slots.size()) {
  const ScopedSignalBlock signals;
  for (std::size_t i = 0; i < kMaxUnfinishedFiles && path.size() < sizeof(Slot::path); ++i) {
    int free = kFree;
    if (!slots[i].state.compare_exchange_strong(free, kCreating)) continue;
    if (ending) {
      slots[i].state = kFree;
      while (true) ::pause();
    }
    std::memcpy(slots[i].path, path.c_str(), path.size() + 1);
    file = FileDescriptor(create(slots[i].path));
    slots[i].state = file.valid() ? kNamed : kFree;
    if (file.valid()) slot_ = i;
    return;
  }
  file = FileDescriptor(create(path.c_str()));
}

UnfinishedFile::UnfinishedFile(const std::string& path) noexcept : slot_(slots.size()) {
  const ScopedSignalBlock signals;
  for (std::size_t i = kMaxUnfinishedFiles; i < slots.size() && path.size() < sizeof(Slot::path); ++i) {
    int free = kFree;
    if (!slots[i].state.compare_exchange_strong(free, kCreating)) continue;
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
  ending = true;
  for (const Slot& slot : slots) {
    wait_while_creating(slot);
    if (slot.state == kNamed && !slot.is_folder) ::unlink(slot.path);
  }
  for (const Slot& slot : slots) {
    if (slot.state == kNamed && slot.is_folder) remove_folder_of_files(slot.path);
  }
  errno = error;
}

void remove_unfinished_files_on_signals() noexcept {
  for (const int signal : kEndingSignals) {
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
