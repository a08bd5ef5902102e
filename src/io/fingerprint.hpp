// SPDX-License-Identifier: Apache-2.0
// Distinguishes files without reading all of them. Ranks compare fingerprints (ops/common/input_agreement.hpp): each
// opens its input by name, and the name may lead to other bytes on another host or at another time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors_file.hpp"

namespace ringattn {

struct FileFingerprint {
  std::string path;  // as the caller named it
  std::int64_t bytes = 0;
  std::string header;  // XXH3-128 in hex of the whole header
  std::string data;    // XXH3-128 in hex of samples of the tensors that are used
  // Host, mount namespace and absolute path. Equal for two ranks that opened the same path, so they must have opened
  // the same file in the same state. Ranks of different hosts may read copies.
  std::string location;
  std::string state;   // device, inode and time of the last modification
  std::string kernel;  // host and boot, for which device numbers are valid
  std::string device;
  // Inode, time of the last modification, and time of the last change of the inode. Equal on all hosts that share a
  // file system.
  std::string stamp;
  // Returns XXH3-128 in hex of at most 64 MB of the tensors that are used, which it reads. Valid as long as the file is
  // open. Covers only this rank's own files. Throws kFile.
  std::function<std::string()> more_data = {};
};

// True if two ranks have opened one file, not copies of it: the same device and inode on one host, or the same inode
// and times on two hosts.
bool is_one_file(const FileFingerprint& a, const FileFingerprint& b);

// Reads at most 32 pieces of 4 KiB of each tensor, including the first and the last bytes; a tensor that is no larger
// is read whole. Throws kFile, also if the file has changed since it was opened.
FileFingerprint fingerprint(const SafetensorsShard& shard, std::span<const TensorInfo* const> tensors);

// One fingerprint for each file that the tensors lie in, in the tensors' order.
std::vector<FileFingerprint> fingerprints(std::span<const TensorSource> tensors);

}  // namespace ringattn
