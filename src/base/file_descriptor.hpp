// SPDX-License-Identifier: Apache-2.0
// An open file, and wrappers for system calls that a signal may interrupt.
#pragma once

#include <cerrno>
#include <functional>
#include <string_view>

#include "base/message_template.hpp"

namespace ringattn {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

  int fd_ = -1;
};

// Repeats a system call until no signal interrupts it. Not for close(): the descriptor is closed whatever it returns.
template <typename Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Runs a call that may take as long as a slow disk or network needs, and returns its result: 0, or an errno. If the
// caller is a rank, a separate thread runs the call while the rank sends heartbeats, so other ranks do not take a slow
// disk for a silent rank. That thread may outlive the caller, so `call` must own what it uses.
int await_disk(std::function<int()> call);
// The same for a call on an open file. `call` gets a duplicate of its descriptor.
int await_disk(const FileDescriptor& file, std::function<int(int fd)> call);

// Throws kFile "problem (strerror(error_number)). suggestion."
[[noreturn]] void fail_file(const MessageTemplate& problem, int error_number, const MessageTemplate& suggestion);

// Flushes `file` to disk, however long that takes. Messages call the file `name`. Throws kFile.
void sync_file(const FileDescriptor& file, const MessageTemplate& name);

}  // namespace ringattn
