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
  std::string path;  // as it was named
  std::int64_t bytes = 0;
  std::string header;  // XXH3-128 in hex of all of it
  std::string data;    // of samples of the tensors that are used
  // Host and absolute path: equal for two ranks that asked for the same file, so that they must have got the same one
  // in the same state. Ranks of different hosts may read copies.
  std::string location;
  std::string state;   // device, inode and time of the last change of its bytes
  std::string kernel;  // host and boot: whose numbers of devices these are
  std::string device;
  // Inode, time of the last change of its bytes and of the last change of anything: equal on all hosts for a file of a
  // file system that they share.
  std::string stamp;
  // XXH3-128 in hex of the tensors that are used, at most 64 MB of them. Reads as much; lasts as long as the file is
  // open. Covers only this rank's own files. Throws kFile.
  std::function<std::string()> more_data = {};
};

// True if two ranks have opened one file, not copies of it: the same device and inode on one host, or the same inode
// and times on two hosts.
bool is_one_file(const FileFingerprint& a, const FileFingerprint& b);

// At most 32 pieces of 4 KiB of each tensor are read, the first and the last bytes among them; all of a tensor that is
// no larger. Throws kFile, also where the file has changed since it was opened.
FileFingerprint fingerprint(const SafetensorsShard& shard, std::span<const TensorInfo* const> tensors);

// One fingerprint for each file that the tensors lie in, in the tensors' order.
std::vector<FileFingerprint> fingerprints(std::span<const TensorSource> tensors);

}  // namespace ringattn
