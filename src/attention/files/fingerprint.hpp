// SPDX-License-Identifier: Apache-2.0
// What tells a file from another without reading all of it. Ranks compare theirs (attention/job/one_input.hpp): each
// opens its input by name, and the name may lead to other bytes on another host, or a moment later.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/files/safetensors_file.hpp"

namespace ringattn {

struct FileFingerprint {
  std::string path;  // as it was named
  std::int64_t bytes = 0;
  std::string header;  // XXH3-128 in hex of all of it
  std::string data;    // of samples of the tensors that are used
  // Host and absolute path: equal for two ranks that asked for the same file, so that they must have got the same one
  // in the same state. Ranks of different hosts may read copies.
  std::string place;
  std::string state;  // device, inode and time of the last change
};

// At most 32 pieces of 4 KiB of each tensor are read, the first and the last bytes among them; all of a tensor that is
// no larger. Throws kFile, also where the file has changed since it was opened.
FileFingerprint fingerprint(const SafetensorsShard& shard, std::span<const TensorInfo* const> tensors);

// Of each file that the tensors lie in, in the tensors' order.
std::vector<FileFingerprint> fingerprints(std::span<const TensorSource> tensors);

}  // namespace ringattn
