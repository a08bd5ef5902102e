// SPDX-License-Identifier: Apache-2.0
#include "base/file_descriptor.hpp"

#include <unistd.h>

#include <system_error>

#include "base/error.hpp"

namespace ringattn {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void fail_file(const Wording& problem, int error_number, const Wording& remedy) {
  fail(ErrorCode::kFile, problem, std::error_code(error_number, std::generic_category()).message(), remedy);
}

void sync_file(const FileDescriptor& file, const Wording& name) {
  if (uninterrupted([&] { return ::fsync(file.get()); }) == 0) return;
  fail_file({"can't bring ", name, " to the disk"}, errno, "Choose another folder, on a disk that is in order.");
}

}  // namespace ringattn
