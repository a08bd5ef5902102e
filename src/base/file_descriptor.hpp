// SPDX-License-Identifier: Apache-2.0
// An open file, and the system calls on it that a signal may break off.
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

// The result of a system call that is made again as long as a signal breaks it off. Not for close(): the descriptor is
// gone whatever it returns.
template <typename Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Makes a call that may take as long as a slow disk or network needs, and returns what it does: 0, or an error's
// number. Where the caller is a rank, a thread of its own makes the call and the rank gives signs of life: a slow disk
// is no rank's silence. That thread may outlive the caller, so `call` owns what it uses.
int await_disk(std::function<int()> call);
// The same of a call on an open file; it gets a descriptor of that file.
int await_disk(const FileDescriptor& file, std::function<int(int fd)> call);

// Throws kFile "problem (what the system says of error_number). suggestion."
[[noreturn]] void fail_file(const MessageTemplate& problem, int error_number, const MessageTemplate& suggestion);

// Brings what was written to the disk, however long that takes. `name` is what messages call the file. Throws kFile.
void sync_file(const FileDescriptor& file, const MessageTemplate& name);

}  // namespace ringattn
