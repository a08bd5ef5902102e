// SPDX-License-Identifier: Apache-2.0
#include "attention/files/fingerprint.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/host.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kPieces = 32;
constexpr std::int64_t kPieceBytes = 4096;

class Hash {
 public:
  Hash() {
    std::memset(&state_, 0, sizeof state_);
    XXH3_128bits_reset(&state_);
  }
  void add(std::span<const std::byte> bytes) { XXH3_128bits_update(&state_, bytes.data(), bytes.size()); }
  std::string hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  XXH3_state_t state_;
};

void add_samples(const SafetensorsShard& shard, const TensorInfo& tensor, Hash& hash) {
  std::vector<std::byte> piece(kPieceBytes);
  const std::int64_t pieces = std::min(kPieces, (tensor.bytes() + kPieceBytes - 1) / kPieceBytes);
  for (std::int64_t i = 0; i < pieces; ++i) {
    // Side by side in a small tensor, else evenly spread.
    const std::int64_t last = std::max<std::int64_t>(0, tensor.bytes() - kPieceBytes);
    const std::int64_t offset = i + 1 == pieces ? last : last / std::max<std::int64_t>(1, pieces - 1) * i;
    piece.resize(static_cast<std::size_t>(std::min(kPieceBytes, tensor.bytes() - offset)));
    shard.read(tensor, offset, piece);
    hash.add(piece);
  }
}

std::string hash_of_header(const SafetensorsShard& shard) {
  Hash hash;
  shard.read_header([&](std::span<const std::byte> piece) { hash.add(piece); });
  return hash.hex();
}

// Two processes of one host see the same files by the same names where they have the same mounts.
std::string place_of(const std::string& path) {
  std::error_code ignored;
  const auto mounts = std::filesystem::read_symlink("/proc/self/ns/mnt", ignored).string();
  return fmt::format("{} {} {}", host_name(), mounts, std::filesystem::absolute(path, ignored).string());
}

}  // namespace

FileFingerprint fingerprint(const SafetensorsShard& shard, std::span<const TensorInfo* const> tensors) {
  Hash data;
  for (const TensorInfo* tensor : tensors) add_samples(shard, *tensor, data);
  const FileIdentity& identity = shard.identity();
  FileFingerprint print{shard.path(),
                        identity.bytes,
                        hash_of_header(shard),
                        data.hex(),
                        place_of(shard.path()),
                        fmt::format("device {}, inode {}, changed at {}.{:09}", identity.device, identity.inode,
                                    identity.modified_seconds, identity.modified_nanoseconds)};
  shard.check_unchanged();
  return print;
}

std::vector<FileFingerprint> fingerprints(std::span<const TensorSource> tensors) {
  std::vector<FileFingerprint> prints;
  std::vector<const SafetensorsShard*> done;
  for (const TensorSource& first : tensors) {
    if (std::find(done.begin(), done.end(), first.shard) != done.end()) continue;
    std::vector<const TensorInfo*> inside;
    for (const TensorSource& tensor : tensors) {
      if (tensor.shard == first.shard) inside.push_back(tensor.info);
    }
    prints.push_back(fingerprint(*first.shard, inside));
    done.push_back(first.shard);
  }
  return prints;
}

}  // namespace ringattn
