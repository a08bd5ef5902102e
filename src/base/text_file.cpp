// SPDX-License-Identifier: Apache-2.0
#include "base/text_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.hpp"
#include "base/unfinished_file.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kLongestName = 255 - 16;  // what file systems take, less the temporary file's ending
constexpr const char* kReadAdvice = "Check the path, and name a readable text file.";
constexpr const char* kWriteAdvice = "Name a file in a directory that you may write to.";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Of the path itself: a link is a link.
std::optional<mode_t> kind_of(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return status.st_mode;
}

// 0, or the errno of what failed.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

std::string read_text_file(const std::string& path, std::size_t limit) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // a FIFO would wait for a writer
  if (file.get() < 0) fail(ErrorCode::kFile, fmt::format("can't read {}", path), std::strerror(errno), kReadAdvice);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    fail(ErrorCode::kFile, fmt::format("can't read {}", path), "it is no regular file", kReadAdvice);
  }
  std::string text;
  char piece[16384];
  for (;;) {
    const ssize_t got = ::read(file.get(), piece, sizeof piece);
    if (got < 0) {
      if (errno == EINTR) continue;
      fail(ErrorCode::kFile, fmt::format("can't read {}", path), std::strerror(errno), kReadAdvice);
    }
    if (got == 0) return text;
    text.append(piece, static_cast<std::size_t>(got));
    if (text.size() > limit) {
      fail(ErrorCode::kFile, fmt::format("{} is too long", path), fmt::format("at most {} bytes are read", limit),
           kReadAdvice);
    }
  }
}

void check_new_file(const std::string& path, bool force, std::string_view name) {
  const Wording cant_be_written{setting(name, path), " can't be written"};
  const auto kind = kind_of(path);
  if (kind && S_ISDIR(*kind)) {
    fail(ErrorCode::kFile, cant_be_written, "it is a directory", kWriteAdvice);
  }
  if (kind && !S_ISREG(*kind)) {
    fail(ErrorCode::kFile, cant_be_written, "it exists and is no regular file",
         "Name a file; - is stdout, where that is taken.");
  }
  if (kind && !force) {
    fail(ErrorCode::kFile, {setting(name, path), " exists"}, "it is not overwritten",
         {"Use ", setting("force"), " to replace it."});
  }
  if (kind) return;
  if (std::filesystem::path(path).filename().string().size() > kLongestName) {
    fail(ErrorCode::kFile, cant_be_written, "its name is too long", kWriteAdvice);
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string directory = parent.empty() ? "." : parent;
  struct stat parent_status {};  // a link to a directory will do
  const bool parent_exists = ::stat(directory.c_str(), &parent_status) == 0;
  if (!parent_exists || !S_ISDIR(parent_status.st_mode)) {
    fail(ErrorCode::kFile, cant_be_written,
         parent_exists ? fmt::format("{} is no directory", directory)
                       : fmt::format("the directory {} doesn't exist", directory),
         "Create the directory, or name another.");
  }
  if (::access(directory.c_str(), W_OK) != 0) {
    fail(ErrorCode::kFile, cant_be_written, fmt::format("{}: {}", directory, std::strerror(errno)), kWriteAdvice);
  }
}

void write_text_file(const std::string& path, std::string_view text, bool force, std::string_view name) {
  check_new_file(path, force, name);
  const auto refuse = [&](int error) {
    fail(ErrorCode::kFile, {setting(name, path), " can't be written"}, std::strerror(error), kWriteAdvice);
  };
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  const UnfinishedFile unfinished(temporary);
  int error = 0;
  {
    const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file.get() < 0) refuse(errno);
    error = write_all(file.get(), text);
    if (error == 0 && ::fsync(file.get()) != 0) error = errno;
  }
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    refuse(error);
  }
}

}  // namespace ringattn
