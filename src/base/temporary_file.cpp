// SPDX-License-Identifier: Apache-2.0
#include "base/temporary_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <random>
#include <utility>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kEndingBytes = 13;  // length of ".01234567.tmp"
constexpr std::string_view kWriteAdvice = "Choose another folder, on a disk that is in order.";

std::string_view name_in_folder(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// The longest name that the folder's file system takes.
std::size_t max_name_length(const std::string& path) {
  const long max_length = ::pathconf(folder_of(path).c_str(), _PC_NAME_MAX);
  return max_length > 0 ? static_cast<std::size_t>(max_length) : NAME_MAX;
}

// The path of the temporary file without its suffix, or nothing if even an empty stem does not fit.
std::optional<std::string> temporary_stem(const std::string& path) {
  const std::string_view name = name_in_folder(path);
  const std::size_t folder = path.size() - name.size();
  const std::size_t max_name = max_name_length(path);
  constexpr std::size_t kMaxPath = PATH_MAX - 1;
  if (max_name < kEndingBytes || folder + kEndingBytes > kMaxPath) return std::nullopt;
  std::size_t kept = std::min({name.size(), max_name - kEndingBytes, kMaxPath - kEndingBytes - folder});
  // Never cut within a UTF-8 character: some file systems refuse an incomplete one.
  while (kept < name.size() && kept > 0 && (static_cast<unsigned char>(name[kept]) & 0xC0U) == 0x80U) --kept;
  return path.substr(0, folder + kept);
}

[[noreturn]] void fail_exists(const MessageTemplate& name) {
  fail(ErrorCode::kFile, {"can't write ", name}, "it exists",
       {"Choose another name, or replace it with ", setting("force"), "."});
}

// Renames without replacing, by the safest call that the file system supports. Returns EEXIST if the target exists.
int rename_new(const char* from, const char* to) {
  if (uninterrupted([&] { return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE); }) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) return errno;
  if (uninterrupted([&] { return ::link(from, to); }) == 0) {
    ::unlink(from);
    return 0;
  }
  if (errno == EEXIST) return errno;
  // Without hard links only a check just before the rename is left.
  struct stat status;
  if (::lstat(to, &status) == 0) return EEXIST;
  return uninterrupted([&] { return ::rename(from, to); }) == 0 ? 0 : errno;
}

int rename_over(const char* from, const char* to) {
  return uninterrupted([&] { return ::rename(from, to); }) == 0 ? 0 : errno;
}

int sync_folder(const char* path) {
  const FileDescriptor folder(uninterrupted([&] { return ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (folder.valid() && uninterrupted([&] { return ::fsync(folder.get()); }) == 0) return 0;
  return folder.valid() && errno == EINVAL ? 0 : errno;  // EINVAL: the file system's directories need no sync
}

}  // namespace

TemporaryFile::TemporaryFile(const std::string& path, MessageTemplate name)
    : final_path_(path), name_(std::move(name)) {
  check_file_name(path, name_);
  const std::string stem = *temporary_stem(path);
  std::random_device random;
  for (int attempt = 0; attempt < 100 && !file_.valid(); ++attempt) {
    path_ = fmt::format("{}.{:08x}.tmp", stem, random());
    unfinished_.emplace(path_, file_);
    if (!file_.valid() && errno != EEXIST) {
      fail_file({"can't create a temporary file beside ", name_}, errno, "Choose a folder that you may write to.");
    }
  }
  if (!file_.valid()) {
    fail_file({"can't create a temporary file beside ", name_}, EEXIST, "Remove what earlier runs have left there.");
  }
}

void TemporaryFile::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = uninterrupted([&] { return ::write(file_.get(), text.data(), text.size()); });
    if (written < 0) fail_file({"can't write ", name_}, errno, "Check the space on its file system.");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void TemporaryFile::publish(bool replace) {
  if (!unfinished_) fail(ErrorCode::kInternal, fmt::format("{} is published or removed already", path_));
  const int error = await_disk([from = path_, to = final_path_, replace] {
    return replace ? rename_over(from.c_str(), to.c_str()) : rename_new(from.c_str(), to.c_str());
  });
  if (error == EEXIST && !replace) fail_exists(name_);
  if (error != 0) fail_file({fmt::format("can't rename {} to ", path_), name_}, error, kWriteAdvice);
  unfinished_.reset();
}

void TemporaryFile::publish_synced(bool replace) {
  sync_file(file_, name_);
  publish(replace);
  const int error = await_disk([folder = folder_of(final_path_)] { return sync_folder(folder.c_str()); });
  if (error == 0) return;
  fail_file({name_, " is written, but its folder can't be synced"}, error, "A crash of the machine may lose it.");
}

void TemporaryFile::discard() noexcept {
  if (unfinished_) ::unlink(path_.c_str());
  unfinished_.reset();
}

void check_file_name(const std::string& path, const MessageTemplate& name) {
  const std::size_t max_length = max_name_length(path);
  const std::size_t length = name_in_folder(path).size();
  const MessageTemplate problem{"can't write ", name};
  if (length > max_length) {
    fail(ErrorCode::kFile, problem,
         fmt::format("File name too long: {} bytes, and its file system takes {}", length, max_length),
         "Choose a shorter name.");
  }
  if (path.size() >= PATH_MAX || !temporary_stem(path)) {
    fail(ErrorCode::kFile, problem, fmt::format("File name too long: paths have at most {} bytes", PATH_MAX - 1),
         "Choose a folder with a shorter path.");
  }
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace ringattn
