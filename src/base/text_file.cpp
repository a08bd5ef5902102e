// SPDX-License-Identifier: Apache-2.0
#include "base/text_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/file_descriptor.hpp"
#include "base/temporary_file.hpp"

namespace ringattn {

namespace {

constexpr const char* kReadAdvice = "Check the path, and name a readable text file.";
constexpr const char* kWriteAdvice = "Name a file in a directory that you may write to.";

// The file type and mode of `path` itself: symbolic links are not followed.
std::optional<mode_t> kind_of(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return status.st_mode;
}

}  // namespace

std::string read_text_file(const std::string& path, std::size_t limit) {
  const FileDescriptor file(uninterrupted([&] {
    return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // opening a FIFO would block
  }));
  if (!file.valid()) fail(ErrorCode::kFile, fmt::format("can't read {}", path), std::strerror(errno), kReadAdvice);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    fail(ErrorCode::kFile, fmt::format("can't read {}", path), "it is not a regular file", kReadAdvice);
  }
  std::string text;
  char buffer[16384];
  for (;;) {
    const ssize_t got = uninterrupted([&] { return ::read(file.get(), buffer, sizeof buffer); });
    if (got < 0) fail(ErrorCode::kFile, fmt::format("can't read {}", path), std::strerror(errno), kReadAdvice);
    if (got == 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
    if (text.size() > limit) {
      fail(ErrorCode::kFile, fmt::format("{} is too long", path), fmt::format("at most {} bytes are read", limit),
           kReadAdvice);
    }
  }
}

void check_new_file(const std::string& path, bool force, std::string_view name) {
  const MessageTemplate cant_be_written{setting(name, path), " can't be written"};
  const auto kind = kind_of(path);
  if (kind && S_ISDIR(*kind)) {
    fail(ErrorCode::kFile, cant_be_written, "it is a directory", kWriteAdvice);
  }
  if (kind && !S_ISREG(*kind)) {
    fail(ErrorCode::kFile, cant_be_written, "it exists and is not a regular file",
         "Name a file; - is stdout, where that is taken.");
  }
  if (kind && !force) {
    fail(ErrorCode::kFile, {setting(name, path), " exists"}, "it is not overwritten",
         {"Use ", setting("force"), " to replace it."});
  }
  check_file_name(path, setting(name, path));
  if (kind) return;
  const std::string directory = folder_of(path);
  struct stat parent_status {};  // follows a link to a directory
  const bool parent_exists = ::stat(directory.c_str(), &parent_status) == 0;
  if (!parent_exists || !S_ISDIR(parent_status.st_mode)) {
    fail(ErrorCode::kFile, cant_be_written,
         parent_exists ? fmt::format("{} is not a directory", directory)
                       : fmt::format("the directory {} doesn't exist", directory),
         "Create the directory, or name another.");
  }
  if (::access(directory.c_str(), W_OK) != 0) {
    fail(ErrorCode::kFile, cant_be_written, fmt::format("{}: {}", directory, std::strerror(errno)), kWriteAdvice);
  }
}

void write_text_file(const std::string& path, std::string_view text, bool force, std::string_view name) {
  check_new_file(path, force, name);
  TemporaryFile file(path, setting(name, path));
  file.write(text);
  file.publish_synced(force);
}

}  // namespace ringattn
