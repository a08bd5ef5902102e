// SPDX-License-Identifier: Apache-2.0
// Keeps track of files under temporary names, so that a signal that ends the process can remove them.
#pragma once

#include <cstddef>
#include <string>

#include "base/file_descriptor.hpp"

namespace ringattn {

// Creates a file and registers it as unfinished while this object lives. A signal that ends the process removes the
// file, whichever thread it arrives on and whenever it comes. Files beyond kMaxUnfinishedFiles at a time, and files
// with an overlong path, are not registered and remain.
class UnfinishedFile {
 public:
  // Afterwards `file` is open for writing, or it is invalid and errno says why.
  UnfinishedFile(const std::string& path, FileDescriptor& file) noexcept;
  // Registers a file that another process has created and this one has opened. The first of the processes to be ended
  // removes it, because the others may be killed without time to do so. Does nothing beyond kMaxSharedFiles.
  explicit UnfinishedFile(const std::string& path) noexcept;
  ~UnfinishedFile();
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

 private:
  std::size_t slot_;
};

inline constexpr std::size_t kMaxUnfinishedFiles = 64;
inline constexpr std::size_t kMaxSharedFiles = 8;

// Unlinks every unfinished file. Called just before the process ends: a thread that creates another file afterwards
// blocks until then. Async-signal-safe.
void remove_unfinished_files() noexcept;

// Installs handlers of SIGINT, SIGTERM and SIGHUP that remove the unfinished files before they end the process. A
// signal that is ignored or already handled keeps its handler.
void remove_unfinished_files_on_signals() noexcept;

}  // namespace ringattn
