// SPDX-License-Identifier: Apache-2.0
#include "io/posix_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

// A rank sends heartbeats between two transfers, so no transfer may take seconds even on a slow disk.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 22;
constexpr std::string_view kReadAdvice = "Check the disk, or copy the file to another.";

}  // namespace

FileIdentity identify(const FileDescriptor& file, const std::string& path) {
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail_file(fmt::format("can't examine {}", path), errno, kReadAdvice);
  return {status.st_size,         status.st_dev,         status.st_ino,         status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec};
}

FileDescriptor open_regular(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    fail(ErrorCode::kFile, "can't open a file", "its path holds a byte of value 0", "Give a path without one.");
  }
  // O_NONBLOCK: opening a FIFO or a device must not wait for its other side.
  FileDescriptor file(
      uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); }));
  if (!file.valid()) {
    const int error_number = errno;
    fail_file(fmt::format("can't open {}", path), error_number,
              error_number == ENOENT ? "Check the path." : "Check the path and its permissions.");
  }
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail_file(fmt::format("can't examine {}", path), errno, kReadAdvice);
  if (!S_ISREG(status.st_mode)) {
    fail(ErrorCode::kFile, fmt::format("can't read {}", path),
         S_ISDIR(status.st_mode) ? "it is a directory" : "it is not a regular file", "Give a safetensors file.");
  }
  return file;
}

void read_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                  std::span<std::byte> target) {
  while (!target.empty()) {
    heartbeat();
    const ssize_t got = uninterrupted([&] {
      return ::pread(file.get(), target.data(), std::min(target.size(), kLargestTransfer), static_cast<off_t>(offset));
    });
    if (got < 0) fail_file(fmt::format("can't read {} at byte {}", path, offset), errno, kReadAdvice);
    if (got == 0) {
      fail(ErrorCode::kFile, fmt::format("{} ends at byte {}", path, offset), "it has shrunk since it was opened",
           "Leave input files alone while a job reads them.");
    }
    target = target.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

void write_exactly(const FileDescriptor& file, const std::string& path, std::int64_t offset,
                   std::span<const std::byte> source) {
  while (!source.empty()) {
    heartbeat();
    const ssize_t written = uninterrupted([&] {
      return ::pwrite(file.get(), source.data(), std::min(source.size(), kLargestTransfer), static_cast<off_t>(offset));
    });
    if (written <= 0) {
      fail_file(fmt::format("can't write {} at byte {}", path, offset), written == 0 ? ENOSPC : errno,
                "Check the space on its file system.");
    }
    source = source.subspan(static_cast<std::size_t>(written));
    offset += written;
  }
}

}  // namespace ringattn
