// SPDX-License-Identifier: Apache-2.0
// A file that appears complete or not at all: it is written under another name in the same directory and then renamed.
// The project writes every file this way.
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
  // Creates an empty file that is to become `path`. Its name is unused so far: `<path>.<8 hex digits>.tmp`, with the
  // base name shortened where the file system does not allow one that long. Messages call the file `name`. Throws
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
  // Renames the file to its final path. `replace` allows it to overwrite an existing file. Throws kFile, and then
  // leaves an existing file unchanged.
  void publish(bool replace);
  // The same, and durable across a crash of the machine: syncs the file before the rename and its directory after it.
  void publish_synced(bool replace);
  // Removes the file. It can't be published afterwards.
  void discard() noexcept;

 private:
  std::string final_path_;
  MessageTemplate name_;
  std::string path_;
  FileDescriptor file_;
  std::optional<UnfinishedFile> unfinished_;  // set until the file is published or removed
};

// Throws kFile if the file system can't hold a file of this name, or its temporary file. For callers that do much work
// before they create the file.
void check_file_name(const std::string& path, const MessageTemplate& name);

// The directory that contains `path`.
std::string folder_of(const std::string& path);

}  // namespace ringattn
