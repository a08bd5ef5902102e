// SPDX-License-Identifier: Apache-2.0
// Reads tensors of a safetensors file, or of the files that a `*.index.json` names. Opening a file reads only its
// header. Data are read with positioned reads of exactly the requested bytes. Thread-safe, so the ranks of a process
// share one object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/posix_file.hpp"
#include "io/safetensors_header.hpp"
#include "io/safetensors_index.hpp"

namespace ringattn {

// One opened file: its header and its descriptor.
class SafetensorsShard {
 public:
  // Throws kFile.
  explicit SafetensorsShard(std::string path);

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  // Bytes [offset, offset + target.size()) of `tensor`, which must hold them. Throws kFile when the file can't be read
  // or has changed since it was opened.
  void read(const TensorInfo& tensor, std::int64_t offset, std::span<std::byte> target) const;
  // Calls `visit` for the header's bytes, including its length field, in pieces. Throws kFile.
  void read_header(const std::function<void(std::span<const std::byte>)>& visit) const;
  const FileIdentity& identity() const { return identity_; }
  // True if the path still names this file, unchanged since it was opened.
  bool is_current() const;
  // Throws kFile when the file has been written to since it was opened.
  void check_unchanged() const;

 private:
  std::string path_;
  FileDescriptor file_;
  FileIdentity identity_;
  SafetensorsHeader header_;
};

// A tensor and the file that contains it; valid as long as the SafetensorsFile that returned it.
struct TensorSource {
  const SafetensorsShard* shard = nullptr;
  const TensorInfo* info = nullptr;

  // "`q` of qkv.safetensors", for messages.
  std::string text() const;
};

class SafetensorsFile {
 public:
  // `path` is an index if it ends in ".index.json", otherwise a safetensors file. Throws kFile if it can't be opened or
  // is malformed. The files of an index are opened when one of their tensors is requested, so others may be missing.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  // All tensors, ascending.
  std::vector<std::string_view> names() const;
  bool contains(std::string_view name) const;
  // Throws kFile, with the nearest name, if there is no such tensor.
  TensorSource tensor(std::string_view name) const;
  // True if the path, and those of all files opened so far, still name the opened files.
  bool is_current() const;
  // A metadata value of a single file; nullptr if there is none.
  const std::string* metadata(std::string_view key) const;

 private:
  const SafetensorsShard& shard(const std::string& file) const;
  [[noreturn]] void fail_unknown(std::string_view name) const;

  std::string path_;
  FileIdentity identity_;
  std::string folder_;  // of the index, with its slash
  SafetensorsIndex index_;
  std::unique_ptr<const SafetensorsShard> single_;
  mutable std::mutex mutex_;  // guards shards_, which are opened on first use
  mutable std::map<std::string, std::unique_ptr<const SafetensorsShard>> shards_;
};

}  // namespace ringattn
