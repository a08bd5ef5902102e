// SPDX-License-Identifier: Apache-2.0
#include "base/file_descriptor.hpp"

#include <unistd.h>

#include <chrono>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/pulse.hpp"

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

namespace {

// A disk may take so long before it counts as lost.
constexpr std::chrono::minutes kLongestSync{10};

// fsync(), its error or 0.
int sync_now(int fd) {
  return uninterrupted([fd] { return ::fsync(fd); }) == 0 ? 0 : errno;
}

// The same by a thread of its own: a slow disk is no rank's silence, so this one gives signs of life meanwhile.
int sync_beside(int fd) {
  const int own = ::dup(fd);  // the thread may outlive the caller's file
  if (own < 0) return sync_now(fd);
  std::promise<int> promise;
  std::future<int> error = promise.get_future();
  try {
    std::thread([own, promise = std::move(promise)]() mutable {
      const int result = sync_now(own);
      ::close(own);
      promise.set_value(result);
    }).detach();
  } catch (const std::system_error&) {  // no thread is to be had
    ::close(own);
    return sync_now(fd);
  }
  const auto limit = std::chrono::steady_clock::now() + kLongestSync;
  while (error.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() < limit) beat();
  }
  return error.get();
}

}  // namespace

void sync_file(const FileDescriptor& file, const Wording& name) {
  const int error = Pulse::current() == nullptr ? sync_now(file.get()) : sync_beside(file.get());
  if (error == 0) return;
  fail_file({"can't bring ", name, " to the disk"}, error, "Choose another folder, on a disk that is in order.");
}

}  // namespace ringattn
