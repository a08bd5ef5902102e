// SPDX-License-Identifier: Apache-2.0
// A library to preload into a program under test, whose system calls then fail or take their time as FAULT_… variables
// say: what slow disks, signals and limits do.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

// The variable's value, a whole number; −1 where it isn't set.
int setting_of(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? -1 : std::atoi(text);
}

template <typename Function>
Function* original(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

// Whether the next call of the function that `calls` counts is broken off: each is, as often as FAULT_EINTR says.
bool interrupted(std::atomic<int>& calls) {
  if (calls++ >= setting_of("FAULT_EINTR")) return false;
  errno = EINTR;
  return true;
}

// Takes as many seconds as the variable says.
void dawdle(const char* name) {
  if (setting_of(name) > 0) ::sleep(static_cast<unsigned>(setting_of(name)));
}

// Memory that processes share is no file of the program's: LLVM's OpenMP runtime makes some, and doesn't repeat calls.
bool in_shared_memory(int fd) {
  char link[32], path[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(link, path, sizeof path);
  return length > 0 && std::string_view(path, static_cast<std::size_t>(length)).starts_with("/dev/shm/");
}

}  // namespace

extern "C" {

// FAULT_FSYNC_SECONDS: how long the process's first one takes. FAULT_FSYNC_EIO: all fail.
int fsync(int fd) {
  static std::atomic<int> calls{0};
  static std::atomic<int> slow{0};
  if (interrupted(calls)) return -1;
  if (slow++ == 0) dawdle("FAULT_FSYNC_SECONDS");
  if (setting_of("FAULT_FSYNC_EIO") > 0) {
    errno = EIO;
    return -1;
  }
  return original(fsync, "fsync")(fd);
}

// FAULT_PREAD_SECONDS: how long each one takes of more bytes than samples and headers of files have.
ssize_t pread(int fd, void* target, std::size_t bytes, off_t offset) {
  constexpr std::size_t kSmall = 4096;
  if (bytes > kSmall) dawdle("FAULT_PREAD_SECONDS");
  return original(pread, "pread")(fd, target, bytes, offset);
}

// FAULT_FALLOCATE_SECONDS, FAULT_RENAME_SECONDS: how long each one takes.
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static std::atomic<int> calls{0};
  dawdle("FAULT_FALLOCATE_SECONDS");
  return interrupted(calls) ? -1 : original(fallocate, "fallocate")(fd, mode, offset, bytes);
}

int ftruncate(int fd, off_t bytes) noexcept {
  static std::atomic<int> calls{0};
  return !in_shared_memory(fd) && interrupted(calls) ? -1 : original(ftruncate, "ftruncate")(fd, bytes);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static std::atomic<int> calls{0};
  dawdle("FAULT_RENAME_SECONDS");
  return interrupted(calls) ? -1 : original(renameat2, "renameat2")(from_folder, from, to_folder, to, flags);
}

// FAULT_THREADS: how many threads the process may start in all.
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) noexcept {
  static std::atomic<int> calls{0};
  if (setting_of("FAULT_THREADS") >= 0 && calls++ >= setting_of("FAULT_THREADS")) return EAGAIN;
  return original(pthread_create, "pthread_create")(thread, attributes, function, argument);
}

}  // extern "C"
