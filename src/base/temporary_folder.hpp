// SPDX-License-Identifier: Apache-2.0
// A folder of files that appears complete or not at all: it is filled under another name beside its path, and renamed.
#pragma once

#include <optional>
#include <string>

#include "base/unfinished_folder.hpp"

namespace ringattn {

// Throws kFile if a folder can't become `path`: its parent must exist and be writable, and nothing may be there, unless
// `replace`, and then only a folder that has nothing but files, one of them called `needed`. Called before the work.
void check_output_folder(const std::string& path, bool replace, const std::string& needed);

class TemporaryFolder {
 public:
  // Creates `<path>.<8 hex digits>.tmp`. Throws kFile.
  explicit TemporaryFolder(const std::string& path);
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  // Removes the folder and its files unless it has been published.
  ~TemporaryFolder();

  const std::string& path() const { return path_; }

  // Renames it to its final path, where a folder is replaced if `replace`, and syncs both folders. Throws kFile, and
  // then leaves what is there unchanged.
  void publish(bool replace);

 private:
  std::string final_path_;
  std::string path_;
  std::optional<UnfinishedFolder> unfinished_;
};

}  // namespace ringattn
