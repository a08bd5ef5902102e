// SPDX-License-Identifier: Apache-2.0
#include "base/temporary_folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string_view>
#include <system_error>

#include "base/error.hpp"
#include "base/file_descriptor.hpp"
#include "base/temporary_file.hpp"

namespace ringattn {

namespace {

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string why_not(int error) { return std::error_code(error, std::generic_category()).message(); }

void sync_directory(const std::string& path) {
  const FileDescriptor folder(uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  // EINVAL: the file system's directories need no sync.
  if (folder.valid() && (uninterrupted([&] { return ::fsync(folder.get()); }) == 0 || errno == EINVAL)) return;
  fail_file(fmt::format("can't sync {}", path), errno, "Choose another folder, on a disk that is in order.");
}

// Swaps two names, or, where the file system can't, moves the old folder away first.
int replace_folder(const std::string& made, const std::string& path, std::string& old) {
  old = made;
  if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) return 0;
  if (errno == ENOENT) return errno;
  old = made + ".old";
  if (::rename(path.c_str(), old.c_str()) != 0) return errno;
  if (::rename(made.c_str(), path.c_str()) == 0) return 0;
  const int error = errno;
  static_cast<void>(::rename(old.c_str(), path.c_str()));
  return error;
}

}  // namespace

void check_output_folder(const std::string& given, bool replace, const std::string& needed) {
  const std::string path = without_slash(given);
  const std::string problem = fmt::format("can't write {}", path.empty() ? "the output" : path);
  if (path.empty() || path.find('\0') != std::string::npos) {
    fail(ErrorCode::kFile, problem, "it is not a path", "Name a folder.");
  }
  const std::string parent = folder_of(path);
  if (::faccessat(AT_FDCWD, parent.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    fail(ErrorCode::kFile, problem, fmt::format("the folder {}: {}", parent, why_not(errno)),
         "Choose a folder that exists and that you may write to.");
  }
  check_file_name(path, path);
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail_file(problem, errno, "Choose another name.");
    return;
  }
  if (!S_ISDIR(status.st_mode)) fail(ErrorCode::kFile, problem, "it is not a folder", "Choose another name.");
  if (!replace) {
    fail(ErrorCode::kFile, problem, "it exists", {"Choose another name, or replace it with ", setting("force"), "."});
  }
  std::error_code error;
  bool has_needed = false;
  for (auto entry = std::filesystem::directory_iterator(path, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (!entry->is_regular_file(error) || entry->is_symlink(error)) {
      fail(ErrorCode::kFile, problem, fmt::format("it has {}, which is not a file", entry->path().filename().string()),
           "Choose another name; only a folder of files is replaced.");
    }
    has_needed = has_needed || entry->path().filename() == needed;
  }
  if (error) fail(ErrorCode::kFile, problem, why_not(error.value()), "Choose another name.");
  if (has_needed) return;
  fail(ErrorCode::kFile, problem, fmt::format("it exists and has no {}", needed),
       "Choose another name; only an earlier output is replaced.");
}

TemporaryFolder::TemporaryFolder(const std::string& path) : final_path_(without_slash(path)) {
  check_file_name(final_path_, final_path_);
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    path_ = fmt::format("{}.{:08x}.tmp", final_path_, random());
    unfinished_.emplace(path_);
    if (unfinished_->valid()) return;
    if (errno != EEXIST) break;
  }
  const int error = errno;
  unfinished_.reset();
  fail_file(fmt::format("can't create a temporary folder beside {}", final_path_), error,
            "Choose a folder that you may write to.");
}

TemporaryFolder::~TemporaryFolder() {
  if (!unfinished_) return;
  remove_folder_of_files(path_.c_str());
}

void TemporaryFolder::publish(bool replace) {
  sync_directory(path_);
  struct stat status;
  const bool there = ::lstat(final_path_.c_str(), &status) == 0;
  std::string old;
  int error = 0;
  if (there && replace) {
    error = replace_folder(path_, final_path_, old);
  } else if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, final_path_.c_str(), RENAME_NOREPLACE) != 0) {
    error = errno;
    // The file system lacks the flag. Nothing was at the path a moment ago.
    if ((error == EINVAL || error == ENOSYS) && !there) {
      error = ::rename(path_.c_str(), final_path_.c_str()) == 0 ? 0 : errno;
    }
  }
  if (error != 0) {
    fail_file(fmt::format("can't rename {} to {}", path_, final_path_), error, "Choose another name for the output.");
  }
  unfinished_.reset();
  if (!old.empty()) remove_folder_of_files(old.c_str());
  sync_directory(folder_of(final_path_));
}

}  // namespace ringattn
