// SPDX-License-Identifier: Apache-2.0
#include "io/fingerprint.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/host.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kSamples = 32;  // per tensor
constexpr std::int64_t kSampleBytes = 4096;
constexpr std::int64_t kMoreBytes = 64'000'000;  // per file, if samples aren't enough
constexpr std::int64_t kSpreadBytes = 16384;     // pieces of a tensor that is larger than its share of kMoreBytes
constexpr std::int64_t kWholeBytes = std::int64_t{1} << 20;

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

// Adds at most `most` evenly spread pieces, including the first and the last bytes, or the whole tensor if it has no
// more.
void add_pieces(const SafetensorsShard& shard, const TensorInfo& tensor, std::int64_t most, std::int64_t bytes,
                Hash& hash) {
  const std::int64_t pieces = std::min(most, (tensor.bytes() + bytes - 1) / bytes);
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(bytes, tensor.bytes())));
  const std::int64_t last = tensor.bytes() - static_cast<std::int64_t>(piece.size());
  for (std::int64_t i = 0; i < pieces; ++i) {
    heartbeat();
    shard.read(tensor, i + 1 == pieces ? last : last / std::max<std::int64_t>(1, pieces - 1) * i, piece);
    hash.add(piece);
  }
}

// Small tensors are hashed whole. The rest of kMoreBytes is divided equally among the larger ones.
std::string hash_of_data(const SafetensorsShard& shard, std::vector<const TensorInfo*> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorInfo* a, const TensorInfo* b) { return a->bytes() < b->bytes(); });
  Hash hash;
  std::int64_t left = kMoreBytes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t share = left / static_cast<std::int64_t>(tensors.size() - i);
    const bool whole = tensors[i]->bytes() <= share;
    const std::int64_t bytes = whole ? kWholeBytes : kSpreadBytes;
    add_pieces(shard, *tensors[i], whole ? tensors[i]->bytes() : share / bytes, bytes, hash);
    left -= std::min(tensors[i]->bytes(), share);
  }
  shard.check_unchanged();
  return hash.hex();
}

std::string hash_of_header(const SafetensorsShard& shard) {
  Hash hash;
  shard.read_header([&](std::span<const std::byte> piece) { hash.add(piece); });
  return hash.hex();
}

// Two processes of one host that have the same mounts see the same files under the same names.
std::string place_of(const std::string& path) {
  std::error_code ignored;
  const auto mounts = std::filesystem::read_symlink("/proc/self/ns/mnt", ignored).string();
  return fmt::format("{} {} {}", host_name(), mounts, std::filesystem::absolute(path, ignored).string());
}

// Equal for all containers of a host. Copies of a machine snapshot may share a boot ID.
std::string kernel_of_host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return fmt::format("{} {}", host_name(), boot);
}

}  // namespace

bool is_one_file(const FileFingerprint& a, const FileFingerprint& b) {
  return a.bytes == b.bytes && a.stamp == b.stamp && (a.kernel != b.kernel || a.device == b.device);
}

FileFingerprint fingerprint(const SafetensorsShard& shard, std::span<const TensorInfo* const> tensors) {
  Hash data;
  for (const TensorInfo* tensor : tensors) add_pieces(shard, *tensor, kSamples, kSampleBytes, data);
  const FileIdentity& identity = shard.identity();
  const std::string modified = fmt::format("{}.{:09}", identity.modified_seconds, identity.modified_nanoseconds);
  FileFingerprint print{
      shard.path(),
      identity.bytes,
      hash_of_header(shard),
      data.hex(),
      place_of(shard.path()),
      fmt::format("device {}, inode {}, changed at {}", identity.device, identity.inode, modified),
      kernel_of_host(),
      fmt::format("{}", identity.device),
      fmt::format("{} {} {}.{:09}", identity.inode, modified, identity.changed_seconds, identity.changed_nanoseconds),
      [&shard, all = std::vector(tensors.begin(), tensors.end())] { return hash_of_data(shard, all); }};
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
