// SPDX-License-Identifier: Apache-2.0
// The few system calls that tensor files need. Every failure is an Error (kFile) that names the file. Reads and writes
// are positioned, and files are never mapped, because mapped pages next to the requested ones would count as this
// process's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/file_descriptor.hpp"

namespace ringattn {

// Identity and state of a file.
struct FileIdentity {
  std::int64_t bytes = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t modified_seconds = 0;
  std::int64_t modified_nanoseconds = 0;
  // ctime: the last change of the inode. Programs can't set this time. A new name or other permissions change it, too,
  // so it is not compared as part of the state.
  std::int64_t changed_seconds = 0;
  std::int64_t changed_nanoseconds = 0;

  bool operator==(const FileIdentity& other) const {
    return bytes == other.bytes && device == other.device && inode == other.inode &&
           modified_seconds == other.modified_seconds && modified_nanoseconds == other.modified_nanoseconds;
  }
};
FileIdentity identify(const FileDescriptor& file, const std::string& path);

// Opens a regular file for reading. Never blocks, whatever kind of file `path` is.
FileDescriptor open_regular(const std::string& path);

// Reads exactly target.size() bytes. Throws if there are fewer: the file may have shrunk since it was opened.
// Thread-safe.
void read_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                  std::span<std::byte> target);
void write_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                   std::span<const std::byte> source);

}  // namespace ringattn
