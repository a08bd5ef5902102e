// SPDX-License-Identifier: Apache-2.0
// A file that appears whole or not at all: it is written under another name in the same folder, and renamed. Every file
// that this project writes is made this way.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/file_descriptor.hpp"
#include "base/message_template.hpp"
#include "base/unfinished_file.hpp"

namespace ringattn {

class TemporaryFile {
 public:
  // Creates an empty file that is to become `path`. Its name is one that no file has, `<path>.<8 digits>.tmp`, with
  // less of the path's own name where the file system takes no longer one. `name` is what messages call `path`. Throws
  // kFile.
  TemporaryFile(const std::string& path, MessageTemplate name);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  // Removes the file unless it has been published.
  ~TemporaryFile() { discard(); }

  const std::string& path() const { return path_; }
  const FileDescriptor& file() const { return file_; }

  // Appends. Throws kFile.
  void write(std::string_view text);
  // The file has its own name from now on. `replace`: also where there is a file of that name. Throws kFile, and leaves
  // what was there.
  void publish(bool replace);
  // The same so that it outlives a crash of the machine, too: syncs the file before and its folder afterwards.
  void publish_synced(bool replace);
  // Removes it; publishing is not possible any more.
  void discard() noexcept;

 private:
  std::string final_path_;
  MessageTemplate name_;
  std::string path_;
  FileDescriptor file_;
  std::optional<UnfinishedFile> unfinished_;  // as long as it is to be published or removed
};

// Throws kFile where the file system can't hold a file of this name, or its temporary file. For those who have much to
// do before they create it.
void check_file_name(const std::string& path, const MessageTemplate& name);

// The folder that holds `path`.
std::string folder_of(const std::string& path);

}  // namespace ringattn
