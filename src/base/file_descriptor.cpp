// SPDX-License-Identifier: Apache-2.0
#include "base/file_descriptor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

// A rank stops sending heartbeats for a disk that takes longer than this.
constexpr std::chrono::minutes kMaxCall{10};

}  // namespace

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

void fail_file(const MessageTemplate& problem, int error_number, const MessageTemplate& suggestion) {
  fail(ErrorCode::kFile, problem, std::error_code(error_number, std::generic_category()).message(), suggestion);
}

int await_disk(std::function<int()> call) {
  if (RankLiveness::current() == nullptr) return call();
  std::promise<int> promise;
  std::future<int> error = promise.get_future();
  try {
    std::thread([call, promise = std::move(promise)]() mutable {
      const int result = call();
      call = nullptr;  // release what it owns before the caller continues
      promise.set_value(result);
    }).detach();
  } catch (const std::system_error&) {  // the system refused a thread
    return call();
  }
  const auto limit = std::chrono::steady_clock::now() + kMaxCall;
  while (error.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() < limit) heartbeat();
  }
  return error.get();
}

int await_disk(const FileDescriptor& file, std::function<int(int fd)> call) {
  if (RankLiveness::current() == nullptr) return call(file.get());
  const auto own = std::make_shared<FileDescriptor>(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
  if (!own->valid()) return call(file.get());  // no descriptor left: another thread would not get one either
  return await_disk([own, call = std::move(call)] { return call(own->get()); });
}

void sync_file(const FileDescriptor& file, const MessageTemplate& name) {
  const int error =
      await_disk(file, [](int fd) { return uninterrupted([fd] { return ::fsync(fd); }) == 0 ? 0 : errno; });
  if (error == 0) return;
  fail_file({"can't sync ", name, " to the disk"}, error, "Choose another folder, on a disk that is in order.");
}

}  // namespace ringattn
