// SPDX-License-Identifier: Apache-2.0
// The same as unfinished_file.hpp for a folder of files: a signal that ends the process removes it with its files.
#pragma once

#include <cstddef>
#include <string>

namespace ringattn {

class UnfinishedFolder {
 public:
  // Creates the folder. If that fails, errno says why.
  explicit UnfinishedFolder(const std::string& path) noexcept;
  // Afterwards the folder stays where it is.
  ~UnfinishedFolder();
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;

  bool valid() const { return created_; }

 private:
  std::size_t slot_;
  bool created_ = false;
};

// Removes a folder of files; one with folders in it stays. Async-signal-safe.
void remove_folder_of_files(const char* path) noexcept;

}  // namespace ringattn
