// SPDX-License-Identifier: Apache-2.0
// The few system calls that files of tensors need, with every failure an Error (kFile) that names the file. Reads and
// writes are positioned, never mapped: mapped pages of untouched neighbours would count as this process's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/wording.hpp"

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

// Throws kFile "problem (what the system says of error_number). remedy."
[[noreturn]] void fail_file(std::string_view problem, int error_number, const Wording& remedy);

// Which file, and which of its states.
struct FileIdentity {
  std::int64_t bytes = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t modified_seconds = 0;
  std::int64_t modified_nanoseconds = 0;

  bool operator==(const FileIdentity&) const = default;
};
FileIdentity identify(const FileDescriptor& file, const std::string& path);

// Opens a regular file for reading; never blocks, whatever lies at `path`.
FileDescriptor open_regular(const std::string& path);

// All of `target`, or an error: the file may have shrunk since it was opened. Safe from several threads.
void read_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                  std::span<std::byte> target);
void write_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                   std::span<const std::byte> source);

// Brings what was written to the disk piece by piece, where the system can: an fsync() behind it has little left to do,
// and the rank shows meanwhile that it works. Promises nothing and fails never; that is fsync()'s business.
void write_back(const FileDescriptor& file, std::int64_t bytes);

}  // namespace ringattn
