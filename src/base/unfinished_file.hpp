// SPDX-License-Identifier: Apache-2.0
// Files that are written under a temporary name, so that a signal that ends the process can take them along.
#pragma once

#include <cstddef>
#include <string>

#include "base/file_descriptor.hpp"

namespace ringattn {

// Creates a file that no path names yet, and says that it is unfinished as long as this object lives. Whenever the
// signal comes, and to whatever thread, there is no file yet or the signal takes it along. Not so beyond
// kMaxUnfinishedFiles at a time, or with an overlong path: those files stay behind.
class UnfinishedFile {
 public:
  // `file` is open for writing afterwards, or not valid, and errno says why.
  UnfinishedFile(const std::string& path, FileDescriptor& file) noexcept;
  // A file that another process has created and this one has opened: the first of them that is ended takes it along,
  // for whoever ends a job may leave the others no time. Does nothing beyond kMaxSharedFiles.
  explicit UnfinishedFile(const std::string& path) noexcept;
  ~UnfinishedFile();
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

 private:
  std::size_t slot_;
};

inline constexpr std::size_t kMaxUnfinishedFiles = 64;
inline constexpr std::size_t kMaxSharedFiles = 8;

// Unlinks every unfinished file, just before the process ends: whoever creates another one waits for that end.
// Async-signal-safe.
void remove_unfinished_files() noexcept;

// Has SIGINT, SIGTERM and SIGHUP do so before they end the process, those that would end it as things are.
void remove_unfinished_files_on_signals() noexcept;

}  // namespace ringattn
