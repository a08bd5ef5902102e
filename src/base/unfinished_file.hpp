// SPDX-License-Identifier: Apache-2.0
// Files that are written under a temporary name, so that a signal that ends the process can take them along.
#pragma once

#include <cstddef>
#include <string>

namespace ringattn {

// Says that the file is unfinished, as long as it lives. Beyond kMostUnfinishedFiles at a time, or with an overlong
// path, it says nothing: then a signal leaves the file behind.
class UnfinishedFile {
 public:
  explicit UnfinishedFile(const std::string& path) noexcept;
  ~UnfinishedFile();
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

 private:
  std::size_t slot_;
};

inline constexpr std::size_t kMostUnfinishedFiles = 64;

// Unlinks every unfinished file. Async-signal-safe.
void remove_unfinished_files() noexcept;

// Has SIGINT, SIGTERM and SIGHUP do so before they end the process, those that would end it as things are.
void remove_unfinished_files_on_signals() noexcept;

}  // namespace ringattn
